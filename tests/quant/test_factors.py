"""Tensors times a power of two: exactly that, in plain values and in blocks, however they are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.weights.source import InMemoryBlocks, InMemoryTensor, TensorSource
from quant.blocks import Q4Blocks
from quant.factors import multiplied
from quant.packing import dequantize_bytes, pack_q4_0, pack_q8_1
from quant.prequantized import ExactTensor


def _bytes(source: TensorSource) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(bytes(chunk) for chunk in source.chunks())), dtype=torch.uint8)


_SHAPE = (6, 64)


def _weight(seed: int) -> torch.Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(seed))


def _q4_blocks(seed: int) -> Q4Blocks:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (6, 2, 32), dtype=torch.uint8, generator=generator)
    return Q4Blocks(levels, torch.randn((6, 2), generator=generator).half())


@dataclass(frozen=True)
class _InPieces(InMemoryBlocks):
    """Blocks in chunks that end anywhere."""

    size: int = 7

    def chunks(self) -> Iterator[memoryview]:
        for chunk in super().chunks():
            yield from (chunk[start : start + self.size] for start in range(0, len(chunk), self.size))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 99),
    st.sampled_from([-12, -5, -1, 3, 12]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_plain_values_keep_their_mantissas(seed: int, exponent: int, dtype: torch.dtype) -> None:
    weight = _weight(seed).to(dtype)
    source = multiplied(InMemoryTensor("w", weight), 2.0**exponent)
    assert source.dtype is torch.float32 and source.nbytes == 4 * weight.numel()
    assert torch.equal(_bytes(source).view(torch.float32).view(_SHAPE), weight.float() * 2.0**exponent)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 99), st.integers(-4, 4), st.integers(1, 400), st.sampled_from(["q4_0", "q8_1"]))
def test_blocks_keep_their_levels(seed: int, exponent: int, size: int, block_format: str) -> None:
    packed = pack_q4_0(_q4_blocks(seed)) if block_format == "q4_0" else pack_q8_1(_weight(seed))
    blob = packed.contiguous().view(torch.uint8).reshape(-1)
    source = multiplied(_InPieces("w", _SHAPE, block_format, blob, size), 2.0**exponent)
    found, expected = (dequantize_bytes(data.view(6, -1), block_format) for data in (_bytes(source), blob))
    assert source.nbytes == blob.numel()
    torch.testing.assert_close(found, expected * 2.0**exponent, rtol=0, atol=2.0**-20)


def test_a_tensor_that_is_q4_0_already_keeps_values_and_blocks() -> None:
    blocks = _q4_blocks(0)
    source = multiplied(ExactTensor("w", _SHAPE, lambda: iter([blocks])), 0.25)
    assert isinstance(source, ExactTensor)
    values = _bytes(source).view(torch.float32).view(_SHAPE)
    assert torch.equal(values, blocks.dequantize() / 4)
    assert torch.equal(dequantize_bytes(_bytes(source.stored("w")).view(6, -1), "q4_0"), values)


def test_a_factor_of_one_changes_nothing() -> None:
    source = InMemoryTensor("w", _weight(0))
    assert multiplied(source, 1.0) is source
