"""Absorbed latent attention: the same numbers as every family's own, from latents that are never expanded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kvcache
from generic_export import TractNNEF
from kvcache.attention.latent import absorb_latents, absorbed_projections
from kvcache.attention.operator import ATTENTION_NAME
from t2n_llm.zoo.tiny_model import build_tiny_model
from tests.engine_check import check

FAMILIES = [
    *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "glm4_moe_lite"),
    *("glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "youtu"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_with_its_own_attention(family: str) -> None:
    model: Any = build_tiny_model(family)
    ids = torch.arange(3, 30).reshape(3, 9)
    with torch.no_grad(), kvcache.explicit_operators() as names:
        own = model(ids, use_cache=False).logits
        model.set_attn_implementation(names.attention)
        assert absorb_latents(model) >= 1
        absorbed = model(ids, use_cache=False).logits
    assert names.choice.calls >= 1
    assert (absorbed - own).abs().max() < 1e-4 < own.abs().max()


class Layer(nn.Module):
    """What absorbing looks at in a layer of transformers."""

    def __init__(self, heads: int = 3, nope: int = 4, value: int = 6, rank: int = 8, *, bias: bool = False) -> None:
        super().__init__()
        self.qk_nope_head_dim, self.v_head_dim = nope, value
        self.kv_b_proj: nn.Module = nn.Linear(rank, heads * (nope + value), bias=bias)

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers has it."""
        width = self.qk_nope_head_dim + self.v_head_dim
        expanded = self.kv_b_proj(latent[:, 0]).unflatten(-1, (-1, width)).transpose(1, 2)
        keys, values = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], dim=-1), values


sizes = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 9), st.integers(1, 3))
def test_absorbed_and_expanded_agree(
    heads: int, nope: int, value: int, rank: int, rope: int, steps: int, past: int, batch: int
) -> None:
    layer = Layer(heads, nope, value, rank).double()
    total = past + steps
    latent, rotated, query = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((batch, 1, total, rank), (batch, 1, total, rope), (batch, heads, steps, nope + rope))
    )
    with torch.no_grad():
        expected = torch.ops.t2n.attention(query, *layer.expand_kv(latent, rotated), None, 0.3, True, None)
        assert absorb_latents(layer) == 1
        result = attend(layer, query, *layer.expand_kv(latent, rotated))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as transformers calls it, [B, H, S, v]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with kvcache.explicit_attention():
        result, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](layer, query, key, value, None, scaling=0.3)
    return result.transpose(1, 2)


@pytest.mark.parametrize("projection", ["biased", "another class", "another size"])
def test_what_cannot_be_cut_goes_on_expanding(projection: str) -> None:
    layer = Layer(bias=projection == "biased")
    if projection == "another class":
        layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)
    if projection == "another size":
        layer.kv_b_proj = nn.Linear(8, 31, bias=False)
    assert absorb_latents(layer) == 0
    assert absorbed_projections(layer) is None


def test_models_without_latents_are_left_alone() -> None:
    assert absorb_latents(build_tiny_model("llama")) == 0


class Absorbed(nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.layer, self.window = Layer(4, 8, 16, 32), window
        absorb_latents(self.layer)

    def forward(self, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        absorbed = absorbed_projections(self.layer)
        assert absorbed is not None
        over_latents, further = absorbed.queries(query)
        mask = None
        if self.window is not None:
            total, steps = latent.shape[2], query.shape[2]
            distance = (torch.arange(steps) + (total - steps))[:, None] - torch.arange(total)[None, :]
            mask = ((distance >= 0) & (distance < self.window))[None, None]
        mixed = torch.ops.t2n.attention(
            over_latents, latent, latent, mask, 0.3, mask is None, None, None, further, rotated
        )
        return absorbed.mixed(mixed)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("products", [True, False])
def test_in_the_engine(products: bool, window: int | None) -> None:
    torch.manual_seed(0)
    axes = {"input_0": {0: "B", 2: "S"}, "input_1": {0: "B", 2: "T"}, "input_2": {0: "B", 2: "T"}}
    target = TractNNEF(check_io=False, dynamic_axes=axes, attention_as_products=products)
    calls = [
        (torch.randn(batch, 4, steps, 12), torch.randn(batch, 1, total, 32), torch.randn(batch, 1, total, 4))
        for batch, steps, total in ((2, 5, 12), (1, 1, 9), (3, 40, 70))
    ]
    text = check(Absorbed(window), *calls, target=target)
    assert ("tract_transformers_sdpa" in text) != products
    assert "absorbed_keys" in text and "absorbed_values" in text  # parts of the parameter, not slices in the graph
    if products:
        assert "concat(" not in text  # no copy of a cache
