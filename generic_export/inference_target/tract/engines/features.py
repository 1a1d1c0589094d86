"""`TractFeature`: what a tract runtime may be built with beside its core: registries of operators, complex numbers.

In: what the user says about the runtime. Out: which operators an archive may hold, and what an engine enables.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from generic_export.errors import OptionError


class TractFeature(enum.Enum):
    """Optional parts of tract: operator registries, by their names in `extension tract_registry`, and complex numbers.

    `COMPLEX` does not change the archive: complex tensors are stored as pairs of real numbers, which every runtime reads.
    """

    TRANSFORMERS = "tract_transformers"
    EXTRA = "tract_extra"
    ONNX = "tract_onnx"
    PULSE = "tract_pulse"
    COMPLEX = "complex"


TractFeatureFlag = TractFeature  # the documents' name

# What the pip wheel and the command line are asked for when nothing is said.
DEFAULT_FEATURES = frozenset({TractFeature.TRANSFORMERS, TractFeature.EXTRA})


def features_of(names: Iterable[str | TractFeature]) -> frozenset[TractFeature]:
    """Return features by name; `tract_onnx` and `onnx` are the same.

    Raises:
        OptionError: tract has no such feature, or the names are not a collection.
    """
    if isinstance(names, (str, TractFeature)) or not isinstance(names, Iterable):
        raise OptionError(f"feature_flags is {names!r}.", "Give a set of TractFeature, or of their names.")
    known = {feature.value.removeprefix("tract_"): feature for feature in TractFeature}
    found = set()
    for name in names:
        feature = name if isinstance(name, TractFeature) else known.get(str(name).removeprefix("tract_"))
        if feature is None:
            choices = ", ".join(sorted(feature.value for feature in TractFeature))
            raise OptionError(f"tract has no feature {name!r}.", f"Choose among {choices}.")
        found.add(feature)
    if found == {TractFeature.COMPLEX}:  # which says nothing about registries
        found |= DEFAULT_FEATURES
    return frozenset(found)


def registry_names(features: Collection[TractFeature]) -> tuple[str, ...]:
    """Return the names of registries, in the order they are enabled (later ones win a clash of names)."""
    registries = (feature for feature in TractFeature if feature is not TractFeature.COMPLEX)
    return tuple(feature.value for feature in registries if feature in features)


DEFAULT_REGISTRIES = registry_names(DEFAULT_FEATURES)

__all__ = [
    "DEFAULT_FEATURES",
    "DEFAULT_REGISTRIES",
    "TractFeature",
    "TractFeatureFlag",
    "features_of",
    "registry_names",
]
