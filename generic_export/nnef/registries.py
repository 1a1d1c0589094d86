"""Which of tract's operator registries a document declares.

In: names of operators. Out: names for `extension tract_registry`; a document with further fragments and their registries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from generic_export.nnef.graph import NnefFragment, NnefGraph

# What the names of a registry's operators begin with, beside `tract_core`, which every tract document declares.
_PREFIXES = {
    "tract_transformers": ("tract_transformers_", "tract_moe_ffn"),
    "tract_extra": ("tract_extra_",),
    "tract_onnx": ("tract_onnx_",),
    "tract_pulse": ("tract_pulse_",),
}


def registries_of(operators: Collection[str]) -> tuple[str, ...]:
    """Return the registries that hold some operators, in the order they are declared."""
    named = (
        name for name, prefixes in _PREFIXES.items() if any(operator.startswith(prefixes) for operator in operators)
    )
    return ("tract_core", *named)


def with_fragments(graph: NnefGraph, fragments: Sequence[NnefFragment]) -> NnefGraph:
    """Return a document with further fragments before its own; those whose names it has already are left out."""
    own = {fragment.name for fragment in graph.fragments}
    added = tuple(fragment for fragment in fragments if fragment.name not in own)
    if not added:
        return graph
    calls = {call for fragment in added for call in fragment.calls}
    registries = dict.fromkeys((*graph.registries, *registries_of(calls)))
    return replace(graph, fragments=(*added, *graph.fragments), registries=tuple(registries))


__all__ = ["registries_of", "with_fragments"]
