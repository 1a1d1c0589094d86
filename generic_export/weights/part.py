"""Part of a parameter as a stored tensor of its own: cut, turned and padded while it streams.

In: a parameter's source and a `TensorPart` that says what to take of it. Out: a source of that part, one slice of the first
axis (one expert) in memory at a time. Engines read such parts where a model slices its weights
(docs/contributing/engine-facts.md#where-blocks-may-be-used).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from generic_export.errors import WeightError
from generic_export.weights.source import CHUNK_BYTES, InMemoryTensor, PlainValues, TensorSource
from generic_export.weights.values import row_pieces

Cut = tuple[int, int, int]
"""begin, end and step along one axis."""


@dataclass(frozen=True)
class TensorPart:
    """What a stored tensor is of a parameter: the parameter under another shape, cut, its axes in another order, padded.

    Attributes:
        parameter: name of the parameter.
        view: the shape that the parameter is read in, rank 2 or more.
        cuts: per axis of that view.
        order: axis i of the part is axis `order[i]` of the cut view; the first axis stays first.
        shape: of the stored tensor; zeros follow the values along an axis where it is larger than the part.
    """

    parameter: str
    view: tuple[int, ...]
    cuts: tuple[Cut, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(parameter: str, shape: tuple[int, ...]) -> TensorPart:
        """Return all of a parameter."""
        return TensorPart(parameter, shape, tuple((0, size, 1) for size in shape), tuple(range(len(shape))), shape)

    @staticmethod
    def parse(record: Mapping[str, Any]) -> TensorPart:
        """Return the part that `dataclasses.asdict` made a record of."""
        cuts = tuple((int(begin), int(end), int(step)) for begin, end, step in record["cuts"])
        view, order, shape = (tuple(int(each) for each in record[name]) for name in ("view", "order", "shape"))
        return TensorPart(str(record["parameter"]), view, cuts, order, shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter as it lies there."""
        return self == TensorPart.whole(self.parameter, self.shape)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of the values, without padding."""
        sizes = [len(range(*cut)) for cut in self.cuts]
        return tuple(sizes[axis] for axis in self.order)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the part of a parameter's values as a view of them, without padding."""
        cut = parameter.view(self.view)[tuple(slice(*each) for each in self.cuts)]
        return cut.permute(self.order)

    def inner(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values of a stored tensor, without padding."""
        return stored[tuple(slice(size) for size in self.inner_shape)]


@dataclass(frozen=True, eq=False)
class PartTensor(PlainValues):
    """A part of a parameter as a source.

    Args:
        name: of the stored tensor.
        source: the whole parameter.
        part: what of it.

    Raises:
        WeightError: the parameter has another number of values than the part's view.
    """

    name: str
    source: TensorSource
    part: TensorPart

    def __post_init__(self) -> None:
        if math.prod(self.source.shape) != math.prod(self.part.view):
            raise WeightError(
                f"tensor {self.part.parameter}: expected shape {list(self.part.view)}, but its source has "
                f"{list(self.source.shape)}.",
                "The checkpoint does not fit this config.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def chunks(self) -> Iterator[memoryview]:
        """The part's bytes; raises whatever the source raises."""
        begin, end, step = self.part.cuts[0]
        wanted = range(begin, end, step)
        pending, filled = _buffer(self.part.shape[1:], self.dtype, len(wanted))
        size = math.prod(self.part.view[1:])
        for index, slab in enumerate(row_pieces(self.source, size, size)):
            if index >= end:
                break
            if index not in wanted:
                continue
            inner = self._turned(slab.view(self.part.view[1:]))
            pending[filled][tuple(slice(size) for size in inner.shape)] = inner
            filled += 1
            if filled == len(pending):
                yield from InMemoryTensor(self.name, pending).chunks()
                pending, filled = _buffer(self.part.shape[1:], self.dtype, len(wanted))
        if filled:
            yield from InMemoryTensor(self.name, pending[:filled]).chunks()
        for _ in range(len(wanted), self.part.shape[0]):
            yield from InMemoryTensor(self.name, torch.zeros(self.part.shape[1:], dtype=self.dtype)).chunks()

    def _turned(self, slab: torch.Tensor) -> torch.Tensor:
        cut = slab[tuple(slice(*each) for each in self.part.cuts[1:])]
        return cut.permute([axis - 1 for axis in self.part.order[1:]])


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, most: int) -> tuple[torch.Tensor, int]:
    """Return room for as many slabs as make a chunk, and how many it holds: none yet."""
    rows = max(1, min(most, CHUNK_BYTES // max(1, math.prod(shape) * dtype.itemsize)))
    return torch.zeros((rows, *shape), dtype=dtype), 0


def part_source(label: str, part: TensorPart, source: TensorSource) -> TensorSource:
    """Return the source of a stored tensor that is part of a parameter."""
    return source if part.is_whole else PartTensor(label, source, part)
