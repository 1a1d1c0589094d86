"""The tract target: options of the dialect, tolerances, the two engines (pip wheel, command line), and checks in them.

The checks live in rooms above this one, which know how a module is captured; they are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from generic_export.inference_target.tract.check import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.inference_target.tract.engines.asking import assert_io_cmd_str
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.features import TractFeature, TractFeatureFlag
from generic_export.inference_target.tract.releases.downloader import TractBinaryDownloader
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.inference_target.version import SemanticVersion

if TYPE_CHECKING:
    assert_io: Any
    assert_io_and_debug_bundle: Any
    debug_dumper_pytorch_to_onnx_to_nnef: Any

_ABOVE = {
    "assert_io": "generic_export.checking",
    "assert_io_and_debug_bundle": "generic_export.checking",
    "debug_dumper_pytorch_to_onnx_to_nnef": "generic_export.inference_target.tract.evidence.through_onnx",
}

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
    if name in _ABOVE:
        return getattr(import_module(_ABOVE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
