"""A captured graph made to fit f16: what leaves it is kept times a power of two, or in f32 where something reads it as it is.

In: a captured f16 graph and the magnitudes of its tensors. Out: a graph that computes the same, and what was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.precision.islands import with_islands
from generic_export.torch_graph.precision.rescaling import Rescaling, rescaled
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, HEADROOM, ScaleGroup, float_results


def fitted(graph: TorchModuleIRGraph, largest: Mapping[str, float], *, islands: bool = False) -> Rescaling:
    """Make a graph fit f16, with room for values eight times as large as those that were measured.

    Args:
        graph: captured in f16.
        largest: magnitude of each tensor on typical inputs, by name (see `magnitudes.measured`).
        islands: keep in f32 what could be kept smaller too.
    """
    large = _large_results(graph, largest)
    kept: tuple[ScaleGroup, ...] = ()
    while True:
        names = {name for group in kept for name in group.tensors}
        found = rescaled(*with_islands(graph, names, largest))
        chosen = [group for group in found.groups if islands or not group.exponent]
        further = [_kept_in_f32(group, large - names) for group in chosen if group.tensors & (large - names)]
        if not further:
            return replace(found, groups=(*kept, *found.groups))
        kept += tuple(further)


def _large_results(graph: TorchModuleIRGraph, largest: Mapping[str, float]) -> set[str]:
    """Return the names of the f16 results that have no room for larger values; what others are handed stays what it is."""
    made = (result.name for op in graph.ops for result in float_results(op) if result.dtype is torch.float16)
    outputs = {output.name for output in graph.outputs}
    return {name for name in made if name not in outputs and largest.get(name, 0.0) * HEADROOM > F16_LIMIT}


def _kept_in_f32(group: ScaleGroup, large: set[str]) -> ScaleGroup:
    return replace(group, tensors=group.tensors & large, exponent=0, in_f32=True)


__all__ = ["fitted"]
