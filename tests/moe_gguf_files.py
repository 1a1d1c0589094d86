"""Tiny mixtures of experts as GGUF files: models of transformers with random weights, written as llama.cpp's converter does.

Its changes: experts of a layer stacked to one tensor a projection, rows of q and k of a Llama interleaved, everything else by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gguf_files import SPECIAL, add_tensor, add_tokenizer, byte_alphabet, finish, permuted

EXPERTS, USED, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 4, 2, 64, 32, 2, 4, 2
TOKENS = [*SPECIAL, *byte_alphabet(), "12"]


@dataclass(frozen=True)
class Family:
    """A family of mixtures.

    Attributes:
        architecture: in llama.cpp.
        config: class in transformers.
        named: attributes of its config besides those that all share.
        keys: metadata besides those that all share, by key after the architecture.
        shared: parameters under `mlp.` that are no experts -> their GGUF names.
        permutes: whether the converter interleaves rows of q and k.
    """

    architecture: str
    config: str
    named: Mapping[str, Any]
    keys: Mapping[str, int | bool | float] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False


FAMILIES = {
    "mixtral": Family(
        "llama",
        "MixtralConfig",
        {"intermediate_size": INNER, "num_local_experts": EXPERTS},
        {"feed_forward_length": INNER, "rope.dimension_count": HIDDEN // HEADS},
        permutes=True,
    ),
    "qwen2moe": Family(
        "qwen2moe",
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": INNER,
            "intermediate_size": 96,
            "shared_expert_intermediate_size": 96,
            "num_experts": EXPERTS,
        },
        {"expert_feed_forward_length": INNER, "expert_shared_feed_forward_length": 96, "feed_forward_length": 96},
        {
            "shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
            "shared_expert.up_proj.weight": "ffn_up_shexp.weight",
            "shared_expert.down_proj.weight": "ffn_down_shexp.weight",
            "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        },
    ),
    "qwen3moe": Family(
        "qwen3moe",
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": INNER,
            "intermediate_size": 96,
            "num_experts": EXPERTS,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        {"expert_feed_forward_length": INNER, "feed_forward_length": 96, "attention.key_length": 16},
    ),
}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_ATTENTION |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_model(family: Family, seed: int = 0) -> Any:
    """Return a model of a family in f32."""
    import transformers

    config = getattr(transformers, family.config)(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, num_experts_per_tok=USED, max_position_embeddings=256, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, sliding_window=None, pad_token_id=2, **family.named,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.12)
    return model


def gguf_tensors(family: Family, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a model as llama.cpp's converter names and lays them out, in float32."""
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            yield f"{_TOP[stem]}.{suffix}", values
            continue
        _, _, layer, rest = name.split(".", 3)
        room, _, inner = rest.partition(".")
        if room == "mlp":
            yield from ((f"blk.{layer}.{gguf}", each) for gguf, each in _feed_forward(family, inner, values))
        elif room == "self_attn":
            gguf = _ATTENTION[inner.split(".")[0]]
            if family.permutes and gguf in ("attn_q", "attn_k"):
                values = permuted(values, HEADS if gguf == "attn_q" else KV_HEADS)
            yield f"blk.{layer}.{gguf}.{suffix}", values
        else:
            yield f"blk.{layer}.{_NORMS[room]}.{suffix}", values


def _feed_forward(family: Family, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if name == "experts.gate_up_proj":
        yield "ffn_gate_exps.weight", values[:, :INNER]
        yield "ffn_up_exps.weight", values[:, INNER:]
    elif name == "experts.down_proj":
        yield "ffn_down_exps.weight", values
    elif name == "gate.weight":
        yield "ffn_gate_inp.weight", values
    else:  # the shared expert's gate is a vector there
        yield family.shared[name], values[0] if name == "shared_expert_gate.weight" else values


def write_moe_gguf(
    path: Path, family: Family, model: Any, kinds: Mapping[str, str] | None = None, *, single: bool = False
) -> None:
    """Write a model.

    Args:
        path: of the file.
        family: of the model.
        model: of `random_model`.
        kinds: last part of a tensor's name (`ffn_up_exps`) -> its type; F32 by default.
        single: each expert in a tensor of its own, as files before April 2024 have them.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), family.architecture)
    _describe(writer, family)
    for name, values in gguf_tensors(family, model):
        kind = (kinds or {}).get(name.split(".")[-2], "F32")
        for each, piece in _single(name, values) if single else [(name, values)]:
            add_tensor(writer, each, piece, kind)
    finish(writer)


def _single(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if "_exps" not in name:
        return [(name, values)]
    return [(name.replace("_exps", f".{expert}"), each) for expert, each in enumerate(values)]


def _describe(writer: Any, family: Family) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    for key, value in family.keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{family.architecture}.{key}", value)
    add_tokenizer(writer, TOKENS)
