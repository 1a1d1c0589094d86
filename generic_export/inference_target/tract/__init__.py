"""The tract target: options of the dialect, tolerances, the two engines (pip wheel, command line), and checks in them.

Checks of archives are imported when first used: debugging imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from generic_export.compare.comparison import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.inference_target.tract.engines.asking import assert_io_cmd_str
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.features import TractFeature, TractFeatureFlag
from generic_export.inference_target.tract.releases.downloader import TractBinaryDownloader
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.inference_target.version import SemanticVersion

if TYPE_CHECKING:
    from generic_export.debug.archive.through_onnx import debug_dumper_pytorch_to_onnx_to_nnef
    from generic_export.inference_target.tract.checking import assert_io, assert_io_and_debug_bundle

__all__ = [
    "Comparison",
    "SemanticVersion",
    "ToleranceLimits",
    "TractBinaryDownloader",
    "TractCheckTolerance",
    "TractCli",
    "TractFeature",
    "TractFeatureFlag",
    "TractNNEF",
    "assert_io",
    "assert_io_and_debug_bundle",
    "assert_io_cmd_str",
    "compare",
    "debug_dumper_pytorch_to_onnx_to_nnef",
]


def __getattr__(name: str) -> Any:
    if name in ("assert_io", "assert_io_and_debug_bundle"):
        return getattr(import_module("generic_export.inference_target.tract.checking"), name)
    if name == "debug_dumper_pytorch_to_onnx_to_nnef":
        return getattr(import_module("generic_export.debug.archive.through_onnx"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
