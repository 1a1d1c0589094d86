"""Attention of every kind, through all four checks: what each family of the table has that a Llama has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from t2n_llm.source.small_sizes import WINDOW
from t2n_llm.zoo.tiny_model import build_tiny_model
from tests.t2n_llm.zoo.attention_families import export_family, nightly_unless

# family -> what it alone has
FAMILIES = {
    "gptj": "interleaved rotary, spelled-out attention with a concatenated query",
    "bloom": "ALiBi, fused projections, spelled-out attention",
    "mpt": "ALiBi out of a table",
    "biogpt": "a padding mask of its own making",
    "xglm": "sinusoidal positions, attention that calls itself not causal",
    "bert": "an encoder as a decoder",
    "youtu": "interleaved latent attention, a padding row that its own initialiser would clear",
    "moshi": "a window in the cache alone",
    "minimax_m3_vl_text": "the best blocks of keys, counted at any length",
    "qwen4_exp_text": "the best blocks of keys, n-grams of token ids kept between calls",
    "deepseek_v4": "entries for several tokens, made of states that have a row for each",
    "xmod": "the adapter of one language",
    "gemma3n_text": "keys shared between layers, a cut-off computed from constants",
}
# family -> what it has, and which test of every commit takes the same path
NIGHTLY = {
    "falcon": "one key head, spelled-out attention: with ALiBi below",
    "opt": "learned positions with an offset: test_zoo_command.py",
    "diffllama": "differential attention, values in halves: test_state_views.py",
    "minicpm3": "latent attention in a dense model: Youtu",
    "granite_swa": "sinks and windows: GPT-OSS",
    "glm4": "partial interleaved rotary: GPT-J",
    "bart": "a decoder out of an encoder-decoder: test_text_to_text.py",
}


@pytest.mark.parametrize("family", nightly_unless(FAMILIES, [*FAMILIES, *NIGHTLY]))
def test_family_in_f32(family: str, tmp_path: Path) -> None:
    export_family(family, tmp_path)


@pytest.mark.parametrize("family", nightly_unless(["bloom"], ["gptj", "bloom"]))
def test_family_in_f16(family: str, tmp_path: Path) -> None:
    export_family(family, tmp_path, dtype="f16")


@pytest.mark.parametrize("dtype", nightly_unless(["f32"], ["f32", "f16"]))
def test_biases_of_positions_in_bf16(dtype: str, tmp_path: Path) -> None:
    """Falcon's ALiBi, as its 1B models have it: slopes times positions in bf16, of which PyTorch keeps eight bits."""
    export_family(
        "falcon",
        tmp_path,
        dtype=dtype,
        alibi=True,
        new_decoder_architecture=False,
        num_attention_heads=6,
        hidden_size=96,
    )


def test_moshi_in_transformers_depends_on_how_a_text_is_cut() -> None:
    """Why its reference keeps all positions (kvcache.forms.cache): if this fails, transformers has put the window in the mask."""
    from transformers import DynamicCache

    model = build_tiny_model("moshi")
    ids = torch.arange(10, 10 + 3 * WINDOW)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        windowed, growing = (
            _one_by_one(model, ids, cache) for cache in (DynamicCache(config=model.config), DynamicCache())
        )
    difference = (windowed - whole).abs().amax(-1)[0]
    assert difference[:WINDOW].max() < 1e-4
    assert difference[WINDOW:].min() > 1e-2
    assert (growing - whole).abs().max() < 1e-4


def _one_by_one(model: torch.nn.Module, ids: torch.Tensor, cache: object) -> torch.Tensor:
    steps = [
        model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(ids.shape[1])
    ]
    return torch.cat(steps, dim=1)
