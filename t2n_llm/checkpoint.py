"""Which checkpoint tensor is which model parameter, and how its bytes become the graph's element type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from torch import nn

from generic_export.errors import MissingTensorError
from generic_export.nnef.graph import NnefGraph
from generic_export.ops.builder import TRACT_DTYPES
from generic_export.weights.safetensors_index import Checkpoint
from generic_export.weights.source import InMemoryTensor, TensorSource
from quant.half import CastReport, cast_tensor
from t2n_llm.model import Skeleton

_TORCH_DTYPES = {name: dtype for dtype, name in TRACT_DTYPES.items()}


def graph_sources(
    graph: NnefGraph, skeleton: Skeleton, checkpoint: Checkpoint, report: CastReport
) -> dict[str, TensorSource]:
    """Return a source for each variable of a graph, cast to the element type the graph reads.

    Args:
        graph: its variables bear the model's parameter names.
        skeleton: gives the tied names and the buffers that the model computes itself.
        checkpoint: the safetensors files.
        report: filled, while the sources are streamed, with the values that do not fit f16.

    Raises:
        MissingTensorError: a parameter is in neither.
    """
    aliases = _aliases(skeleton.tied)
    causal_lm = skeleton.module.causal_lm
    tensors = by_parameter_name(causal_lm, checkpoint.tensors)
    sources: dict[str, TensorSource] = {}
    for variable in graph.variables:
        names = (variable.label, *aliases.get(variable.label, ()))
        found = next((tensors[name] for name in names if name in tensors), None)
        if found is None and variable.label in skeleton.buffers:
            found = InMemoryTensor(variable.label, skeleton.buffers[variable.label])
        if found is None:
            unclaimed = sorted(tensors.keys() - causal_lm.state_dict().keys())
            raise _missing(variable.label, len(checkpoint.files), unclaimed)
        sources[variable.label] = cast_tensor(found, _TORCH_DTYPES[variable.dtype], report)
    return sources


def _aliases(tied: Mapping[str, str]) -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for name, owner in tied.items():
        aliases.setdefault(owner, []).append(name)
        aliases.setdefault(name, []).append(owner)
    return aliases


def by_parameter_name(model: nn.Module, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the checkpoint's tensors under the names of the model's parameters, by transformers' own renaming tables.

    A key that only a conversion of several tensors makes (stacked experts) keeps its own name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix, parameters = getattr(model, "base_model_prefix", None), model.state_dict()
    named: dict[str, TensorSource] = {}
    for key, tensor in tensors.items():
        name, converted = rename_source_key(key, renamings, converters, prefix, parameters)
        named[key if converted is not None else name] = tensor
    return named


def _missing(name: str, files: int, unclaimed: Sequence[str]) -> MissingTensorError:
    """Return the error for a parameter that has no tensor; `unclaimed` are the tensors that have no parameter."""
    near = get_close_matches(name, unclaimed, n=1, cutoff=0.5)
    hint = "The checkpoint is incomplete, or does not belong to this config."
    return MissingTensorError(
        f"the checkpoint ({files} file{'s' * (files > 1)}) holds no tensor {name!r}.",
        f"The nearest name there is {near[0]!r}." if near else hint,
    )
