"""Rooms 4 and 5, run and compare: what an archive is written for, and the engine that proves it."""

from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.khronos import KhronosNNEF
from generic_export.inference_target.tract import (
    ToleranceLimits,
    TractCheckTolerance,
    TractCli,
    TractFeature,
    TractFeatureFlag,
    TractNNEF,
)
from generic_export.inference_target.version import SemanticVersion

__all__ = [
    "InferenceTarget",
    "KhronosNNEF",
    "SemanticVersion",
    "ToleranceLimits",
    "TractCheckTolerance",
    "TractCli",
    "TractFeature",
    "TractFeatureFlag",
    "TractNNEF",
]
