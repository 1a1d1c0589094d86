"""Exports of checkpoints that are quantised already: the recipe that keeps their blocks.

In: the graph and sources of an export. Out: a `Compression` that stores every exact tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from generic_export.nnef.graph import NnefGraph
from generic_export.weights.half import CastTensor
from generic_export.weights.source import RenamedTensor, TensorSource
from quant.prequantized import DecodedTensor, ExactTensor
from quant.recipe import Choice, Recipe, Rule
from quant.stream import PermutedTensor, QuantizedTensor
from t2n_llm.compress.apply import Compression, compress
from t2n_llm.compress.plan import plan_compression
from t2n_llm.source.empty_model import Weightless

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


def _stored(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it, whatever is done to it on the way."""
    while isinstance(source, CastTensor | RenamedTensor | PermutedTensor):
        source = source.source
    return source


def _other_names(label: str, skeleton: Weightless) -> list[str]:
    """Return the other names of a tied parameter."""
    owner = skeleton.tied.get(label, label)
    return [name for name in (owner, *(name for name, of in skeleton.tied.items() if of == owner)) if name != label]
