"""Checkpoints that are quantized already: tensors that are exactly Q4_0 keep their blocks, and others lose values twice.

In: a plain or a compressed `StoredGraph`. Out: one with the blocks of the checkpoint, and a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from generic_export.weights.half import CastTensor
from generic_export.weights.source import RenamedTensor, TensorSource
from quant.prequantized import DecodedTensor, ExactTensor
from quant.recipe import Choice, Recipe, Rule
from quant.stream import PermutedTensor, QuantizedTensor
from t2n_llm.compress.apply import compress
from t2n_llm.compress.plan import plan_compression
from t2n_llm.compress.request import AS_STORED
from t2n_llm.compress.stored_graph import StoredGraph

_EXAMPLES = 2


def keep_stored_blocks(plain: StoredGraph) -> StoredGraph:
    """Return a plain graph with every tensor that is exactly Q4_0 in the blocks of the checkpoint."""
    model = plain.model
    exact = [label for label, source in model.sources.items() if _is_exact(source)]
    if not exact:
        return plain
    names = dict.fromkeys(name for label in exact for name in (label, *_other_names(label, model.tied)))
    recipe = Recipe(AS_STORED, tuple(Rule(name, Choice("q4_0")) for name in names))
    return replace(compress(plan_compression(recipe, model), model), warnings=())


def _is_exact(source: TensorSource) -> bool:
    """Say whether a source's values are exactly those of Q4_0 blocks that the checkpoint holds."""
    return isinstance(_in_checkpoint(source), ExactTensor)


def quantized_again(graph: StoredGraph) -> str | None:
    """Return a warning that names the tensors that lose values for the second time, or None."""
    names = [
        label
        for label, source in graph.model.sources.items()
        if isinstance(source, QuantizedTensor)
        and isinstance(stored := _in_checkpoint(source.source), DecodedTensor)
        and stored.was_quantized
    ]
    if not names:
        return None
    some = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return (
        f"{len(names)} tensor{'s' * (len(names) > 1)} ({some}) were quantized in another format before; Q4_0 "
        "adds its own error. The original checkpoint gives a more accurate archive."
    )


def _in_checkpoint(source: TensorSource) -> TensorSource:
    """Return the checkpoint's tensor behind a source that casts, renames or permutes it."""
    while isinstance(source, CastTensor | RenamedTensor | PermutedTensor):
        source = source.source
    return source


def _other_names(label: str, tied: Mapping[str, str]) -> list[str]:
    """Return the other names of a tied parameter."""
    owner = tied.get(label, label)
    return [name for name in (owner, *(name for name, of in tied.items() if of == owner)) if name != label]
