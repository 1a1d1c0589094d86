"""A GGUF file as the source of a model: config and tokenizer through transformers, weights from the mapped file.

In: the path of a `.gguf` file, or of the first part of several. Out: its metadata as a folder, and a checkpoint under transformers'
parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from generic_export.errors import MissingTokenizerError, SourceError, UnknownArchitectureError
from generic_export.weights.checkpoint import Checkpoint
from quant.prequantized import GgufFile, open_gguf
from quant.prequantized.gguf_parts import models_in
from quant.prequantized.gguf_reader import gguf_reader
from t2n_llm.compat import gguf_read_with
from t2n_llm.source.gguf_layout import parameter_sources
from t2n_llm.source.gguf_tokenizer import Tell, write_tokenizer
from t2n_llm.source.limits import refuse_counts
from t2n_llm.source.reference import SourceRef
from t2n_llm.source.source_files import hold_gguf

_MOST_LAYERS = SourceRef().max_layers
_EXACT_KINDS = ("Q4_0", "F16", "BF16", "F32")
# llama.cpp computes the frequencies of Llama 3.1's long context itself; transformers' GGUF support reads no rope scaling.
_LONG_ROPE = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufMetadata:
    """What a GGUF file says besides its weights.

    Attributes:
        config: transformers config.
        folder: config.json and tokenizer files; removed with this object.
    """

    config: Any
    folder: TemporaryDirectory[str]


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF model of a folder without a config, or the first part of it; None when there is none.

    Raises:
        SourceError: there are several.
    """
    models = () if (folder / "config.json").is_file() else models_in(folder)
    if len(models) > 1:
        raise SourceError(
            f"{folder}: it has {len(models)} GGUF models: {', '.join(path.name for path in models[:3])}"
            f"{', ...' if len(models) > 3 else ''}.",
            "Use the path of one of them.",
        )
    return models[0] if models else None


def read_gguf_config(path: Path, max_layers: int = _MOST_LAYERS) -> Any:
    """Return the transformers config of a GGUF file, of at most so many layers.

    Raises:
        UnknownArchitectureError, SourceError: as `gguf_config`.
        WeightError, CorruptCheckpointError: as `open_gguf`.
    """
    file = open_gguf(path)
    refuse_counts(path.name, file.numbers, max_layers)
    return gguf_config(file)


def read_gguf_metadata(
    path: Path, max_layers: int = _MOST_LAYERS, *, require_tokenizer: bool, tell: Tell
) -> GgufMetadata:
    """Read config and tokenizer of a GGUF file.

    Args:
        path: the file.
        max_layers: that it may have.
        require_tokenizer: refuse a file whose tokenizer transformers cannot build; else go without.
        tell: told what is done that takes its time.

    Raises:
        UnknownArchitectureError: transformers reads no GGUF files of this architecture.
        SourceError: the metadata have no meaning.
        MissingTokenizerError: a tokenizer is required.
        WeightError, CorruptCheckpointError: as `open_gguf`.
    """
    file = open_gguf(path)  # says what is wrong with a damaged file
    refuse_counts(path.name, file.numbers, max_layers)
    config = gguf_config(file)
    folder = TemporaryDirectory(prefix="t2n-llm-gguf-")
    try:
        write_tokenizer(file, Path(folder.name), tell)
    except MissingTokenizerError:
        if require_tokenizer:
            raise
    config.save_pretrained(folder.name)
    return GgufMetadata(config, folder)


def gguf_checkpoint(path: Path, config: Any) -> Checkpoint:
    """Open the weights of a GGUF file under the names of transformers' parameters; none is read.

    Args:
        path: the file, or the first part.
        config: transformers config, as `read_gguf_metadata` gives it.

    Raises:
        UnknownArchitectureError, WeightError, CorruptCheckpointError: as `open_gguf` and `parameter_sources`.
    """
    held = hold_gguf(path)
    file = open_gguf(path)
    held += hold_gguf(*file.paths[1:])
    total = sum(tensor.data.nbytes for tensor in file.tensors.values())
    return Checkpoint(parameter_sources(file, config), file.paths, total, tuple(_notes(file)), held)


def load_gguf_model(path: Path) -> Any | None:
    """Return the model of a GGUF file in f32, dequantised by transformers: the judge of an export from it.

    Returns:
        None where transformers cannot know better: of a model in several parts it reads one, of a Mixtral no experts.

    Raises:
        SourceError: transformers cannot load it.
        WeightError, CorruptCheckpointError: as `open_gguf`.
    """
    from transformers import AutoModelForCausalLM

    file = open_gguf(path)
    if len(file.paths) > 1 or is_mixtral(file):
        return None
    try:
        with gguf_read_with(gguf_reader()):
            model = AutoModelForCausalLM.from_pretrained(
                path.parent,
                config=gguf_config(file),
                gguf_file=path.name,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
            )
    except Exception as error:
        raise SourceError(
            f"{path}: transformers cannot load it: {type(error).__name__}: {error}",
            "Pass --no-check to export without a check.",
        ) from error
    return model.eval()


def _notes(file: GgufFile) -> Iterator[str]:
    kinds: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in _EXACT_KINDS:
            kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
    for kind, count in sorted(kinds.items()):
        yield (
            f"gguf: {count} tensor{'s' * (count > 1)} of type {kind} {'are' if count > 1 else 'is'} "
            "dequantized: tract runs Q4_0 only."
        )
    if _LONG_ROPE in file.tensors:
        yield (
            "gguf: the file scales rotary positions (rope_freqs), which transformers does not read from GGUF; "
            "texts longer than the original context will differ. For those, export the original checkpoint."
        )


# --- configs of GGUF files ---------------------------------------------------------------------------


# Attribute of a config -> key after the architecture. transformers takes the class's default for them, whatever the file says.
_ABOUT_EXPERTS: Mapping[str, str] = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
_TIED_ANYWAY = ("falcon", "bloom")
_NOT_MIXTRALS = ("model_type", "architectures", "transformers_version", "attention_bias", "mlp_bias", "pretraining_tp")


def gguf_config(file: GgufFile) -> Any:
    """Return the transformers config of a file.

    Raises:
        UnknownArchitectureError: transformers reads no GGUF files of this architecture.
        SourceError: the metadata have no meaning.
    """
    from transformers import AutoConfig

    path = file.paths[0]
    with gguf_read_with(gguf_reader()):
        try:
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
            return _completed(file, config)
        except Exception as error:
            raise _config_error(file, error) from error


def is_mixtral(file: GgufFile) -> bool:
    """Say whether a file of Llama's architecture has experts, which transformers takes for a Llama without."""
    return file.architecture == "llama" and file.numbers.get("llama.expert_count", 0) > 0


def _completed(file: GgufFile, config: Any) -> Any:
    if is_mixtral(file):
        config = _mixtral(file, config)
    for attribute, key in _ABOUT_EXPERTS.items():
        value = file.numbers.get(f"{file.architecture}.{key}")
        if value is not None and hasattr(config, attribute):
            setattr(config, attribute, value)
    if len(file.paths) > 1 and file.architecture not in _TIED_ANYWAY:
        config.tie_word_embeddings = "output.weight" not in file.tensors  # transformers looks into the first part
    return config


def _mixtral(file: GgufFile, llama: Any) -> Any:
    from transformers import AutoConfig

    shared = {name: value for name, value in llama.to_dict().items() if name not in _NOT_MIXTRALS}
    return AutoConfig.for_model(
        "mixtral",
        **shared,
        architectures=["MixtralForCausalLM"],
        num_local_experts=file.numbers["llama.expert_count"],
        num_experts_per_tok=file.numbers.get("llama.expert_used_count", 2),
    )


def _config_error(file: GgufFile, error: Exception) -> SourceError:
    if "not supported" in str(error):
        return UnknownArchitectureError(
            f"{file.paths[0]}: transformers does not support GGUF files of architecture {file.architecture!r}.",
            "Use the original checkpoint.",
        )
    return SourceError(f"{file.paths[0]}: its metadata do not form a config: {error}", "Use the original checkpoint.")
