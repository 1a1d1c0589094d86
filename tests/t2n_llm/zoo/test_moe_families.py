"""Mixtures of experts: every router and every layout of experts, through all four checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.t2n_llm.zoo.attention_families import export_family, graph_text, nightly_unless

# family -> what it alone has
FAMILIES = {
    "gpt_oss": "clamped SwiGLU, biases, interleaved and transposed experts, attention sinks, sliding windows",
    "deepseek_v3": "latent attention, sigmoid router in groups with correction bias, dense first layer",
    "llama4_text": "scores on the experts' input, chunked attention, layers without positions",
    "dbrx": "stacks in one axis, the last transposed",
    "jetmoe": "experts around the attention",
    "longcat_flash": "experts that hand on what they get, two attentions a layer",
}
# family -> what it has; the same code of ours runs in f32 in test_float64.py (Mixtral), in blocks below, and in every family above
NIGHTLY = {
    "mixtral": "softmax router, normalised; sliding window",
    "qwen3_moe": "query and key norms",
    "qwen2_moe": "a shared expert behind a gate",
}


@pytest.mark.parametrize("family", nightly_unless(FAMILIES, [*FAMILIES, *NIGHTLY]))
def test_family_in_f32(family: str, tmp_path: Path) -> None:
    text = graph_text(export_family(family, tmp_path))
    assert "= tract_moe_ffn(" in text


@pytest.mark.parametrize("family", nightly_unless(["gpt_oss", "deepseek_v3"], ["mixtral", "gpt_oss", "deepseek_v3"]))
def test_family_in_f16(family: str, tmp_path: Path) -> None:
    export_family(family, tmp_path, dtype="f16")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_in_blocks(family: str, tmp_path: Path) -> None:
    """Joined projections are taken apart while they are quantised; the reference computes with the blocks' values."""
    result = export_family(family, tmp_path, compress="q4_0")
    tensors = json.loads((result.output_dir / "export.json").read_text())["compression"]["tensors"]
    experts = [tensor for tensor in tensors if tensor["part"] is not None and "routed_up_proj" in tensor["label"]]
    assert experts and all(tensor["scheme"] == "q4_0" for tensor in experts)
    assert all(tensor["parameters"] == [tensor["part"]["parameter"]] for tensor in experts)
    assert all(tensor["relative_error"] < 0.02 for tensor in experts)
