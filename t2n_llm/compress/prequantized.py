"""Exports of checkpoints that are quantised already: the recipe that keeps their blocks, and their PyTorch model.

In: the graph and sources of an export, or a checkpoint's folder. Out: a `Compression` that stores every exact tensor as it is; a
causal LM with dequantised weights, the judge of such an export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import NotEnoughMemoryError
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.source import RenamedTensor, TensorSource
from generic_export.weights.values import read_tensor
from quant.half import CastTensor
from quant.prequantized import DecodedTensor, ExactTensor
from quant.recipe import Choice, Recipe, Rule
from quant.stream import PermutedTensor, QuantizedTensor
from t2n_llm.compress.apply import Compression, compress
from t2n_llm.compress.plan import plan_compression
from t2n_llm.source.empty_model import Weightless
from t2n_llm.source.hub import GGUF_SUFFIX, ModelSource, open_source
from t2n_llm.source.reference import SourceRef

AS_STORED = "as stored"
"""Name of the recipe of an export that was asked for none and whose checkpoint holds Q4_0's values."""

_EXAMPLES = 2


def kept_as_stored(skeleton: Weightless, graph: NnefGraph, sources: Mapping[str, TensorSource]) -> Compression | None:
    """Return what stores every tensor that is exactly Q4_0 as it is and leaves the others plain; None when none is.

    Args:
        skeleton, graph, sources: as an export without compression would write them.
    """
    exact = [label for label, source in sources.items() if is_exact(source)]
    if not exact:
        return None
    names = dict.fromkeys(name for label in exact for name in (label, *_other_names(label, skeleton)))
    recipe = Recipe(AS_STORED, tuple(Rule(name, Choice("q4_0")) for name in names))
    return replace(compress(plan_compression(recipe, skeleton, graph, sources), sources), warnings=())


def is_exact(source: TensorSource) -> bool:
    """Say whether a source's values are exactly those of Q4_0 blocks that the checkpoint holds."""
    return isinstance(_stored(source), ExactTensor)


def quantized_again(compression: Compression) -> str | None:
    """Return a warning that names the tensors that lose values for the second time, or None."""
    names = [
        label
        for label, source in compression.sources.items()
        if isinstance(source, QuantizedTensor)
        and isinstance(stored := _stored(source.source), DecodedTensor)
        and stored.was_quantized
    ]
    if not names:
        return None
    some = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return (
        f"{len(names)} tensor{'s' * (len(names) > 1)} ({some}) quantised in another format before: Q4_0 adds an error of "
        "its own. The original checkpoint gives a better archive."
    )


def require_resident(source: ModelSource, offloaded: bool) -> None:
    """Refuse the check of a quantised checkpoint whose dequantised weights do not fit in memory.

    Raises:
        NotEnoughMemoryError: they do not.
    """
    if source.is_quantized and offloaded:
        raise NotEnoughMemoryError(
            "the check of a checkpoint that is quantised already needs its PyTorch model in memory in f32, and it does "
            "not fit.",
            "Pass --no-check, and run t2n-llm validate on a larger machine.",
        )


def load_dequantized(weights: Path, *, trust_remote_code: bool = False) -> Any | None:
    """Return the model of a quantised checkpoint in f32, or None when the checkpoint is not quantised.

    A GGUF file is dequantised by transformers. The other formats would need a library each, most of which run on GPUs only:
    their values come from this project's own decoders, which are tested against the published formats.

    Args:
        weights: a folder, or a `.gguf` file.
        trust_remote_code: allow code that comes with the model.

    Raises:
        SourceError, WeightError: it cannot be read.
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    if weights.suffix == GGUF_SUFFIX and weights.is_file():
        from t2n_llm.source.gguf import load_gguf_model

        return load_gguf_model(weights)
    if not (weights / "config.json").is_file():
        return None
    from t2n_llm.check.reference_model import refuse_invented
    from t2n_llm.source.empty_model import meta_model

    source = open_source(SourceRef(str(weights), trust_remote_code=trust_remote_code), require_tokenizer=False)
    if source.quantization is None:
        return None
    model_class = type(meta_model(source.config, trust_remote_code=source.trust_remote_code))
    model, missing = dequantized(source, model_class)
    refuse_invented(source.name, missing)
    return model


def dequantized(source: ModelSource, model_class: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a quantised checkpoint in f32, and the parameters that the checkpoint has no values of.

    Args:
        source: a folder with quantised weights.
        model_class: of transformers.
    """
    state = {name: read_tensor(tensor) for name, tensor in source.checkpoint().tensors.items()}
    model, report = model_class.from_pretrained(
        None,
        config=source.config,
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    return model.eval(), tuple(sorted(report.get("missing_keys", ())))


def _stored(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it, whatever is done to it on the way."""
    while isinstance(source, CastTensor | RenamedTensor | PermutedTensor):
        source = source.source
    return source


def _other_names(label: str, skeleton: Weightless) -> list[str]:
    """Return the other names of a tied parameter."""
    owner = skeleton.tied.get(label, label)
    return [name for name in (owner, *(name for name, of in skeleton.tied.items() if of == owner)) if name != label]
