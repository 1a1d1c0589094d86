"""The tract target: options of the dialect, tolerances, and the two engines (pip wheel, command line)."""

from generic_export.inference_target.tract.check import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.inference_target.tract.engines.features import TractFeature
from generic_export.inference_target.tract.target import TractNNEF

__all__ = ["Comparison", "ToleranceLimits", "TractCheckTolerance", "TractFeature", "TractNNEF", "compare"]
