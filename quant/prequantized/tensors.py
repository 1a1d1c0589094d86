"""Tensors of quantised checkpoints as sources of float values; the ones that are Q4_0 already give their blocks too.

In: a function that decodes a tensor piece by piece. Out: `DecodedTensor` (values) and `ExactTensor` (values, or blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from generic_export.errors import CorruptCheckpointError, MissingTensorError, WeightError
from generic_export.weights.source import InMemoryTensor, PlainValues, TensorSource
from quant.blocks import Q4Blocks, StoredBlocks
from quant.packing import pack_q4_0

PIECE_VALUES = 1 << 21
_EXAMPLES = 2


@dataclass(frozen=True, eq=False)
class DecodedTensor(PlainValues):
    """Values that are decoded while they stream.

    Args:
        name: the tensor's name in a checkpoint that is not quantised.
        shape: of the values.
        pieces: yields the values in C order, in `dtype`.
        dtype: of the pieces; float32 holds every format's values exactly, or as exactly as its own decoder.
        was_quantized: false where the format holds plain floats.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[torch.Tensor]]
    dtype: torch.dtype = torch.float32
    was_quantized: bool = True

    def chunks(self) -> Iterator[memoryview]:
        """The values as bytes; raises whatever decoding raises."""
        for piece in self.pieces():
            yield from InMemoryTensor(self.name, piece.contiguous()).chunks()


@dataclass(frozen=True, eq=False)
class ExactTensor(PlainValues):
    """A tensor whose values are those of Q4_0 blocks: a source of float32 values, and of the very blocks.

    Args:
        name: the tensor's name in a checkpoint that is not quantised.
        shape: of the values; the last axis is a multiple of 32.
        blocks: yields the blocks in row order, whole rows at a time.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Q4Blocks]]

    @property
    def dtype(self) -> torch.dtype:
        """Level times scale needs up to 15 bits, more than float16 has."""
        return torch.float32

    def chunks(self) -> Iterator[memoryview]:
        """The float32 values as bytes; raises whatever reading raises."""
        for blocks in self.blocks():
            yield from InMemoryTensor(self.name, blocks.dequantize()).chunks()

    def stored(self, label: str) -> StoredQ4:
        """Return the source of the blocks, under a name of its own."""
        return StoredQ4(self, label)


@dataclass(frozen=True, eq=False)
class StoredQ4(StoredBlocks):
    """The blocks of an `ExactTensor`, as `.dat` files and GGUF hold them."""

    tensor: ExactTensor
    name: str
    block_format: str = "q4_0"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.tensor.shape

    def chunks(self) -> Iterator[memoryview]:
        """The blocks as bytes.

        Raises:
            WeightError: a scale is inf or nan.
        """
        for blocks in self.tensor.blocks():
            if not bool(blocks.d.isfinite().all()):
                raise WeightError(f"tensor {self.name}: a scale is inf or nan.", "Repair the checkpoint.")
            yield from InMemoryTensor(self.name, pack_q4_0(blocks)).chunks()


@dataclass(frozen=True)
class Decoding:
    """A quantised checkpoint as one that is not.

    Attributes:
        tensors: name -> values, under the names of the unquantised model; what is no part of a format as it was.
        notes: what the user should know, one sentence each.
    """

    tensors: Mapping[str, TensorSource]
    notes: tuple[str, ...] = ()


class Layers:
    """Collects what became of a checkpoint's tensors while a format's decoder goes through them; one for each decoding."""

    def __init__(self, tensors: Mapping[str, TensorSource]) -> None:
        self._tensors = tensors
        self._made: dict[str, TensorSource] = {}
        self._consumed: set[str] = set()
        self._reasons: dict[str, list[str]] = {}

    def with_suffix(self, suffix: str) -> list[str]:
        """Return what comes before a suffix in the names that end with it, sorted."""
        return sorted(name.removesuffix(suffix) for name in self._tensors if name.endswith(suffix))

    def get(self, name: str) -> TensorSource | None:
        """Return a tensor of the checkpoint and count it as used, or None."""
        if name not in self._tensors:
            return None
        self._consumed.add(name)
        return self._tensors[name]

    def need(self, name: str) -> TensorSource:
        """Return a tensor of the checkpoint and count it as used.

        Raises:
            MissingTensorError: it is not there.
        """
        tensor = self.get(name)
        if tensor is None:
            raise MissingTensorError(
                f"the checkpoint has no tensor {name!r}, a part of a quantized one.",
                "The checkpoint is incomplete, or not in the format named in its config.json.",
            )
        return tensor

    def drop(self, name: str) -> None:
        """Count a tensor as used that says nothing of the values."""
        self.get(name)

    def add(self, tensor: TensorSource, reason: str = "") -> None:
        """Add a decoded tensor, and why its values cannot be kept as they are."""
        self._made[tensor.name] = tensor
        if reason:
            self._reasons.setdefault(reason, []).append(tensor.name)

    def decoding(self, format_name: str) -> Decoding:
        """Return the whole checkpoint.

        Raises:
            CorruptCheckpointError: nothing in it was in this format.
        """
        if not self._made:
            raise CorruptCheckpointError(
                f"config.json says that the weights are quantized ({format_name}), but no tensor is.",
                "If the weights are not quantized, remove quantization_config from config.json.",
            )
        rest = {name: tensor for name, tensor in self._tensors.items() if name not in self._consumed}
        notes = (
            (
                f"{format_name}: {len(names)} tensor{'s' * (len(names) > 1)} ({_some(names)}) "
                f"{'are' if len(names) > 1 else 'is'} dequantized: {reason}."
            )
            for reason, names in self._reasons.items()
        )
        return Decoding(rest | self._made, tuple(notes))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")


def ranges(total: int, values_each: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that cover `total` items, each of about `PIECE_VALUES` values and a multiple of `multiple` items."""
    step = max(1, PIECE_VALUES // max(1, values_each) // multiple) * multiple
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def fits_float16(scales: torch.Tensor) -> bool:
    """Say whether float16 holds scales without rounding."""
    return bool((scales.to(torch.float16).to(torch.float32) == scales.to(torch.float32)).all())
