"""The dtype of KV caches, from the largest keys and values that PyTorch computes on the check's texts.

In: the states of a reference run. Out: their largest magnitudes, and options whose caches hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from generic_export.errors import NumericRangeError
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, HEADROOM
from kvcache.states.tensors import Slot
from t2n_llm.graph.options import GraphOptions
from t2n_llm.reporter import Reporter


def largest_values(states: Mapping[Slot, np.ndarray]) -> dict[Slot, float]:
    """Return the largest magnitude of each float state, by slot."""
    floats = {slot: values for slot, values in states.items() if values.dtype.kind == "f" and values.size}
    return {slot: float(np.abs(values).max()) for slot, values in floats.items()}


def largest_of_all(answers: Iterable[Mapping[Slot, float]]) -> dict[Slot, float]:
    """Return the largest magnitudes of several answers together."""
    largest: dict[Slot, float] = {}
    for answer in answers:
        largest |= {slot: max(size, largest.get(slot, 0.0)) for slot, size in answer.items()}
    return largest


def by_kind(largest: Mapping[Slot, float]) -> dict[str, float]:
    """Return the largest value of each kind of state."""
    kinds = {slot.kind for slot in largest}
    return {kind: max(size for slot, size in largest.items() if slot.kind == kind) for kind in sorted(kinds)}


def choose_cache_dtype(options: GraphOptions, largest: Mapping[Slot, float], reporter: Reporter) -> GraphOptions:
    """Decide `cache_dtype=auto`: f32 where values eight times as large as those measured exceed f16.

    Args:
        options: of an export.
        largest: magnitude of each state, by slot.
        reporter: receives a warning when the caches become f32.

    Raises:
        NumericRangeError: f16 caches are asked for, and do not hold what was measured; the message names the layer.
    """
    slot = _largest_cache(largest)
    if slot is None or not options.may_widen_cache or largest[slot] * HEADROOM <= F16_LIMIT:
        require_range(options, largest)
        return options
    reporter.warn(f"{_excess(slot, largest)}: caches are f32.")
    return replace(options, cache_dtype="f32")


def require_range(options: GraphOptions, largest: Mapping[Slot, float]) -> None:
    """Refuse f16 caches for keys and values that exceed f16.

    Raises:
        NumericRangeError: the message names the layer.
    """
    slot = _largest_cache(largest)
    if slot is not None and options.keeps_half_cache and largest[slot] > F16_LIMIT:
        raise NumericRangeError(f"{_excess(slot, largest)}.", "Use --cache-dtype f32, with f32 activations.")


def _largest_cache(largest: Mapping[Slot, float]) -> Slot | None:
    """Return the slot of the largest key or value."""
    caches = (slot for slot in largest if slot.kind.endswith(("_key", "_value")))
    return max(caches, key=lambda slot: largest[slot], default=None)


def _excess(slot: Slot, largest: Mapping[Slot, float]) -> str:
    place = f"{slot.kind} of layer {slot.layer}"
    return f"{place} reaches {largest[slot]:.3g} on the check's text; f16 holds at most {F16_LIMIT:.0f}"


__all__ = ["by_kind", "choose_cache_dtype", "largest_of_all", "largest_values", "require_range"]
