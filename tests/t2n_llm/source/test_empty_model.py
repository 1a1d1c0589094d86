"""Models without weights: nothing is allocated for parameters, tables that a model computes have their values."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, GPTNeoConfig, Llama4TextConfig, MarianConfig, MarianMTModel

from t2n_llm.source.empty_model import CAUSAL_LM, LARGE, ModelKind, computed_parameters, instantiate

SEQ2SEQ = ModelKind("AutoModelForSeq2SeqLM", "encoder-decoder", "")
_MARIAN = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 24,
    "pad_token_id": 31,
}
_GPT_NEO = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
_LAYERS = {"num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
# 2^36 elements and more in each stack of experts: 256 GB, more than a test may have.
_LLAMA_4 = {"num_local_experts": 4096, "hidden_size": 2048, "intermediate_size": 4096, "moe_layers": [0]}
_DEEPSEEK = {
    "n_routed_experts": 4096,
    "hidden_size": 2048,
    "moe_intermediate_size": 4096,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    "config",
    [Llama4TextConfig(**_LAYERS, **_LLAMA_4), DeepseekV3Config(**_LAYERS, **_DEEPSEEK)],
    ids=["zeros", "empty"],
)
def test_stacks_of_experts_take_no_memory(config: object) -> None:
    model = instantiate(CAUSAL_LM, config, torch.float16, "eager", "eager", False)
    assert max(parameter.numel() for parameter in model.parameters()) >= 1 << 36
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_table_as_large_as_a_parameter_keeps_its_values() -> None:
    positions = 4100
    assert positions**2 > LARGE
    config = GPTNeoConfig(
        max_position_embeddings=positions,
        num_layers=1,
        attention_types=[[["global"], 1]],
        hidden_size=64,
        num_heads=4,
        vocab_size=64,
    )
    model = instantiate(CAUSAL_LM, config, torch.float16, "eager", "eager", False)
    (mask,) = [buffer for name, buffer in model.named_buffers() if name.endswith("attention.bias")]
    assert torch.equal(mask[0, 0], torch.ones(positions, positions, dtype=torch.bool).tril())


def test_positions_that_a_model_computes_have_values_where_a_checkpoint_may_lack_them() -> None:
    config = MarianConfig(**_MARIAN)
    found = computed_parameters(instantiate(SEQ2SEQ, config, torch.float32, "eager", "eager", False))
    own = MarianMTModel(config).state_dict()
    assert sorted(found) == ["model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight"]
    assert all(torch.equal(values, own[name]) for name, values in found.items())


def test_parameters_drawn_at_random_are_nobody_s_values() -> None:
    model = instantiate(CAUSAL_LM, GPTNeoConfig(**_GPT_NEO), torch.float32, "eager", "eager", False)
    type(model)._keys_to_ignore_on_load_missing, before = [r"wte"], type(model)._keys_to_ignore_on_load_missing
    try:
        assert computed_parameters(model) == {}
    finally:
        type(model)._keys_to_ignore_on_load_missing = before
