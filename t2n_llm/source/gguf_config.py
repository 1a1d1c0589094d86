"""The config of a GGUF file: transformers' own reading of its metadata, and what that leaves out about experts.

In: an opened file. Out: a transformers config. Keys: llama.cpp's gguf-py/gguf/constants.py, `Keys.LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generic_export.errors import SourceError, UnknownArchitectureError
from quant.prequantized import GgufFile
from quant.prequantized.gguf_reader import gguf_reader
from t2n_llm.compat import gguf_read_with

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
