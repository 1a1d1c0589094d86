"""A layer of each kind, and tiny twins that run and take the same paths as their originals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from generic_export.errors import CaptureError
from t2n_llm.debug.tiny_model import tiny_model
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.layer_cut import cut_layers, decoder_layers, layer_kinds, per_layer_lists
from tests.families import FAMILIES


def config_of(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "picks", "counts"),
    [
        ("llama", {"num_hidden_layers": 32}, (0, 1), (31, 1)),
        ("llama", {"num_hidden_layers": 1}, (0,), (1,)),
        ("gemma3_text", {"num_hidden_layers": 26, "layer_types": None}, (0, 5), (22, 4)),  # every sixth attends to all
        ("qwen3_next", {}, (0, 3), (36, 12)),  # every fourth
        ("deepseek_v3", {}, (0, 3), (3, 58)),  # dense up to there, experts after
        ("jamba", {}, (0, 1, 2, 3, 4), (11, 15, 1, 1, 4)),  # no kind that shorter cut keeps: a start of the model
        ("zamba2", {}, (0, 6), (45, 9)),
        ("smollm3", {}, (0, 3), (27, 9)),
        ("gpt2", {}, (0, 1), (11, 1)),
        ("xlstm", {}, (0, 1), (31, 1)),
        ("gpt_oss", {}, (0, 1), (18, 18)),
    ],
)
def test_one_layer_of_each_kind_is_kept(
    model_type: str, changes: dict[str, Any], picks: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    cut = cut_layers(config_of(model_type, **changes))
    assert (cut.picks, cut.counts) == (picks, counts)
    assert len(decoder_layers(meta_model(cut.config), cut.config)) == len(picks)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kinds_of_the_kept_layers_are_those_of_the_originals(family: str) -> None:
    config = FAMILIES[family]()
    before = copy.deepcopy(config.to_dict())
    cut = cut_layers(config)
    assert config.to_dict() == before
    listed = per_layer_lists(config)
    kinds = layer_kinds(meta_model(config), config, listed)
    assert layer_kinds(meta_model(cut.config), cut.config, listed) == [kinds[pick] for pick in cut.picks]
    assert set(kinds) == {kinds[pick] for pick in cut.picks}
    assert cut.depth == config.num_hidden_layers
    for kind in set(kinds):
        stands_for = sum(count for pick, count in zip(cut.picks, cut.counts, strict=True) if kinds[pick] == kind)
        assert stands_for == kinds.count(kind)


def _latent_experts() -> Any:
    return config_of("deepseek_v3")


def _long_rope() -> Any:
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    return config_of(
        "phi3", rope_parameters=factors, original_max_position_embeddings=4096, max_position_embeddings=131072
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: config_of("llama", num_hidden_layers=32, hidden_size=4096, num_key_value_heads=8),
        lambda: config_of("qwen3", head_dim=128, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8),
        lambda: config_of("qwen3_moe"),
        lambda: config_of("gemma3n_text"),
        lambda: config_of("mamba"),
        lambda: config_of("mamba2"),
        lambda: config_of("falcon_h1"),
        lambda: config_of("falcon"),
        lambda: config_of("gptj"),
        _latent_experts,
        _long_rope,
    ],
)
def test_the_twin_is_small_and_runs_as_the_original_would(make: Callable[[], Any]) -> None:
    config = make()
    twin = tiny_model(config)
    assert twin.narrow and twin.parameters < 2_000_000
    model, again = twin.model(), twin.model()
    assert type(model) is type(meta_model(config))
    assert _shares_keys(twin.config) == _shares_keys(config)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(logits, again(input_ids=ids, use_cache=False).logits)  # seeded
    assert torch.isfinite(logits).all()
    assert (logits[0, 0] - logits[0, 4]).abs().max() > 1e-3  # tokens differ


def _shares_keys(config: Any) -> bool:
    """Say whether several query heads read one key."""
    keys = getattr(config, "num_key_value_heads", None)
    return keys is not None and keys != config.num_attention_heads


def test_the_caller_s_random_numbers_are_left_alone() -> None:
    twin = tiny_model(config_of("llama"))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    twin.model()
    assert torch.equal(torch.rand(3), expected)


def test_a_config_that_no_model_can_be_built_of_is_told() -> None:
    with pytest.raises(CaptureError, match="cannot build the model"):
        tiny_model(config_of("llama", hidden_act="no_such_activation"))
