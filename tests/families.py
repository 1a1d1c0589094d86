"""Tiny configs of every supported family, with the features that make each one different switched on.

Random weights, wide enough that logits differ clearly between tokens; windows of 8, so that checks of a few dozen tokens
leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(model_type: str, **changes: Any) -> Callable[[], Any]:
    """Return what builds a tiny config of a family."""

    def build() -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(model_type, **(COMMON | changes))

    return build


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=160,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.12,
        bos_token_id=1,
        eos_token_id=2,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": config("llama", tie_word_embeddings=True),
    "llama3_rope": config("llama", rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "mistral": config("mistral", sliding_window=WINDOW, head_dim=24),
    "qwen2": config("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": config("qwen3", head_dim=24),
    "phi3": config("phi3", sliding_window=WINDOW, partial_rotary_factor=0.5),
    "gemma2": config("gemma2", sliding_window=WINDOW, head_dim=16, query_pre_attn_scalar=16),
    "gemma3_text": config(
        "gemma3_text", sliding_window=WINDOW, head_dim=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "smollm3": config("smollm3", no_rope_layers=[1, 0], tie_word_embeddings=True),
    "olmo2": config("olmo2"),
    "gpt2": _gpt2,
    "gpt_neox": config("gpt_neox", rotary_pct=0.25, use_parallel_residual=True),
}


def save_tiny_model(
    family: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    configs: Mapping[str, Callable[[], Any]] = FAMILIES,
) -> Path:
    """Write a random checkpoint of a family (config and safetensors, no tokenizer) and return its folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = configs[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    leave_neutral_start(model)
    model.to(dtype).save_pretrained(folder)
    return folder


def leave_neutral_start(model: torch.nn.Module, *names: str) -> None:
    """Move norm scales and biases, and parameters whose name contains one of some words, so that a forgotten one shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or any(word in name for word in names):
                parameter.add_(torch.randn_like(parameter) * 0.1)
