"""The tract target: options of the dialect, tolerances, the two engines (pip wheel, command line), and checks in them."""

from generic_export.inference_target.tract.check import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.inference_target.tract.checking import assert_io, assert_io_and_debug_bundle
from generic_export.inference_target.tract.engines.asking import assert_io_cmd_str
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.features import TractFeature, TractFeatureFlag
from generic_export.inference_target.tract.evidence.through_onnx import debug_dumper_pytorch_to_onnx_to_nnef
from generic_export.inference_target.tract.releases.downloader import TractBinaryDownloader
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.inference_target.version import SemanticVersion

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
