"""What a network without weights says of configs that no cache of transformers' can be kept for."""

from __future__ import annotations

import pytest
import torch

from generic_export.errors import CaptureError
from t2n_llm.graph.causal_lm import build_graph
from t2n_llm.graph.options import GraphOptions
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import decode_in_transformers


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "qwen3_next"])
def test_a_config_of_linear_attention_alone_is_refused_in_one_sentence(family: str) -> None:
    config = tiny_config(family)
    config.layer_types = ["linear_attention"] * config.num_hidden_layers
    with pytest.raises(CaptureError, match="all layers of its config use linear attention") as refusal:
        build_graph(config, GraphOptions(), name="linear")
    assert "get_seq_length" not in str(refusal.value)
    assert "layer_types" in (refusal.value.hint or "")


def test_transformers_itself_decodes_with_no_such_config() -> None:
    """If this fails, transformers counts positions some other way, and the refusal can go."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("qwen3_next")
    config.layer_types = ["linear_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="get_seq_length"):
        decode_in_transformers(model, 2)
