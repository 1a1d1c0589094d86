"""Quantized checkpoints, exported: exact values in the archive, four checks against the dequantized model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import NotEnoughMemoryError, SourceError, WeightError
from generic_export.nnef.dat import HEADER_BYTES
from quant.packing import dequantize_bytes
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.pipeline import ExportResult, export_llm
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.weights.archive_weights import stored_values
from t2n_llm.weights.f32_model import load_dequantized
from tests.families import FAMILIES, save_tiny_model
from tests.int4_checkpoints import awq_layer, compressed_layer, gptq_layer, values_of

STEPS = 6
LINEARS = 7 * FAMILIES["llama"]().num_hidden_layers
Parts = dict[str, torch.Tensor]


def grid(weight: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels, scales and zero points of a symmetric grid near a weight."""
    groups = weight.unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7).half()
    levels = (groups / scales.unsqueeze(-1).float()).round().clamp(-8, 7).to(torch.int64) + 8
    return levels.flatten(1), scales, torch.full(scales.shape, 8)


def gptq(weight: torch.Tensor) -> Parts:
    return gptq_layer(*grid(weight))


def gptq_scattered(weight: torch.Tensor) -> Parts:
    levels, scales, zeros = grid(weight)
    order = torch.arange(weight.shape[1], dtype=torch.int32) % scales.shape[1]
    return gptq_layer(levels, scales, zeros, g_idx=order)


def awq(weight: torch.Tensor) -> Parts:
    return awq_layer(*grid(weight))


def compressed(weight: torch.Tensor) -> Parts:
    return compressed_layer(*grid(weight)[:2])


def float8(weight: torch.Tensor) -> Parts:
    scale = weight.abs().max() / 448
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale.expand(rows, columns).contiguous()}


def nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, scales in float8, and the tensor's scale."""
    of_tensor = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / of_tensor).to(torch.float8_e4m3fn)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = (groups / (scales.float() * of_tensor).clamp(min=1e-12).unsqueeze(-1)).flatten(1)
    codes = (values.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (values < 0)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales, of_tensor


def packed_nvfp4(weight: torch.Tensor) -> Parts:
    packed, scales, of_tensor = nvfp4(weight)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / of_tensor).reshape(1)}
    return parts | {"input_global_scale": torch.ones(1)}


def modelopt_nvfp4(weight: torch.Tensor) -> Parts:
    packed, scales, of_tensor = nvfp4(weight)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": of_tensor, "input_scale": torch.ones(())}


def int8(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1)
    return {"weight": (weight / scale[:, None] * 127).round().to(torch.int8), "SCB": scale}


CONFIGS: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Parts]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        },
        compressed,
    ),
    "scattered gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, gptq_scattered),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, packed_nvfp4),
    "modelopt": ({"quant_library": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, modelopt_nvfp4),
}
EXACT = ("gptq", "awq", "compressed-tensors")


def quantized_model(folder: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a tiny Llama in one of the formats; returns it, and its original linear weights by parameter."""
    config, pack = CONFIGS[name]
    save_tiny_model("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    originals = {key: tensor for key, tensor in tensors.items() if ".layers." in key and tensor.dim() == 2}
    made = {key: tensor for key, tensor in tensors.items() if key not in originals}
    for key, tensor in originals.items():
        made |= {f"{key.removesuffix('.weight')}.{part}": values for part, values in pack(tensor).items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return folder, originals


def exported(model: Path, folder: Path, **options: object) -> ExportResult:
    settings = {"archive": "dir", "decode_steps": STEPS, "require_tokenizer": False} | options
    return export_llm(str(model), folder / "export", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXACT)
def test_exact_formats_keep_their_values(name: str, tmp_path: Path) -> None:
    model, originals = quantized_model(tmp_path / "model", name)
    result = exported(model, tmp_path)
    assert result.validation is not None and result.validation.passed
    assert result.validation.original is None  # PyTorch runs once, with the checkpoint's values
    values = dict(stored_values(result.archive))
    assert len(originals) == LINEARS
    for key, weight in originals.items():
        levels, scales, zeros = grid(weight)
        groups = torch.arange(weight.shape[1]) // 32
        assert torch.equal(values[key], values_of(levels, scales, zeros, groups)), key
    schemes = [record["scheme"] for record in result.manifest["compression"]["tensors"]]
    assert schemes.count("q4_0") == LINEARS and not result.manifest["notes"]
    assert validate_folder(result.output_dir, str(model), options=ValidateOptions.of(decode_steps=STEPS)).passed


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in EXACT])
def test_other_formats_are_dequantised_to_f16(name: str, tmp_path: Path) -> None:
    model, originals = quantized_model(tmp_path / "model", name)
    result = exported(model, tmp_path)
    assert result.validation is not None and result.validation.passed
    assert result.manifest["compression"] is None
    assert any(f"{LINEARS} tensors" in note and "dequantized" in note for note in result.manifest["notes"])
    dequantised = dict(load_dequantized(model).named_parameters())
    for key, values in stored_values(result.archive):
        if key in originals:
            assert torch.equal(values, dequantised[key].half()), key


@pytest.mark.parametrize("low_memory", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_recipe_quantises_them_again_and_says_so(low_memory: bool, tmp_path: Path) -> None:
    model, _ = quantized_model(tmp_path / "model", "fp8")
    result = exported(model, tmp_path, compress="q4_0", low_memory=low_memory)
    assert result.validation is not None and result.validation.passed
    assert any(
        note.startswith(f"{LINEARS} tensors") and "adds its own error" in note for note in result.manifest["notes"]
    )


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    model, originals = quantized_model(tmp_path / "model", "modelopt")
    described = json.loads((model / "config.json").read_text())
    del described["quantization_config"]
    (model / "config.json").write_text(json.dumps(described))
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    produced = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": own}
    (model / "hf_quant_config.json").write_text(json.dumps(produced))
    result = exported(model, tmp_path, check=False)
    values = dict(stored_values(result.archive))
    for key, weight in originals.items():
        assert torch.allclose(values[key].float(), weight, atol=float(weight.abs().max()) / 5), key


def test_calibration_reads_the_dequantised_weights(tmp_path: Path) -> None:
    model, _ = quantized_model(tmp_path / "model", "fp8")
    (tmp_path / "text.txt").write_text("unused")
    result = exported(model, tmp_path, compress="q4_0:imatrix", calibration="auto")
    assert result.validation is not None and result.validation.passed
    assert {record["algorithm"] for record in result.manifest["compression"]["tensors"]} >= {"imatrix"}


def test_the_skeleton_knows_nothing_of_the_quantiser(tmp_path: Path) -> None:
    from t2n_llm.source.hub import open_source

    model, _ = quantized_model(tmp_path / "model", "gptq")
    source = open_source(str(model), require_tokenizer=False)
    assert source.is_quantized and not hasattr(source.config, "quantization_config")


def test_methods_and_variants_that_cannot_be_read(tmp_path: Path) -> None:
    model, _ = quantized_model(tmp_path / "model", "gptq")
    described = json.loads((model / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "quip"}
    (model / "config.json").write_text(json.dumps(described))
    with pytest.raises(SourceError, match="the checkpoint is quantized \\(quip\\)"):
        exported(model, tmp_path)
    described["quantization_config"] = {"quant_method": "gptq", "bits": 3}
    (model / "config.json").write_text(json.dumps(described))
    with pytest.raises(WeightError, match="3-bit"):
        exported(model, tmp_path)
    assert not (tmp_path / "export").exists()


def test_a_check_that_would_leave_weights_on_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t2n_llm.weights.placement._ALWAYS_RESIDENT_BYTES", 0)
    model, _ = quantized_model(tmp_path / "model", "fp8")
    with pytest.raises(NotEnoughMemoryError, match="a quantized checkpoint"):
        exported(model, tmp_path, device_map="disk")
    assert exported(model, tmp_path, device_map="disk", check=False).archive.exists()


# --- lattices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_dequantised_q4_0_checkpoint_gets_its_grid_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """GGUF Q4_0 -> dequantised safetensors (as QAT releases are) -> `--compress q4_0` -> the values of the GGUF blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    save_tiny_model("llama", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    blocks = {}
    for key, tensor in tensors.items():
        if ".layers." in key and tensor.dim() == 2:
            blocks[key] = quantize(tensor.float().numpy(), GGMLQuantizationType.Q4_0)
            tensors[key] = torch.from_numpy(dequantize(blocks[key], GGMLQuantizationType.Q4_0)).to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    result = exported(tmp_path / "model", tmp_path, compress="q4_0", check=False)
    assert len(blocks) == LINEARS
    same = total = 0
    for key, original in blocks.items():
        data = np.frombuffer((result.archive / f"{key}.dat").read_bytes()[HEADER_BYTES:], np.uint8).reshape(
            original.shape
        )
        ours, theirs = (dequantize_bytes(torch.from_numpy(each.copy()), "q4_0") for each in (data, original))
        if dtype is torch.float32:  # nothing was rounded away: the very same values
            assert torch.equal(ours, theirs), key
        # float16 and bfloat16 leave the scale uncertain in its last bits, never a level.
        assert torch.allclose(ours, theirs, rtol=2.0**-8, atol=0), key
        same += int((data == original).sum())
        total += data.size
    assert same / total > 0.9
