"""Keys and values against the range of an f16 cache: as large as PyTorch saw them on the check's texts.

In: the states that PyTorch kept. Out: their largest magnitudes, and an error where the caches of an export do not hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from generic_export.errors import CacheRangeError
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, HEADROOM
from kvcache.states.tensors import Slot
from t2n_llm.graph.options import GraphOptions


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


def require_range(largest: Mapping[Slot, float], options: GraphOptions) -> None:
    """Refuse f16 caches for keys and values that f16 does not hold.

    Raises:
        CacheRangeError: the message names the layer.
    """
    caches = {slot: size for slot, size in largest.items() if _is_cache(slot.kind)}
    slot = max(caches, key=lambda each: caches[each], default=None)
    if slot is None or not options.keeps_half_cache or caches[slot] <= F16_LIMIT:
        return
    raise CacheRangeError(
        f"{slot.kind} of layer {slot.layer} reaches {caches[slot]:.3g} on the check's text; f16 holds at most "
        f"{F16_LIMIT:.0f}.",
        "Use --cache-dtype f32, with f32 activations.",
    )


def require_room(largest: Mapping[str, float], options: GraphOptions) -> None:
    """Refuse f16 caches that nobody asked for where values eight times as large as those seen would not fit.

    Args:
        largest: of each kind of state.
        options: of the export.

    Raises:
        CacheRangeError: the message names the kind.
    """
    kind = max((each for each in largest if _is_cache(each)), key=lambda each: largest[each], default=None)
    if kind is not None and options.may_widen_cache and largest[kind] * HEADROOM > F16_LIMIT:
        raise CacheRangeError(
            f"{kind} reaches {largest[kind]:.3g} on the check's text; f16 holds at most {F16_LIMIT:.0f}.",
            "Use --cache-dtype f32.",
        )


def _is_cache(kind: str) -> bool:
    return kind.endswith(("_key", "_value"))


__all__ = ["by_kind", "largest_of_all", "largest_values", "require_range", "require_room"]
