"""Tiny configs of families that keep more than keys and values, with the features that make each one different switched on.

One layer of each kind; `mamba` and `lfm2` have several that keep states of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.families import WINDOW

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ATTENTION: dict[str, Any] = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 6}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GATED_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


def _config(model_type: str, *groups: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import AutoConfig

        values = dict(_COMMON)
        for group in (*groups, changes):
            values |= group
        return AutoConfig.for_model(model_type, **values)

    return build


RECURRENT_FAMILIES: dict[str, Callable[[], Any]] = {
    "mamba": _config("mamba", _MAMBA),
    "falcon_mamba": _config("falcon_mamba", _MAMBA, num_hidden_layers=1),
    "mamba2": _config(
        "mamba2",
        num_hidden_layers=1,
        state_size=8,
        conv_kernel=4,
        expand=2,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=8,
    ),
    "jamba": _config(
        "jamba",
        _ATTENTION,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=6,
        use_mamba_kernels=False,
    ),
    "bamba": _config("bamba", _ATTENTION, _MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": _config("falcon_h1", _ATTENTION, _MAMBA2, num_hidden_layers=1, mamba_d_ssm=128, head_dim=16),
    "granitemoehybrid": _config(
        "granitemoehybrid",
        _ATTENTION,
        _MAMBA2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
    ),
    "nemotron_h": _config(
        "nemotron_h",
        _ATTENTION,
        hybrid_override_pattern="M*-",
        num_hidden_layers=3,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        conv_kernel=4,
        chunk_size=8,
        head_dim=16,
        time_step_min=1e-9,  # see zamba2
    ),
    "zamba": _config(
        "zamba",
        _ATTENTION,
        num_key_value_heads=4,
        layers_block_type=["hybrid", "hybrid"],
        mamba_d_state=8,
        mamba_dt_rank=6,
        n_mamba_heads=2,
    ),
    "zamba2": _config(
        "zamba2",
        _ATTENTION,
        num_hidden_layers=3,
        num_key_value_heads=4,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        time_step_min=1e-9,  # transformers applies this limit to several tokens at once and not to single ones
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=2,
        mamba_d_state=8,
        mamba_expand=2,
        chunk_size=8,
        num_mem_blocks=1,
        use_shared_attention_adapter=True,
        adapter_rank=8,
    ),
    "qwen3_next": _config("qwen3_next", _ATTENTION, _EXPERTS, _GATED_DELTA_NET, shared_expert_intermediate_size=32),
    "qwen3_5_text": _config("qwen3_5_text", _ATTENTION, _GATED_DELTA_NET),
    "qwen3_5_moe_text": _config(
        "qwen3_5_moe_text", _ATTENTION, _EXPERTS, _GATED_DELTA_NET, shared_expert_intermediate_size=32
    ),
    "olmo_hybrid": _config("olmo_hybrid", _ATTENTION, _GATED_DELTA_NET),
    "lfm2": _config("lfm2", _ATTENTION, layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3),
    "lfm2_moe": _config(
        "lfm2_moe",
        _ATTENTION,
        _EXPERTS,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
    ),
    "minimax": _config(
        "minimax",
        _ATTENTION,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        block_size=8,
    ),
    "recurrent_gemma": _config(
        "recurrent_gemma",
        _ATTENTION,
        lru_width=64,
        attention_window_size=WINDOW,
        conv1d_width=4,
        block_types=("recurrent", "attention"),
        w_init_variance_scale=1.0,
    ),
    "rwkv": _config("rwkv", rescale_every=1, context_length=256),
    "xlstm": _config(
        "xlstm",
        hidden_size=128,
        num_heads=4,
        num_blocks=1,
        qk_dim_factor=0.5,
        v_dim_factor=1.0,
        chunk_size=8,
        mode="inference",
    ),
}
