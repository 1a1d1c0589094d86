"""GPTQ, AWQ and compressed-tensors: known integers packed in the test come back as the very values, exact where Q4_0 allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import CorruptCheckpointError, MissingTensorError, WeightError
from generic_export.weights.source import InMemoryTensor, TensorSource
from generic_export.weights.values import read_tensor
from quant.packing import dequantize_bytes
from quant.prequantized import DecodedTensor, Decoding, ExactTensor, decode_checkpoint
from quant.prequantized.tensors import PIECE_VALUES
from tests.int4_checkpoints import awq_layer, compressed_layer, gptq_layer, values_of

N, K = 16, 128


def drawn(
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    rows: int = N,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels, scales, zero points and the group of each input."""
    random = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 1 << bits, (rows, K), generator=random)
    scales = (torch.rand((rows, K // group), generator=random) * 0.01 + 0.001).to(dtype)
    zeros = torch.full(scales.shape, 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, scales.shape, generator=random)
    return levels, scales, zeros, torch.arange(K) // group


def sources(parts: dict[str, torch.Tensor], path: str = "layer") -> dict[str, TensorSource]:
    return {f"{path}.{name}": InMemoryTensor(f"{path}.{name}", tensor) for name, tensor in parts.items()}


def compressed_config(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": True} | weights
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": args}}}


def decoded(method: str, data: tuple[torch.Tensor, ...], bits: int = 4) -> Decoding:
    levels, scales, zeros, _ = data
    if method == "gptq":
        config: dict[str, Any] = {"quant_method": "gptq", "bits": bits}
        return decode_checkpoint(config, sources(gptq_layer(levels, scales, zeros, bits=bits)))
    if method == "awq":
        return decode_checkpoint({"quant_method": "awq", "bits": 4}, sources(awq_layer(levels, scales, zeros)))
    middle = bool((zeros == 1 << (bits - 1)).all())
    parts = compressed_layer(levels, scales, None if middle else zeros, bits=bits)
    return decode_checkpoint(compressed_config(num_bits=bits), sources(parts))


def check_blocks(tensor: TensorSource, expected: torch.Tensor) -> None:
    """The values, and the values of the blocks, are the expected ones bit for bit."""
    assert isinstance(tensor, ExactTensor)
    assert torch.equal(read_tensor(tensor), expected)
    stored = tensor.stored("label")
    data = torch.frombuffer(bytearray().join(stored.chunks()), dtype=torch.uint8)
    assert data.numel() == stored.nbytes == expected.numel() // 32 * 18
    assert torch.equal(dequantize_bytes(data.reshape(expected.shape[0], -1), "q4_0"), expected)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_symmetric_groups_of_32_are_kept_exactly(method: str, group: int, dtype: torch.dtype) -> None:
    data = drawn(group, dtype=dtype)
    decoding = decoded(method, data)
    assert decoding.tensors.keys() == {"layer.weight"} and not decoding.notes
    check_blocks(decoding.tensors["layer.weight"], values_of(*data))


@given(seed=st.integers(0, 1 << 20), method=st.sampled_from(["gptq", "awq", "compressed-tensors"]), sym=st.booleans())
def test_any_integers_come_back(seed: int, method: str, sym: bool) -> None:
    data = drawn(32, symmetric=sym, seed=seed, rows=8)
    tensor = decoded(method, data).tensors["layer.weight"]
    assert isinstance(tensor, ExactTensor) == bool((data[2] == 8).all())
    assert torch.equal(read_tensor(tensor), values_of(*data))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"symmetric": False}, "zero points are not all 8"), ({"group": 16}, "groups are not a multiple of 32")],
)
def test_what_is_no_q4_0_is_dequantised_with_a_note(method: str, change: dict[str, Any], reason: str) -> None:
    data = drawn(**({"group": 32} | change))
    decoding = decoded(method, data)
    tensor = decoding.tensors["layer.weight"]
    assert isinstance(tensor, DecodedTensor) and tensor.was_quantized
    assert torch.equal(read_tensor(tensor), values_of(*data))
    (note,) = decoding.notes
    assert reason in note and "1 tensor (layer.weight) is dequantized" in note


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("bits", [2, 8])
def test_other_widths_are_dequantised(method: str, bits: int) -> None:
    data = drawn(64, bits=bits)
    decoding = decoded(method, data, bits)
    assert torch.equal(read_tensor(decoding.tensors["layer.weight"]), values_of(*data))
    assert f"have {bits} bits" in decoding.notes[0]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_scales_that_float16_does_not_hold(method: str) -> None:
    levels, scales, zeros, groups = drawn(32, dtype=torch.bfloat16)
    scales[0, 0] = 1e-9
    decoding = decoded(method, (levels, scales, zeros, groups))
    assert "its scales do not fit float16" in decoding.notes[0]
    assert torch.equal(read_tensor(decoding.tensors["layer.weight"]), values_of(levels, scales, zeros, groups))


# --- GPTQ ---------------------------------------------------------------------------------------------


def test_gptq_in_activation_order_is_dequantised() -> None:
    levels, scales, zeros, groups = drawn(32)
    order = groups[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    layer = gptq_layer(levels, scales, zeros, g_idx=order.to(torch.int32))
    decoding = decode_checkpoint({"quant_method": "gptq", "bits": 4, "desc_act": True}, sources(layer))
    assert "activation order" in decoding.notes[0]
    assert torch.equal(read_tensor(decoding.tensors["layer.weight"]), values_of(levels, scales, zeros, order))


def test_gptq_groups_that_change_places_whole_are_kept() -> None:
    levels, scales, zeros, groups = drawn(32)
    order = groups.flip(0)
    layer = gptq_layer(levels, scales, zeros, g_idx=order.to(torch.int32))
    tensor = decode_checkpoint({"quant_method": "gptq", "bits": 4}, sources(layer)).tensors["layer.weight"]
    check_blocks(tensor, values_of(levels, scales, zeros, order))


def test_the_two_gptq_formats_differ_by_one_in_their_zero_points() -> None:
    levels, scales, zeros, groups = drawn(32)
    layer = sources(gptq_layer(levels, scales, zeros, offset=0))
    config = {"quant_method": "gptq", "bits": 4}
    second = decode_checkpoint(config | {"checkpoint_format": "gptq_v2"}, layer).tensors["layer.weight"]
    check_blocks(second, values_of(levels, scales, zeros, groups))
    first = decode_checkpoint(config | {"checkpoint_format": "gptq"}, layer).tensors["layer.weight"]
    assert torch.equal(read_tensor(first), values_of(levels, scales, zeros + 1, groups))


def test_a_zero_point_of_sixteen_does_not_wrap() -> None:
    levels, scales, zeros, groups = drawn(32)
    zeros = torch.full_like(zeros, 16)
    tensor = decoded("gptq", (levels, scales, zeros, groups)).tensors["layer.weight"]
    assert torch.equal(read_tensor(tensor), values_of(levels, scales, zeros, groups))


# --- whole checkpoints --------------------------------------------------------------------------------


def test_the_rest_of_a_checkpoint_stays_as_it_is() -> None:
    data = drawn(32)
    rest = sources({"bias": torch.zeros(N), "norm": torch.ones(K)})
    layer = sources(gptq_layer(*data[:3]))
    decoding = decode_checkpoint({"quant_method": "gptq", "bits": 4}, layer | rest)
    assert decoding.tensors.keys() == {"layer.weight", "layer.bias", "layer.norm"}
    assert decoding.tensors["layer.bias"] is rest["layer.bias"]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tensors_of_several_pieces(method: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.prequantized.tensors.PIECE_VALUES", 3 * K)  # not a multiple of AWQ's eight columns
    assert PIECE_VALUES > 3 * K
    data = drawn(32, symmetric=symmetric)
    tensor = decoded(method, data).tensors["layer.weight"]
    assert torch.equal(read_tensor(tensor), values_of(*data))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "3-bit weights are not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "gptq"}, "None-bit"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv' are not supported"),
        ({"quant_method": "awq", "bits": 3}, "3-bit"),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "'mxfp8-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported"),
        (compressed_config(num_bits=6), "6-bit"),
        (compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "has 0 widths"),
        ({"quant_method": "quanto"}, "'quanto', which is not supported"),
        ({}, "None, which is not supported"),
    ],
)
def test_variants_that_are_not_supported_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        decode_checkpoint(config, sources(gptq_layer(*drawn(32)[:3])))
    assert caught.value.hint


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_a_part_that_is_missing(missing: str) -> None:
    layer = sources(gptq_layer(*drawn(32)[:3]))
    del layer[f"layer.{missing}"]
    with pytest.raises(MissingTensorError, match=rf"layer\.{missing}"):
        decode_checkpoint({"quant_method": "gptq", "bits": 4}, layer)


def test_parts_that_do_not_fit() -> None:
    levels, scales, zeros, _ = drawn(32)
    layer = gptq_layer(levels, scales, zeros) | {"scales": torch.ones(4, N + 1)}
    with pytest.raises(CorruptCheckpointError, match="do not fit 16 rows of 128 inputs"):
        decode_checkpoint({"quant_method": "gptq", "bits": 4}, sources(layer))
    packed = compressed_layer(levels, scales) | {"weight_shape": torch.tensor([N, K + 8])}
    with pytest.raises(CorruptCheckpointError, match="does not match"):
        decode_checkpoint(compressed_config(), sources(packed))


def test_int8_of_compressed_tensors() -> None:
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    config |= {"config_groups": {"g": {"weights": {"num_bits": 8}}}}
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    scale = torch.rand(N, 1).to(torch.bfloat16)
    parts = sources({"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)})
    decoding = decode_checkpoint(config, parts)
    assert decoding.tensors.keys() == {"layer.weight"}
    assert torch.equal(read_tensor(decoding.tensors["layer.weight"]), weight.float() * scale.float())


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "hqq"])
def test_a_config_that_belongs_to_another_checkpoint(method: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="but no tensor is"):
        decode_checkpoint({"quant_method": method, "bits": 4}, sources({"weight": torch.zeros(4, 4)}))
