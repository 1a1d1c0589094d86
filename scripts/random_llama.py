"""Random checkpoints in the shape of Llama 3, laid out as on the hub: what the benchmarks export.

In: a `Shape`. Out: a folder with config.json and sharded safetensors of random bf16 weights, written a chunk at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 5_000_000_000  # what save_pretrained and the hub call 5GB
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    title: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rope_factor: float


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape("tiny Llama", 64, 2, 4, 2, 16, 128, 512, True, 8.0),
    "1B": Shape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, True, 32.0),
    "3B": Shape("Llama-3.2-3B", 3072, 28, 24, 8, 128, 8192, 128256, True, 32.0),
    "8B": Shape("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, False, 8.0),
}


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the content of `config.json`, in the words the hub's own files use."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, in the order of the hub's files."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, shape.intermediate),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for index in range(shape.layers):
        tensors |= {f"model.layers.{index}.{name}.weight": sizes for name, sizes in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    return tensors if shape.tied else tensors | {"lm_head.weight": (shape.vocab, hidden)}


def shards_of(tensors: Mapping[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Distribute the tensors over files of at most `limit` bytes, as far as single tensors allow."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, sizes in tensors.items():
        size = bytes_of(sizes)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_checkpoint(folder: Path, shape: Shape, *, shard_bytes: int = SHARD_BYTES, seed: int = 0) -> int:
    """Write config and random bf16 weights, a chunk at a time.

    Args:
        folder: made by this function.
        shape: the model.
        shard_bytes: most bytes of tensors in one file.
        seed: of the weights.

    Returns:
        Bytes of the whole folder.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2), encoding="utf-8")
    tensors = tensors_of(shape)
    shards = shards_of(tensors, shard_bytes)
    random = np.random.Generator(np.random.SFC64(seed))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        sharded = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = sharded if len(shards) > 1 else "model.safetensors"
        _write_shard(folder / file, {name: tensors[name] for name in names}, random)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(map(bytes_of, tensors.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def _write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]], random: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, sizes in tensors.items():
        end = position + bytes_of(sizes)
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for sizes in tensors.values():
            for chunk in random_bf16(bytes_of(sizes), random):
                file.write(chunk)


def random_bf16(nbytes: int, random: np.random.Generator) -> Iterator[memoryview]:
    """Yield `nbytes` of random bf16 values with magnitudes from 2^-7 to 2^-5, in chunks."""
    for start in range(0, nbytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, nbytes - start)
        bits = random.integers(0, 1 << 64, size=(size + 7) // 8, dtype=np.uint64)
        bits &= np.uint64(0x80FF_80FF_80FF_80FF)  # random sign, mantissa and lowest bit of the exponent
        bits |= np.uint64(0x3C00_3C00_3C00_3C00)
        yield memoryview(bits).cast("B")[:size]


def bytes_of(sizes: Sequence[int]) -> int:
    """Return how many bytes a bf16 tensor of these sizes takes."""
    total = 2
    for size in sizes:
        total *= size
    return total
