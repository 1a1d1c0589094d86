"""Tensors made of other tensors by moving data, as expressions that can be taken apart and streamed.

In: checkpoint tensors as leaves. Out: bytes in C order. Stacking and joining never hold a whole group, since rows of the
result are rows of its parts; what cannot be taken apart is computed whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from generic_export.compat import pytree
from generic_export.weights.source import CHUNK_BYTES, FileTensor, InMemoryTensor, TensorSource
from generic_export.weights.values import read_tensor


class Indivisible(Exception):  # noqa: N818 - control flow, never seen by a caller
    """An expression that has to be computed whole: its first axis cannot be taken apart."""


class Expression(ABC):
    """A tensor to come: its shape and dtype now, its values later, whole or in parts along the first axis."""

    @abstractmethod
    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        """Return what is made when `values` gives the tensors that it is made of."""

    @cached_property
    def meta(self) -> torch.Tensor:
        """A tensor without values, of its shape and dtype."""
        return self.of(lambda part: part.meta)

    def compute(self) -> torch.Tensor:
        """Return its values, all of them."""
        return self.of(lambda part: part.compute())

    @property
    def shape(self) -> tuple[int, ...]:
        """Known from the shapes of what it is made of."""
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Known from the dtypes of what it is made of."""
        return self.meta.dtype

    def take(self, index: int) -> Expression:
        """Return `self[index]`; raises `Indivisible` where that cannot be had alone."""
        del index
        raise Indivisible

    def rows(self, start: int, stop: int) -> Expression:
        """Return `self[start:stop]`; raises `Indivisible` where that cannot be had alone."""
        del start, stop
        raise Indivisible

    def stream(self) -> Iterator[memoryview] | None:
        """Return its bytes, where they are those of its parts one after the other; None where they are not."""
        return None


# --- the kinds of expression ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TensorLeaf(Expression):
    """A tensor of the checkpoint, or rows of one, or either in another shape."""

    source: TensorSource

    @cached_property
    def meta(self) -> torch.Tensor:
        return torch.empty(self.source.shape, dtype=self.source.dtype, device="meta")

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        return read_tensor(self.source)

    def take(self, index: int) -> Expression:
        return self._part(index, index + 1, self.shape[1:])

    def rows(self, start: int, stop: int) -> Expression:
        return self._part(start, stop, (stop - start, *self.shape[1:]))

    def _part(self, start: int, stop: int, shape: tuple[int, ...]) -> Expression:
        if isinstance(self.source, FileTensor):
            row_bytes = count(self.shape[1:]) * self.dtype.itemsize
            return TensorLeaf(replace(self.source, offset=self.source.offset + start * row_bytes, shape=shape))
        if isinstance(self.source, InMemoryTensor):
            return TensorLeaf(InMemoryTensor(self.source.name, self.source.tensor[start:stop].reshape(shape)))
        raise Indivisible

    def reshaped(self, shape: tuple[int, ...]) -> Expression:
        if isinstance(self.source, FileTensor):
            return TensorLeaf(replace(self.source, shape=shape))
        return Reshaped(self, shape)

    def stream(self) -> Iterator[memoryview]:
        return self.source.chunks()


@dataclass(frozen=True, eq=False)
class Joined(Expression):
    """`torch.cat` of parts of one dtype."""

    parts: tuple[Expression, ...]
    dim: int

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        return torch.cat([values(part) for part in self.parts], self.dim)

    def take(self, index: int) -> Expression:
        if self.dim:
            return Joined(tuple(part.take(index) for part in self.parts), self.dim - 1)
        for part in self.parts:
            if index < part.shape[0]:
                return part.take(index)
            index -= part.shape[0]
        raise Indivisible

    def rows(self, start: int, stop: int) -> Expression:
        if self.dim:
            return Joined(tuple(part.rows(start, stop) for part in self.parts), self.dim)
        kept: list[Expression] = []
        for part in self.parts:
            size = part.shape[0]
            first, last = max(start, 0), min(stop, size)
            if first < last:
                kept.append(part if (first, last) == (0, size) else part.rows(first, last))
            start, stop = start - size, stop - size
        return Joined(tuple(kept), 0) if kept else self.parts[0].rows(0, 0)

    def stream(self) -> Iterator[memoryview] | None:
        if self.dim:
            return None
        return (chunk for part in self.parts for chunk in stream_expression(part))


@dataclass(frozen=True, eq=False)
class Reshaped(Expression):
    """The same values in the same order under another shape."""

    whole: Expression
    sizes: tuple[int, ...]

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        return values(self.whole).reshape(self.sizes)

    def take(self, index: int) -> Expression:
        if self._splits_first_axis_only():
            return reshaped(self.whole.take(index), self.shape[1:])
        if self.shape[0] == 1:
            return reshaped(self.whole, self.shape[1:])
        return reshaped(self.rows(index, index + 1), self.shape[1:])

    def rows(self, start: int, stop: int) -> Expression:
        if (start, stop) == (0, self.shape[0]):
            return self
        if self._splits_first_axis_only():
            return reshaped(self.whole.rows(start, stop), (stop - start, *self.shape[1:]))
        row, step = count(self.shape[1:]), count(self.whole.shape[1:])
        if not self.whole.shape or not step or start * row % step or stop * row % step:
            raise Indivisible
        return reshaped(self.whole.rows(start * row // step, stop * row // step), (stop - start, *self.shape[1:]))

    def _splits_first_axis_only(self) -> bool:
        return bool(self.shape and self.whole.shape) and self.shape[0] == self.whole.shape[0]

    def stream(self) -> Iterator[memoryview]:
        return stream_expression(self.whole)


@dataclass(frozen=True, eq=False)
class Narrowed(Expression):
    """`whole.narrow(dim, start, length)` along an axis that is not the first."""

    whole: Expression
    dim: int
    start: int
    length: int

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        return values(self.whole).narrow(self.dim, self.start, self.length)

    def take(self, index: int) -> Expression:
        return narrowed(self.whole.take(index), self.dim - 1, self.start, self.length)

    def rows(self, start: int, stop: int) -> Expression:
        return replace(self, whole=self.whole.rows(start, stop))


@dataclass(frozen=True, eq=False)
class Transposed(Expression):
    """`whole.transpose(dim0, dim1)`, with `dim0 < dim1`."""

    whole: Expression
    dim0: int
    dim1: int

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        return values(self.whole).transpose(self.dim0, self.dim1)

    def take(self, index: int) -> Expression:
        if self.dim0 == 0:
            raise Indivisible
        return Transposed(self.whole.take(index), self.dim0 - 1, self.dim1 - 1)

    def rows(self, start: int, stop: int) -> Expression:
        if self.dim0 == 0:
            raise Indivisible
        return replace(self, whole=self.whole.rows(start, stop))


@dataclass(frozen=True, eq=False)
class Computed(Expression):
    """One output of any other operator; all that it needs is held at once.

    Args:
        operator: called with `args` and `kwargs`, in which expressions stand for their values.
        output: which of its results; None where it has one.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: int | None

    def of(self, values: Callable[[Expression], torch.Tensor]) -> torch.Tensor:
        def value(each: Any) -> Any:
            return values(each) if isinstance(each, Expression) else each

        args, kwargs = pytree.tree_map(value, (self.args, dict(self.kwargs)))
        result = self.operator(*args, **kwargs)
        return result if self.output is None else result[self.output]


def count(shape: Sequence[int]) -> int:
    """Return how many values a shape holds."""
    return torch.Size(shape).numel()


def reshaped(whole: Expression, shape: tuple[int, ...]) -> Expression:
    """Return the same values in the same order under `shape`."""
    if isinstance(whole, Reshaped):
        whole = whole.whole
    if whole.shape == shape:
        return whole
    return whole.reshaped(shape) if isinstance(whole, TensorLeaf) else Reshaped(whole, shape)


def narrowed(whole: Expression, dim: int, start: int, length: int) -> Expression:
    """Return `whole.narrow(dim, start, length)`; raises `Indivisible` along a first axis that cannot be taken apart."""
    if length == whole.shape[dim]:
        return whole
    if dim == 0:
        return whole.rows(start, start + length)
    return Narrowed(whole, dim, start, length)


def stream_expression(expression: Expression) -> Iterator[memoryview]:
    """Yield the bytes of an expression in C order, from pieces of about a chunk wherever it can be taken apart."""
    stream = expression.stream()
    if stream is not None:
        yield from stream
        return
    row_bytes = count(expression.shape[1:]) * expression.dtype.itemsize
    length = expression.shape[0] if expression.shape else 1
    if length * row_bytes > CHUNK_BYTES:
        try:
            if row_bytes > CHUNK_BYTES:
                pieces = [expression.take(index) for index in range(length)]
            else:
                step = CHUNK_BYTES // row_bytes
                pieces = [expression.rows(start, min(start + step, length)) for start in range(0, length, step)]
        except Indivisible:
            pass
        else:
            for piece in pieces:
                yield from stream_expression(piece)
            return
    yield from InMemoryTensor("", expression.compute()).chunks()
