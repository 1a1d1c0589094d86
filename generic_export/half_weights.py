"""Modules whose matrices are stored in f16 and that compute in f32: which tensors, their bytes, and what PyTorch says with them.

In: a module, its document and sources. Out: the document and sources with f16 tensors; a block in which the module has them too.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.weights.source import TensorSource

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float16).max


def half_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the f32 parameters of rank 2 and more that f16 holds; those beyond its range are logged."""
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim >= 2 and parameter.dtype is torch.float32 and not parameter.is_meta
    }
    beyond = {name for name, matrix in matrices.items() if not _fits(matrix)}
    for name in sorted(beyond):
        logger.warning("%s stays in f32: its values exceed f16's %d, or are not finite", name, _LARGEST)
    return frozenset(matrices.keys() - beyond)


def in_half(document: NnefGraph, model: nn.Module) -> NnefGraph:
    """Return a document that reads a model's matrices in f16, where f16 holds them.

    Args:
        document: of the model.
        model: has the values.
    """
    return store_in_half(document, half_parameters(model))


def _fits(matrix: torch.Tensor) -> bool:
    return bool(torch.isfinite(matrix.detach().half()).all())


def stored_in_half(document: NnefGraph) -> frozenset[str]:
    """Return the names of the parameters that a document reads in f16."""
    return frozenset(variable.parameter for variable in document.variables if variable.dtype == "f16")


def half_sources(document: NnefGraph, sources: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """Return the sources, those of tensors that the document has in f16 cast while they stream."""
    labels = {variable.label for variable in document.variables if variable.dtype == "f16"}
    report = CastReport()
    return {
        label: cast_tensor(source, torch.float16, report) if label in labels else source
        for label, source in sources.items()
    }


@contextmanager
def rounded_to_half(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let parameters have f16's values, in f32, until the block ends; then they are what they were, bit for bit.

    Args:
        model: is run in the block.
        names: of its parameters.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(parameters[name]): parameters[name] for name in names if name in parameters}
    kept = [(parameter, parameter.data) for parameter in chosen.values()]
    try:
        for parameter, data in kept:
            parameter.data = data.half().to(data.dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


__all__ = ["half_parameters", "half_sources", "in_half", "rounded_to_half", "stored_in_half"]
