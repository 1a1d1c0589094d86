"""Attention of every kind, through all four checks: what each family of the table has that a Llama has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.t2n_llm.attention_families import export_family

FAMILIES = {
    "gptj": "interleaved rotary, spelled-out attention with a concatenated query",
    "bloom": "ALiBi, fused projections, spelled-out attention",
    "mpt": "ALiBi out of a table",
    "falcon": "one key head, spelled-out attention",
    "opt": "learned positions with an offset",
    "biogpt": "a padding mask of its own making",
    "xglm": "sinusoidal positions, attention that calls itself not causal",
    "diffllama": "differential attention: values in halves",
    "minicpm3": "latent attention in a dense model",
    "granite_swa": "sinks and windows",
    "glm4": "partial interleaved rotary",
    "bart": "a decoder out of an encoder-decoder",
    "bert": "an encoder as a decoder",
    "gemma3n_text": "keys shared between layers, a cut-off computed from constants",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_f32(family: str, tmp_path: Path) -> None:
    export_family(family, tmp_path)


@pytest.mark.parametrize("family", ["gptj", "bloom"])
def test_family_in_f16(family: str, tmp_path: Path) -> None:
    export_family(family, tmp_path, dtype="f16")
