"""Scalings that hide in a layer: exact on every family they are claimed for, and undone where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from t2n_llm.compress.folds import Fold, apply_fold, find_folds, producer_parameters
from tests.families import COMMON, FAMILIES

_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

# family -> the producers that must be found and prove exact
EXACT = {
    "llama": ["input_layernorm", "post_attention_layernorm", "mlp.up_proj", "self_attn.v_proj"],
    "llama3_rope": ["input_layernorm", "post_attention_layernorm", "mlp.up_proj", "self_attn.v_proj"],
    "qwen2": ["input_layernorm", "post_attention_layernorm", "mlp.up_proj", "self_attn.v_proj"],
    "qwen3": ["input_layernorm", "post_attention_layernorm", "mlp.up_proj", "self_attn.v_proj"],
    "gemma2": ["input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj", "self_attn.v_proj"],
    "phi3": ["input_layernorm", "post_attention_layernorm", "mlp.gate_up_proj", "self_attn.qkv_proj"],
    "olmo2": ["mlp.up_proj", "self_attn.v_proj"],
    "mixtral": ["input_layernorm", "self_attn.v_proj"],
}


def build(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **(COMMON | _MIXTRAL)) if family == "mixtral" else FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(3, 20).unsqueeze(0), use_cache=False).logits


def factors_for(layer: nn.Module, fold: Fold) -> torch.Tensor:
    count = fold.rows.stop - fold.rows.start if fold.rows else layer.get_parameter(fold.readers[0]).shape[-1]
    return torch.rand(count, generator=torch.Generator().manual_seed(1)) * 3 + 0.3


@pytest.mark.parametrize("family", EXACT)
def test_folds_change_weights_and_no_logit(family):
    model = build(family)
    before = logits_of(model)
    kept = set()
    for layer in model.model.layers:
        for fold in find_folds(layer):
            reader = layer.get_parameter(fold.readers[0]).clone()
            if apply_fold(layer, fold, factors_for(layer, fold), lambda: logits_of(model), logits_of(model)):
                kept.add(fold.producer)
                assert not torch.equal(layer.get_parameter(fold.readers[0]), reader)
    assert kept == set(EXACT[family])
    change = (logits_of(model) - before).abs().max()
    assert float(change) < 2e-4 * float(before.abs().max())


def test_a_fold_with_a_second_reader_is_undone():
    model = build("llama")
    layer = model.model.layers[0]
    before = {name: values.clone() for name, values in model.state_dict().items()}
    forgetful = Fold("input_layernorm", None, ("self_attn.q_proj.weight",), ("self_attn.q_proj",))
    assert not apply_fold(layer, forgetful, factors_for(layer, forgetful), lambda: logits_of(model), logits_of(model))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_layers_have_no_fold_that_changes_them(family):
    model = build(family)
    before = logits_of(model)
    layers = model.transformer.h if family == "gpt2" else model.gpt_neox.layers
    for layer in layers:
        for fold in find_folds(layer):
            apply_fold(layer, fold, factors_for(layer, fold), lambda: logits_of(model), logits_of(model))
    assert float((logits_of(model) - before).abs().max()) < 2e-4 * float(before.abs().max())


def test_the_value_heads_that_query_heads_share():
    layer = build("mistral").model.layers[0]
    fold = next(fold for fold in find_folds(layer) if fold.producer == "self_attn.v_proj")
    assert fold.sources is not None
    heads = fold.sources.reshape(4, 24)[:, 0].tolist()
    assert heads == [0, 0, 24, 24]
    assert producer_parameters(layer, fold) == ["self_attn.v_proj.weight"]
