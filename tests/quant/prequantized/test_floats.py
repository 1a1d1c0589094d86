"""FP8, MXFP4, bitsandbytes and HQQ against transformers' decoders, or against the formats spelled out one value at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from generic_export.errors import CorruptCheckpointError, MissingTensorError, WeightError
from generic_export.weights.safetensors_index import open_safetensors
from generic_export.weights.source import InMemoryTensor, TensorSource
from generic_export.weights.values import read_tensor
from quant.prequantized import decode_checkpoint

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def sources(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSource]:
    return {name: InMemoryTensor(name, tensor) for name, tensor in tensors.items()}


def values(config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "a.weight") -> torch.Tensor:
    decoding = decode_checkpoint(config, sources(tensors))
    assert list(decoding.tensors) == [name] and len(decoding.notes) == 1
    return read_tensor(decoding.tensors[name])


# --- FP8 ----------------------------------------------------------------------------------------------


def eight_bit(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (5, 7)])
def test_fp8_in_blocks(shape: tuple[int, int]) -> None:
    weight = eight_bit(shape)
    scale = torch.rand(math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)) + 0.1
    expected = torch.empty(shape)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = weight[row : row + 128, column : column + 128].float()
            expected[row : row + 128, column : column + 128] = block * scale[row // 128, column // 128]
    assert torch.equal(values(FP8, {"a.weight": weight, "a.weight_scale_inv": scale}), expected)


def test_fp8_in_blocks_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight, scale = eight_bit((256, 256)), torch.rand(2, 2) + 0.1
    made = values(FP8, {"a.weight": weight, "a.weight_scale_inv": scale})
    assert torch.equal(made, _dequantize_fp8_weight(weight, scale, (128, 128), torch.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (24,), (24, 1)])
def test_fp8_with_a_scale_for_all_or_for_each_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, scale = eight_bit((24, 40), dtype), torch.rand(shape) + 0.1
    per_row = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    assert torch.equal(values({"quant_method": "fbgemm_fp8"}, tensors), weight.float() * per_row)


def test_fp8_experts_in_blocks() -> None:
    weight, scale = eight_bit((3, 130, 128)), torch.rand(3, 2, 1) + 0.1
    expected = weight.float() * scale.repeat_interleave(128, 1)[:, :130]
    assert torch.equal(values(FP8, {"e": weight, "e_scale_inv": scale}, "e"), expected)


def test_fp8_without_scale() -> None:
    weight = eight_bit((4, 4))
    assert torch.equal(values(FP8, {"a.weight": weight}), weight.float())


def test_fp8_with_a_scale_that_does_not_fit() -> None:
    with pytest.raises(WeightError, match="does not fit a weight of shape"):
        values(FP8, {"a.weight": eight_bit((256, 256)), "a.weight_scale_inv": torch.ones(3, 2)})


# --- MXFP4 --------------------------------------------------------------------------------------------


def experts() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=random)
    return blocks, torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8, generator=random)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = experts()
    made = values(
        {"quant_method": "mxfp4"}, {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, "e.down_proj"
    )
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert made.shape == (3, 64, 8)
    assert torch.equal(made, expected)


def test_mxfp4_value_by_value() -> None:
    blocks, scales = experts()
    made = values({"quant_method": "mxfp4"}, {"e_blocks": blocks, "e_scales": scales}, "e")
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for expert, row, column in ((0, 0, 0), (1, 3, 17), (2, 7, 63), (2, 5, 32)):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte & 15 if column % 2 == 0 else byte >> 4
        value = table[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
        assert float(made[expert, column, row]) == value


def test_mxfp4_with_parts_that_do_not_fit() -> None:
    blocks, scales = experts()
    with pytest.raises(CorruptCheckpointError, match="are not valid MXFP4"):
        values({"quant_method": "mxfp4"}, {"e_blocks": blocks, "e_scales": scales[:2]}, "e")
    with pytest.raises(MissingTensorError, match="e_scales"):
        values({"quant_method": "mxfp4"}, {"e_blocks": blocks}, "e")


# --- NVFP4 --------------------------------------------------------------------------------------------

PACKED_NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and their scales, of weights with `shape[-1]` columns."""
    random = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=random)
    scales = (torch.rand((*shape[:-1], shape[-1] // 16), generator=random) * 400).to(torch.float8_e4m3fn)
    return data, scales


def nvfp4(config: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    data, scales = packed(6, 48)
    parts = {"a.weight_scale": scales, "a.input_scale": torch.ones(())}
    if config is PACKED_NVFP4:
        own = {"a.weight_packed": data, "a.weight_global_scale": torch.tensor([1 / scale])}
        return {"a.weight_scale": scales, "a.input_global_scale": torch.ones(1)} | own
    return parts | {"a.weight": data, "a.weight_scale_2": torch.tensor(scale)}


def expected_nvfp4(data: torch.Tensor, scales: torch.Tensor, scale: float) -> torch.Tensor:
    """The values of one matrix, one at a time."""
    made = torch.empty(len(data), 2 * data.shape[1])
    for row in range(made.shape[0]):
        for column in range(made.shape[1]):
            byte = int(data[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            made[row, column] = E2M1[code & 7] * (-1 if code & 8 else 1) * float(scales[row, column // 16]) * scale
    return made


@pytest.mark.parametrize("config", [PACKED_NVFP4, MODELOPT_NVFP4], ids=["compressed-tensors", "modelopt"])
def test_nvfp4_value_by_value(config: dict[str, Any]) -> None:
    assert torch.equal(values(config, nvfp4(config, 0.25)), expected_nvfp4(*packed(6, 48), 0.25))


@pytest.mark.parametrize("config", [PACKED_NVFP4, MODELOPT_NVFP4], ids=["compressed-tensors", "modelopt"])
def test_nvfp4_of_a_file(config: dict[str, Any], tmp_path: Path) -> None:
    """Files list float8 tensors as unreadable: the scales of a published checkpoint are float8."""
    save_file(nvfp4(config, 0.25), tmp_path / "model.safetensors")
    tensors = decode_checkpoint(config, open_safetensors(tmp_path / "model.safetensors")).tensors
    assert torch.equal(read_tensor(tensors["a.weight"]), expected_nvfp4(*packed(6, 48), 0.25))


def test_nvfp4_whose_input_awq_scaled() -> None:
    stored = nvfp4(MODELOPT_NVFP4, 0.25) | {"a.pre_quant_scale": torch.rand(48).bfloat16()}
    made = values({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, stored)
    assert torch.equal(made, expected_nvfp4(*packed(6, 48), 0.25) * stored["a.pre_quant_scale"].float())


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25, 0.5, 0.125])])
def test_nvfp4_of_experts_in_one_tensor(scale: torch.Tensor) -> None:
    """GPT-OSS and Llama 4 of ModelOpt: both axes swapped, [E, K / 2, N]; others as they are."""
    data, scales = packed(3, 6, 48)
    each = scale.expand(3).tolist()
    whole = torch.stack([expected_nvfp4(data[index], scales[index], each[index]) for index in range(3)])
    for swap in (False, True):
        pair = [part.mT.contiguous() if swap else part for part in (data, scales.float())]
        stored = {"e.down_proj": pair[0], "e.down_proj_weight_scale": pair[1].to(torch.float8_e4m3fn)}
        stored |= {"e.down_proj_weight_scale_2": scale, "e.down_proj_input_scale": torch.ones(())}
        made = values(MODELOPT_NVFP4, stored, "e.down_proj")
        assert torch.equal(made, whole.mT if swap else whole)


@pytest.mark.parametrize("library", ["modelopt", "compressed-tensors"])
def test_nvfp4_and_float8_in_one_checkpoint(library: str) -> None:
    eight = {"b.weight": eight_bit((4, 16)), "b.weight_scale": torch.tensor(0.5)}
    cache = {"l.self_attn.k_proj.k_scale": torch.ones(()), "l.self_attn.v_proj.v_scale": torch.ones(())}
    if library == "modelopt":
        kinds = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": kinds}
        stored = nvfp4(MODELOPT_NVFP4, 0.25)
    else:
        kinds = {"0": {"format": "nvfp4-pack-quantized"}, "1": {"format": "float-quantized"}}
        config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": kinds}
        stored = nvfp4(PACKED_NVFP4, 0.25)
    tensors = decode_checkpoint(config, sources(stored | eight | cache)).tensors
    assert sorted(tensors) == ["a.weight", "b.weight"]
    assert torch.equal(read_tensor(tensors["a.weight"]), expected_nvfp4(*packed(6, 48), 0.25))
    assert torch.equal(read_tensor(tensors["b.weight"]), eight["b.weight"].float() * 0.5)


def test_modelopt_in_another_algorithm() -> None:
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_AWQ"}}
    for config in ({"quant_algo": "W4A16_AWQ"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}):
        with pytest.raises(WeightError, match="'W4A16_AWQ' is not supported"):
            decode_checkpoint({"quant_method": "modelopt"} | config, sources(nvfp4(MODELOPT_NVFP4, 1.0)))


def test_nvfp4_with_parts_that_do_not_fit() -> None:
    stored = nvfp4(PACKED_NVFP4, 1.0)
    for change in ({"a.weight_scale": stored["a.weight_scale"][:2]}, {"a.weight_global_scale": torch.ones(2)}):
        with pytest.raises(CorruptCheckpointError, match="are not valid NVFP4"):
            values(PACKED_NVFP4, stored | change)
    with pytest.raises(MissingTensorError, match="weight_global_scale"):
        values(PACKED_NVFP4, {name: each for name, each in stored.items() if "global" not in name})


# --- bitsandbytes -------------------------------------------------------------------------------------


def state(**said: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4_bit(kind: str, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.prequantized.bitsandbytes.PIECE_VALUES", 192)  # several pieces
    random = torch.Generator().manual_seed(0)
    shape, block, outer = (12, 64), 64, 4
    codes = torch.randint(0, 16, (math.prod(shape),), generator=random)
    table = torch.linspace(-1, 1, 16)
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    tensors = {"a.weight": packed, "a.weight.quant_map": table}
    said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": shape}
    if nested:
        absmax = torch.randint(0, 256, (12,), dtype=torch.uint8, generator=random)
        inner, scales = torch.linspace(-1, 1, 256), torch.rand(3, generator=random)
        tensors |= {"a.weight.nested_absmax": scales, "a.weight.nested_quant_map": inner}
        said |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.25}
        per_block = [float(inner[int(code)] * scales[index // outer] + 0.25) for index, code in enumerate(absmax)]
    else:
        absmax = torch.rand(12, generator=random)
        per_block = absmax.tolist()
    tensors |= {"a.weight.absmax": absmax, f"a.weight.quant_state.bitsandbytes__{kind}": state(**said)}
    made = values({"quant_method": "bitsandbytes"}, tensors).reshape(-1)
    for index, code in enumerate(codes.tolist()):
        assert float(made[index]) == pytest.approx(float(table[code]) * per_block[index // block], rel=1e-6)


def test_bitsandbytes_int8() -> None:
    weight = torch.randint(-127, 128, (6, 10), dtype=torch.int8)
    scale = torch.rand(6)
    tensors = {"a.weight": weight, "a.SCB": scale, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    made = values({"quant_method": "bitsandbytes"}, tensors)
    assert torch.equal(made, weight.float() * scale[:, None] / 127)


def test_bitsandbytes_with_a_state_that_says_nothing() -> None:
    tensors = {"a.weight": torch.zeros(32, 1, dtype=torch.uint8), "a.weight.absmax": torch.ones(1)}
    tensors |= {"a.weight.quant_map": torch.zeros(16)}
    for text in (state(shape=[8, 8]), torch.zeros(3, dtype=torch.uint8), state(shape=[9, 9], blocksize=64)):
        with pytest.raises(CorruptCheckpointError, match=r"tensor a\.weight"):
            values({"quant_method": "bitsandbytes"}, tensors | {"a.weight.quant_state.bitsandbytes__nf4": text})


# --- HQQ ----------------------------------------------------------------------------------------------


def hqq_layer(matrix: torch.Tensor, bits: int, axis: int, shape: tuple[int, int], **changes: Any) -> dict[str, Any]:
    """A layer of a matrix of levels: groups are its rows (axis 1) or columns (axis 0)."""
    fields, rows = 8 // bits, len(matrix) * bits // 8
    packed = torch.zeros(rows, matrix.shape[1], dtype=torch.uint8)
    for index, levels in enumerate(matrix):
        packed[index % rows] |= (levels << (bits * (fields - 1 - index // rows))).to(torch.uint8)
    side = (len(matrix), 1) if axis == 1 else (1, matrix.shape[1])
    random = torch.Generator().manual_seed(1)
    return {
        "W_q": packed,
        "scale": torch.rand(side, generator=random).half(),
        "zero": (torch.rand(side, generator=random) * 8).half(),
        "shape": torch.tensor(shape),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "packing": torch.tensor([ord(letter) for letter in f"{bits}bit_u8"], dtype=torch.uint8),
        "group_size": torch.tensor(64, dtype=torch.int32),
    } | changes


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq(bits: int, axis: int) -> None:
    shape = (16, 128)
    matrix = torch.randint(0, 1 << bits, (32, 64) if axis == 1 else (64, 32))
    layer = hqq_layer(matrix, bits, axis, shape)
    made = values({"quant_method": "hqq"}, {f"a.{name}": tensor for name, tensor in layer.items()})
    expected = ((matrix.float() - layer["zero"].float()) * layer["scale"].float()).reshape(shape)
    assert torch.equal(made, expected)


def test_hqq_in_three_bits_is_refused() -> None:
    packing = torch.tensor([ord(letter) for letter in "3bit_32"], dtype=torch.uint8)
    layer = hqq_layer(torch.zeros(32, 64, dtype=torch.int64), 4, 1, (16, 128), packing=packing)
    with pytest.raises(WeightError, match="'3bit_32'"):
        values({"quant_method": "hqq"}, {f"a.{name}": tensor for name, tensor in layer.items()})
    layer = hqq_layer(torch.zeros(32, 64, dtype=torch.int64), 4, 1, (99, 128))
    with pytest.raises(CorruptCheckpointError, match="do not fit shape"):
        values({"quant_method": "hqq"}, {f"a.{name}": tensor for name, tensor in layer.items()})
