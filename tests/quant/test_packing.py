"""Blocks to bytes and back, against the `gguf` package."""

from __future__ import annotations

import gguf
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import WeightError
from quant.algorithms import BUILT_IN
from quant.blocks import Q4Blocks
from quant.packing import check_quantizable, dequantize_bytes, pack_q4_0, pack_q8_1, unpack_q4_0, unpack_q8_1

Q4_0 = gguf.GGMLQuantizationType.Q4_0

weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 3).map(lambda groups: 32 * groups)),
    # Below, gguf divides by a scale whose inverse overflows.
    elements=st.floats(-1e4, 1e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30),
)


def min_max_bytes(weight: np.ndarray) -> np.ndarray:
    return pack_q4_0(BUILT_IN["min_max"].quantize(torch.from_numpy(weight))).numpy()


@settings(max_examples=60, deadline=None)
@given(weights)
def test_min_max_gives_the_bytes_of_gguf(weight: np.ndarray) -> None:
    assert np.array_equal(min_max_bytes(weight), gguf.quantize(weight, Q4_0))


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e-6, 1.0, 3e4])
def test_min_max_gives_the_bytes_of_gguf_at_any_scale(scale: float) -> None:
    weight = (np.random.default_rng(0).standard_normal((64, 256)) * scale).astype(np.float32)
    assert np.array_equal(min_max_bytes(weight), gguf.quantize(weight, Q4_0))


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda blocks: 18 * blocks))))
def test_any_bytes_dequantise_as_in_gguf_and_survive_a_round_trip(data: np.ndarray) -> None:
    blocks = unpack_q4_0(torch.from_numpy(data))
    assert np.array_equal(pack_q4_0(blocks).numpy(), data)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, Q4_0)
    assert np.array_equal(blocks.dequantize().numpy(), expected, equal_nan=True)


def test_nibbles_lie_in_ggufs_order() -> None:
    blocks = Q4Blocks(torch.arange(32, dtype=torch.uint8).view(1, 32) % 16, torch.tensor([1.5], dtype=torch.float16))
    assert pack_q4_0(blocks).tolist() == [0x00, 0x3E, *(j | j << 4 for j in range(16))]


@settings(max_examples=40, deadline=None)
@given(weights)
def test_q8_1_rounds_to_half_a_step(weight: np.ndarray) -> None:
    packed = pack_q8_1(torch.from_numpy(weight))
    assert packed.shape == (weight.shape[0], weight.shape[1] // 32 * 36)
    groups = weight.reshape(-1, 32)
    found = unpack_q8_1(packed).numpy().reshape(-1, 32)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    # Half a step, and what rounding the scale to float16 adds at the far end (subnormal scales round coarsely).
    assert (np.abs(found - groups) <= largest * (0.5 / 127 + 2**-10) + 127 * 2**-25).all()


def test_q8_1_stores_the_sum_of_each_block() -> None:
    packed = pack_q8_1(torch.linspace(-1, 2, 32).view(1, 32))
    d, total = packed[0, :4].view(torch.float16).float().tolist()
    assert total == pytest.approx(d * packed[0, 4:].view(torch.int8).sum().item(), rel=1e-3)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 64)
    assert not dequantize_bytes(pack_q8_1(zeros), "q8_1").any()
    for quantizer in BUILT_IN.values():
        assert not dequantize_bytes(pack_q4_0(quantizer.quantize(zeros)), "q4_0").any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_and_nan_are_refused_by_name(bad: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = bad
    for refuse in (check_quantizable, lambda values, name: pack_q8_1(values, name=name)):
        with pytest.raises(WeightError, match="tensor lm_head: it contains inf or NaN"):
            refuse(weight, "lm_head")


def test_values_whose_sum_overflows_are_not_taken_for_infinite() -> None:
    check_quantizable(torch.full((1, 64), 3e38), "w")


def test_rows_of_48_values_are_refused_by_name() -> None:
    with pytest.raises(WeightError, match="tensor w: its last axis is 48"):
        check_quantizable(torch.zeros(2, 48), "w")


@pytest.mark.parametrize(("data", "scheme"), [(17, "q4_0"), (35, "q8_1"), (18, "q5_0")])
def test_damaged_bytes_are_refused(data: int, scheme: str) -> None:
    with pytest.raises(WeightError):
        dequantize_bytes(torch.zeros(data, dtype=torch.uint8), scheme)


def test_q8_1_refuses_scales_beyond_float16() -> None:
    with pytest.raises(WeightError, match="too large for Q8_1"):
        pack_q8_1(torch.full((1, 32), 1e8), name="w")
