"""Tensors times a power of two while they stream: mantissas stay as they are, in plain values and in blocks.

In: a `TensorSource`. Out: one whose values are multiplied; of blocks, the scales are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from generic_export.weights.source import BlockTensorSource, DerivedTensor, InMemoryTensor, TensorSource
from generic_export.weights.values import value_pieces
from quant.blocks import Q4Blocks, StoredBlocks
from quant.prequantized import ExactTensor

# Bytes of a block, and of the f16 numbers at its beginning that its values are proportional to.
_LAYOUTS = {"q4_0": (18, 2), "q8_1": (36, 4)}


def multiplied(source: TensorSource, factor: float) -> TensorSource:
    """Return a source of the same values times a factor.

    Args:
        source: floats, or blocks; a tensor that has both keeps both.
        factor: a power of two; for 1 the source itself is returned.
    """
    if factor == 1.0:
        return source
    if isinstance(source, ExactTensor):
        return replace(source, blocks=lambda: (_scaled(blocks, factor) for blocks in source.blocks()))
    if isinstance(source, BlockTensorSource):
        return MultipliedBlocks(source, factor)
    return MultipliedTensor(source, factor)


@dataclass(frozen=True, eq=False)
class MultipliedTensor(DerivedTensor):
    """Float values times a factor, in f32 where they are narrower, so that no value leaves the range before it is multiplied."""

    source: TensorSource
    factor: float

    @property
    def dtype(self) -> torch.dtype:
        """f32, or f64 where the source has that."""
        return torch.promote_types(self.source.dtype, torch.float32)

    def chunks(self) -> Iterator[memoryview]:
        """The values as bytes; raises whatever the source raises."""
        for values in value_pieces(self.source):
            yield from InMemoryTensor(self.name, values.to(self.dtype) * self.factor).chunks()


@dataclass(frozen=True, eq=False)
class MultipliedBlocks(StoredBlocks, DerivedTensor):
    """Blocks whose f16 scales are multiplied; the levels stay as they are."""

    source: BlockTensorSource
    factor: float

    @property
    def block_format(self) -> str:
        """That of the source."""
        return self.source.block_format

    def chunks(self) -> Iterator[memoryview]:
        """The blocks as bytes; raises whatever the source raises."""
        block_bytes, scale_bytes = _LAYOUTS[self.block_format]
        rest = b""
        for chunk in self.source.chunks():
            data = np.frombuffer(rest + bytes(chunk), dtype=np.uint8)
            whole = len(data) // block_bytes * block_bytes
            rest = data[whole:].tobytes()
            blocks = data[:whole].reshape(-1, block_bytes).copy()
            scales = np.ascontiguousarray(blocks[:, :scale_bytes]).view(np.float16).astype(np.float32)
            blocks[:, :scale_bytes] = (scales * self.factor).astype(np.float16).view(np.uint8)
            yield blocks.reshape(-1).data


def _scaled(blocks: Q4Blocks, factor: float) -> Q4Blocks:
    return replace(blocks, d=(blocks.d.float() * factor).to(blocks.d.dtype))
