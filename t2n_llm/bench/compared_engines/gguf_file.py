"""A GGUF file of the weights that an export has, for llama.cpp: the same tensors in the same element types, without a tokenizer.

In: an opened source and how the export stores each parameter. Out: a file that takes token ids. Names come from gguf's own map,
keys from its constants; what llama.cpp wants otherwise than transformers is the table of families below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import OptionError, WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import value_pieces
from quant.blocks import TWICE
from t2n_llm.source.hub import ModelSource

_GIVE_A_FILE = "Give a GGUF file of it: --against llama.cpp:FILE.gguf."
_UNUSED = ("rotary_emb.inv_freq", "attention.masked_bias")  # old checkpoints hold what is computed

# How an export stores a tensor -> its type in the file. Q8_1 is not a file type of ggml's; Q8_0 has its bytes but the sums, and is
# what comes next to two Q4_0.
FILE_TYPES = {"q4_0": "Q4_0", TWICE: "Q8_0", "q8_1": "Q8_0"}

Change = Callable[[str, torch.Tensor, Any], torch.Tensor]


def _interleaved(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Reorder the rows of q and k: llama.cpp turns neighbours (2i, 2i + 1), transformers the halves (i, i + D / 2)."""
    if ".q_proj." in name:
        heads = config.num_attention_heads
    elif ".k_proj." in name:
        heads = config.num_key_value_heads
    else:
        return values
    halves = values.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(values.shape)


def _one_more(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Add the one that Gemma's norms add to their weights when they run."""
    return values + 1 if name.endswith("norm.weight") else values


def _as_it_is(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class _Family:
    """One architecture of llama.cpp, and how its tensors differ from the checkpoint's."""

    architecture: str
    change: Change


# model_type -> its form. llama.cpp reads Mistral as a Llama; it has no sliding window for either.
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LLAMA", _interleaved),
    "mistral": _Family("LLAMA", _interleaved),
    "qwen2": _Family("QWEN2", _as_it_is),
    "qwen3": _Family("QWEN3", _as_it_is),
    "gemma": _Family("GEMMA", _one_more),
}


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file: its name there, its type, and its values as float32 [..]."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def data(self) -> np.ndarray:
        """Return the bytes of the file, as gguf writes them."""
        from gguf.quants import quantize

        return np.ascontiguousarray(quantize(self.values(), self.kind))


def write_gguf(source: ModelSource, schemes: Mapping[str, str], path: Path) -> None:
    """Write the weights of a checkpoint as GGUF, one tensor in memory at a time.

    Args:
        source: the checkpoint that the export was made from.
        schemes: name of a parameter -> how the export stores it, such as `q4_0`; f16 for what it does not name.
        path: file to write.

    Raises:
        OptionError: the family has another form in GGUF than its tensors' names tell, or the config has a feature that
            has no key here; the message says to give a file.
        WeightError: a tensor has no name in GGUF.
    """
    import gguf

    family = _family_of(source.config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.architecture]])
    _describe(writer, source.config)
    entries = [*_entries(source, family, schemes), *_rope_factors(source.config)]
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, entry.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(entry.data())
    writer.close()


def check_gguf(config: Any) -> None:
    """Refuse early what `write_gguf` would refuse.

    Raises:
        OptionError: as `write_gguf`.
    """
    _family_of(config)
    _rope_scaling(config)


def _family_of(config: Any) -> _Family:
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise OptionError(
            f"a GGUF of {config.model_type!r} is not written here; known are {', '.join(_FAMILIES)}.", _GIVE_A_FILE
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise OptionError(f"a {config.model_type} with a sliding window has no plain GGUF form.", _GIVE_A_FILE)
    return family


# --- metadata ---------------------------------------------------------------------------------


def _describe(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, config.vocab_size)
    if _rope_scaling(config) == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(config.rope_parameters["factor"]))


def _add_vocabulary(writer: Any, size: int) -> None:
    """Add words that nobody reads, as token ids go in.

    llama.cpp itself takes a file without (`tokenizer.ggml.model` = "no_vocab"), node-llama-cpp 3.22 asks it to split a text all
    the same, which aborts ("Tokenizer not initialized").
    """
    from gguf import TokenType

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = ["a", "b", "ab", *(f"<{number}>" for number in range(3, size))]
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])  # the key must be there, and hold something


def _rope_scaling(config: Any) -> str:
    kind = str(config.rope_parameters.get("rope_type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise OptionError(f"rotary scaling {kind!r} has no plain GGUF form.", _GIVE_A_FILE)
    return kind


def _rope_factors(config: Any) -> Iterator[_Entry]:
    """Yield what Llama 3.1 and later divide their frequencies by (transformers, modeling_rope_utils, `llama3`)."""
    if _rope_scaling(config) != "llama3":
        return
    from gguf import GGMLQuantizationType

    rope = config.rope_parameters
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    yield _Entry("rope_freqs.weight", GGMLQuantizationType.F32, factors.shape, lambda: factors)


# --- tensors ----------------------------------------------------------------------------------


def _entries(source: ModelSource, family: _Family, schemes: Mapping[str, str]) -> Iterator[_Entry]:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], source.config.num_hidden_layers)
    tied = bool(source.config.tie_word_embeddings)
    for name, tensor in source.checkpoint().tensors.items():
        if name.endswith(_UNUSED) or (tied and name.endswith("lm_head.weight")):
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise WeightError(f"{source.name}: the tensor {name} has no name in GGUF.", _GIVE_A_FILE)
        kind = _kind(name, tensor.shape, schemes)
        yield _Entry(stored, kind, tensor.shape, _reader(name, tensor, family, source.config))


def _reader(name: str, tensor: TensorSource, family: _Family, config: Any) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        pieces = [piece.to(torch.float32) for piece in value_pieces(tensor)]
        values: np.ndarray = family.change(name, torch.cat(pieces).reshape(tensor.shape), config).numpy()
        return values

    return read


def _kind(name: str, shape: tuple[int, ...], schemes: Mapping[str, str]) -> Any:
    from gguf import GGMLQuantizationType

    if len(shape) < 2:
        return GGMLQuantizationType.F32  # what llama.cpp's own converter does, and its norms ask for
    return GGMLQuantizationType[FILE_TYPES.get(schemes.get(name, "f16"), "F16")]


__all__ = ["FILE_TYPES", "check_gguf", "write_gguf"]
