"""`TractFeature`: the operator registries that a tract runtime may be built with, beside its core.

In: what the user says about the runtime. Out: which operators an archive may hold, and what an engine enables.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from generic_export.errors import OptionError


class TractFeature(enum.Enum):
    """An optional registry of tract; the value is its name in `extension tract_registry`."""

    TRANSFORMERS = "tract_transformers"
    EXTRA = "tract_extra"
    ONNX = "tract_onnx"
    PULSE = "tract_pulse"


# What the pip wheel and the command line are asked for when nothing is said.
DEFAULT_FEATURES = frozenset({TractFeature.TRANSFORMERS, TractFeature.EXTRA})


def features_of(names: Iterable[str | TractFeature]) -> frozenset[TractFeature]:
    """Return features by name; `tract_onnx` and `onnx` are the same.

    Raises:
        OptionError: tract has no such registry.
    """
    known = {feature.value: feature for feature in TractFeature}
    found = set()
    for name in names:
        feature = name if isinstance(name, TractFeature) else known.get(f"tract_{name.removeprefix('tract_')}")
        if feature is None:
            raise OptionError(f"tract has no registry {name!r}.", f"Choose among {', '.join(sorted(known))}.")
        found.add(feature)
    return frozenset(found)


def registry_names(features: Collection[TractFeature]) -> tuple[str, ...]:
    """Return the names of registries, in the order they are enabled (later ones win a clash of names)."""
    return tuple(feature.value for feature in TractFeature if feature in features)


DEFAULT_REGISTRIES = registry_names(DEFAULT_FEATURES)

__all__ = ["DEFAULT_FEATURES", "DEFAULT_REGISTRIES", "TractFeature", "features_of", "registry_names"]
