"""How small a model can be and still take every path through its code: by the names of its config's fields, of any family.

Read by the zoo, which makes its configs from the classes' defaults, and by the tiny twins of models that have a config.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

VOCABULARY = 160
WINDOW = 8  # small enough to be left behind by the checks

# shell pattern on field names -> the most that an integer may be; the first that matches counts
_MOST: tuple[tuple[str, int], ...] = (
    ("*_token_id", 1 << 62),
    ("*_token_index", 1 << 62),
    ("seed", 1 << 62),
    # attention
    ("*mamba_expand", 2),
    ("expand", 2),
    ("index_topk*", WINDOW),
    ("local_attention", 2 * WINDOW),  # counts both sides
    ("*topk_group*", 1),
    ("n_group", 2),
    ("n_groups", 2),
    ("mamba_n*groups", 2),
    ("*key_value_heads", 2),
    # With few, all scores of a key are often below their relu, and the best of many zeros are arbitrary.
    ("index_n_heads", 16),
    ("linear_num_key_heads", 2),
    ("n_mamba_heads", 2),
    ("*num_heads", 4),
    ("*_heads", 4),
    ("n_head", 4),
    ("num_attention_heads", 4),
    ("qk_nope_head_dim", 16),
    ("qk_rope_head_dim", 8),
    ("rotary_dim", 8),
    ("query_pre_attn_scalar", 16),
    ("*head_dim", 16),
    ("*head_size", 16),
    ("dim_head", 16),
    ("d_head", 16),
    ("kv_channels", 16),
    ("*lora_rank", 32),
    ("*_rank", 8),
    ("*lowrank", 16),
    # experts
    ("*shared_expert*_size", 32),
    ("shared_intermediate_size", 32),
    ("*moe*intermediate_size", 32),
    ("expert_ffn_hidden_size", 32),
    ("zero_expert_num", 2),
    ("num_experts_per_tok", 2),
    ("*num_shared_experts", 2),
    ("n_shared_experts", 2),
    ("*experts", 4),
    ("*topk", 2),
    ("moe_k", 2),
    ("top_k_experts", 2),
    # states
    ("*d_state", 8),
    ("*state_size", 8),
    ("*chunk_size", WINDOW),
    ("block_size", WINDOW),
    ("mamba_d_ssm", 64),
    ("lru_width", 64),
    # sizes
    ("*vocab_size*", VOCABULARY),
    ("hidden_size_per_layer_input", 32),
    ("*embedding_size", 64),
    ("*intermediate_size*", 96),
    ("*feed_forward_size", 96),
    ("*ffn_dim", 96),
    ("*ffn_hidden_size", 96),
    ("dim_ff", 96),
    ("dff", 96),
    ("d_inner", 96),
    ("n_inner", 96),
    ("*hidden_size", 64),
    ("*d_model", 64),
    ("n_embd", 64),
    ("emb_dim", 64),
    ("*embed_dim", 64),
    ("router_hidden_size", 32),
    ("d_rel", 8),
    ("rel_extent", 16),
    ("image_size", 32),
    ("patch_size", 8),
)


def most_of(name: str) -> int | None:
    """Return the most that a field of this name may be; None for one that says no size."""
    return next((most for pattern, most in _MOST if fnmatchcase(name, pattern)), None)


__all__ = ["VOCABULARY", "WINDOW", "most_of"]
