"""What a decoder keeps between calls, as named tensors of the graph: keys and values that grow, and states of fixed size.

In: the slots that a state form found in a model. Out: `StateTensor`s, which graph, manifest, engine runs and bundles share.
Every state starts as zeros: nothing along the growing axis, and a fixed state of zeros is the same as no past at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from generic_export.errors import ArchiveError, CaptureError

BATCH, PAST = "B", "P"
"""Symbols of a state's shape: sequences, and past positions."""

_GROWING_KINDS = frozenset(
    {
        "cache_key",
        "cache_value",
        "indexer_key",
        "indexer_position",
        "index_key",
        "compressor_input",
        "indexer_input",
    }
)
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool"}


@dataclass(frozen=True)
class Slot:
    """Identifies one state of a model.

    Attributes:
        kind: `cache_key`, `cache_value`, `conv_state`, `recurrent_state`, ...
        layer: index of the layer.
        index: index among the states of the same kind in the layer.
    """

    kind: str
    layer: int
    index: int = 0

    @property
    def grows(self) -> bool:
        """Whether the state has one entry per position."""
        return self.kind in _GROWING_KINDS


PAST_LENGTH = Slot("past_length", 0)
"""How many positions are past, int64 [1], where every layer forgets some: see `kvcache.states.windows`."""


def window_symbol(window: int) -> str:
    """Return the symbol for what a layer keeps that sees `window` positions: up to window - 1."""
    return f"W{window}"


def is_window_symbol(symbol: str) -> bool:
    """Say whether a symbol is one of `window_symbol`."""
    return symbol[:1] == "W" and symbol[1:].isdigit()


States = dict[Slot, torch.Tensor]
"""The states of a model at one moment, in the order of the graph's inputs."""


@dataclass(frozen=True)
class StateTensor:
    """One state of a graph: an input, and an output that is the input of the next call.

    Attributes:
        input_name: name of the input, such as `in_cache_key_3`.
        output_name: name of the output, such as `out_cache_key_3`.
        kind: see `Slot`.
        layer: index of the layer.
        shape: sizes; `"B"` is the batch, `"P"` the number of past positions, and `"W8"` those within a window of 8.
        axis: the axis that grows with the positions, possibly up to a window; None for a fixed size.
        dtype: `f32`, `f16` or `i64`.
        index: see `Slot`.
        window: number of positions that the layer sees, if the state keeps at most `window - 1`; None if it keeps all.
    """

    input_name: str
    output_name: str
    kind: str
    layer: int
    shape: tuple[int | str, ...]
    axis: int | None
    dtype: str
    index: int = 0
    window: int | None = None

    @property
    def slot(self) -> Slot:
        """Identifies the state in the model."""
        return Slot(self.kind, self.layer, self.index)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in PyTorch."""
        return next(dtype for dtype, name in _DTYPES.items() if name == self.dtype)

    @property
    def grows(self) -> bool:
        """Whether the state has one entry per position."""
        return self.axis is not None and self.window is None

    def kept(self, length: int) -> int:
        """Return the number of past positions in the state; 0 for a fixed size.

        Args:
            length: number of past positions.
        """
        if self.axis is None:
            return 0
        return length if self.window is None else min(length, self.window - 1)

    def sizes(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape after a number of positions.

        Args:
            batch: number of sequences.
            length: number of past positions.
        """
        return tuple(
            dim if isinstance(dim, int) else batch if dim == BATCH else self.kept(length) for dim in self.shape
        )

    def at_start(self, batch: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the state of the first call, in f32 for f16 because npz files hold no f16.

        Args:
            batch: number of sequences.
        """
        return np.zeros(self.sizes(batch, 0), {"i64": np.int64, "bool": np.bool_}.get(self.dtype, np.float32))

    def dynamic_axes(self, *, batched: bool) -> dict[int, str]:
        """Return the symbolic axes as `{axis: symbol}`.

        Args:
            batched: include the batch.
        """
        return {axis: dim for axis, dim in enumerate(self.shape) if isinstance(dim, str) and (batched or dim != BATCH)}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> StateTensor:
        """Parse a state of `export.json`, including the form of early releases, which had keys and values only.

        Args:
            record: JSON of the state.

        Raises:
            ArchiveError: a field is missing.
        """
        try:
            if "head_dim" in record:
                return _from_key_value_record(record)
            return StateTensor(**{**record, "shape": tuple(record["shape"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ArchiveError(
                f"export.json has the incomplete state {dict(record)!r}: {error}.",
                "Export the model again.",
            ) from error


def _from_key_value_record(record: Mapping[str, Any]) -> StateTensor:
    name: str = record["input_name"]  # in_cache_key_3
    kind, layer = name.removeprefix("in_").rsplit("_", 1)
    shape = (BATCH, record["num_key_value_heads"], PAST, record["head_dim"])
    return StateTensor(name, record["output_name"], kind, int(layer), shape, record["axis"], "f32")


@dataclass(frozen=True)
class Probe:
    """The states that a model left after one run on shapes.

    Attributes:
        batch, steps: of the run.
        states: what it left.
    """

    batch: int
    steps: int
    states: Mapping[Slot, torch.Tensor]


def describe_states(first: Probe, second: Probe, owner: str) -> tuple[StateTensor, ...]:
    """Return the states of a model that ran twice, with another batch and another number of steps; not those of no width.

    Args:
        first, second: the runs; an axis that has the batch's size in both is the batch, one that has the steps' grows.
        owner: the model's class, for the message.

    Raises:
        CaptureError: a size follows neither, or two axes grow.
    """
    several = Counter((slot.kind, slot.layer) for slot in first.states)
    described = []
    for slot, tensor in first.states.items():
        if not tensor.numel():  # GLM-5 Next: keys without a rotary part
            continue
        shape = tuple(
            _symbol(sizes, first, second, slot, owner)
            for sizes in zip(tensor.shape, second.states[slot].shape, strict=True)
        )
        growing = [axis for axis, dim in enumerate(shape) if dim == PAST]
        if len(growing) > 1:
            raise CaptureError(f"{owner}: {slot.kind} of layer {slot.layer} grows along {len(growing)} axes.")
        name = f"{slot.kind}_{slot.layer}" + (f"_{slot.index}" if several[slot.kind, slot.layer] > 1 else "")
        described.append(
            StateTensor(
                f"in_{name}",
                f"out_{name}",
                slot.kind,
                slot.layer,
                shape,
                growing[0] if growing else None,
                _DTYPES.get(tensor.dtype, str(tensor.dtype)),
                slot.index,
            )
        )
    return tuple(described)


def _symbol(sizes: Sequence[int], first: Probe, second: Probe, slot: Slot, owner: str) -> int | str:
    before, after = sizes
    if before == after:
        return int(before)
    if (before, after) == (first.batch, second.batch):
        return BATCH
    if (before, after) == (first.steps, second.steps):
        return PAST
    raise CaptureError(
        f"{owner}: {slot.kind} of layer {slot.layer} has size {before} after {first.steps} tokens and {after} "
        f"after {second.steps}.",
        "A state must have a fixed size or one entry per token; this one is not supported.",
    )
