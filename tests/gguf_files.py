"""Tiny GGUF files of Llama architecture, written with the `gguf` package from known values, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def llama_weights(seed: int = 0, *, tied: bool = True, vocab: int = 259) -> dict[str, np.ndarray]:
    """Random float32 values by GGUF name, in PyTorch's layout: heads not permuted."""
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (vocab, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    values = {name: random.normal(size=shape).astype(np.float32) * 0.12 for name, shape in shapes.items()}
    for name in values:
        if name.endswith("norm"):
            values[name] += 1
    return values


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as llama.cpp's converter does for q and k."""
    return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_llama_gguf(
    path: Path,
    kinds: Mapping[str, str],
    *,
    tied: bool = True,
    tokenizer: bool = True,
    seed: int = 0,
    tensors_a_part: int = 0,
) -> dict[str, np.ndarray]:
    """Write a Llama.

    Args:
        path: of the file.
        kinds: last part of a tensor's name (`attn_q`, `token_embd`) -> its type; F32 by default.
        tied: leave `output.weight` out.
        tokenizer: write a byte-level tokenizer too.
        seed: of the values.
        tensors_a_part: write parts of so many tensors, `path` with `-00001-of-00003` and so on in the name; 0 for one file.

    Returns:
        What was written, by GGUF name without `.weight`: raw bytes of a row each, in the file's order of rows.
    """
    from gguf import GGUFWriter

    tokens = [*SPECIAL, *byte_alphabet(), "12"]
    weights = llama_weights(seed, tied=tied, vocab=len(tokens))
    writer = GGUFWriter(str(path), "llama", split_max_tensors=tensors_a_part)
    _describe(writer, tokens, tokenizer)
    written = {}
    for name, values in weights.items():
        last = name.rsplit(".", 1)[-1]
        if last in ("attn_q", "attn_k"):
            values = permuted(values, HEADS if last == "attn_q" else KV_HEADS)
        written[name] = add_tensor(writer, f"{name}.weight", values, kinds.get(last, "F32"))
    finish(writer)
    return written


def add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> np.ndarray:
    """Quantise a tensor to a type of ggml and add it; returns the bytes."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    code = GGMLQuantizationType[kind]
    data: np.ndarray = quantize(np.ascontiguousarray(values), code)
    writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else code)
    return data


def finish(writer: Any) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _describe(writer: Any, tokens: list[str], tokenizer: bool) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    if tokenizer:
        add_tokenizer(writer, tokens)


def add_tokenizer(writer: Any, tokens: list[str]) -> None:
    """Add a byte-level tokenizer with one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
