"""Random checkpoints in the shape of Llama 3, laid out as on the hub: what the benchmarks export.

In: a `Shape`. Out: a folder with config.json and sharded safetensors of random bf16 weights, written a chunk at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

SHARD_BYTES = 5_000_000_000  # what save_pretrained and the hub call 5GB
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, in the words of its config.json."""

    title: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rope_factor: float


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape("tiny Llama", 64, 2, 4, 2, 16, 128, 512, True, 8.0),
    "1B": Shape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, True, 32.0),
    "3B": Shape("Llama-3.2-3B", 3072, 28, 24, 8, 128, 8192, 128256, True, 32.0),
    "8B": Shape("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, False, 8.0),
}


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the content of `config.json`, in the words the hub's own files use."""
    sizes = {name: value for name, value in asdict(shape).items() if name not in ("title", "rope_factor")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        **sizes,
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
    """Return the shape of each tensor that a checkpoint holds."""
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig(**config_of(shape)))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shards_of(tensors: Mapping[str, tuple[int, ...]], limit: int) -> StateDictSplit:
    """Distribute the tensors over files of at most `limit` bytes, as far as single tensors allow."""
    return split_state_dict_into_shards_factory(
        dict(tensors), get_storage_size=bytes_of, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )


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
    split = shards_of(tensors, shard_bytes)
    random = np.random.Generator(np.random.SFC64(seed))
    for file, names in split.filename_to_tensors.items():
        _write_shard(folder / file, {name: tensors[name] for name in names}, random)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
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
        yield bits.data.cast("B")[:size]


def bytes_of(sizes: Sequence[int]) -> int:
    """Return how many bytes a bf16 tensor of these sizes takes."""
    return 2 * math.prod(sizes)
