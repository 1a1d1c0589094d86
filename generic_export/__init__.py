"""Any `nn.Module` to an NNEF archive for tract. Knows nothing about language models or Hugging Face.

The names below are imported when first used: a command line that only prints its help should not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from generic_export.earlier_paths import keep_importable

if TYPE_CHECKING:
    from generic_export.diagnose.piece_by_piece import (
        CustomOpStrategy,
        ModelDiagnoseOutput,
        StatusExport,
        StatusExportCode,
        trace_execution_piece_by_piece,
        trace_forward_execution,
    )
    from generic_export.errors import T2NError
    from generic_export.export import export_model_to_nnef
    from generic_export.inference_target import (
        InferenceTarget,
        KhronosNNEF,
        SemanticVersion,
        ToleranceLimits,
        TractCheckTolerance,
        TractCli,
        TractFeature,
        TractFeatureFlag,
        TractNNEF,
    )
    from generic_export.inference_target.tract.checking import assert_io, assert_io_and_debug_bundle
    from generic_export.inference_target.tract.engines.asking import assert_io_cmd_str
    from generic_export.inference_target.tract.engines.streaming import Streaming, open_stream
    from generic_export.inference_target.tract.evidence.through_onnx import debug_dumper_pytorch_to_onnx_to_nnef
    from generic_export.inference_target.tract.releases.downloader import TractBinaryDownloader
    from generic_export.torch_graph.methods import as_forward
    from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme
    from generic_export.write.weights_only import (
        export_tensors_from_disk_to_nnef,
        export_tensors_to_nnef,
        iter_torch_tensors_from_disk,
    )

_HOMES = {
    "DEFAULT_VARNAME_SCHEME": "generic_export.torch_graph.naming",
    "CustomOpStrategy": "generic_export.diagnose.piece_by_piece",
    "InferenceTarget": "generic_export.inference_target",
    "KhronosNNEF": "generic_export.inference_target",
    "ModelDiagnoseOutput": "generic_export.diagnose.piece_by_piece",
    "SemanticVersion": "generic_export.inference_target",
    "Streaming": "generic_export.inference_target.tract.engines.streaming",
    "StatusExport": "generic_export.diagnose.piece_by_piece",
    "StatusExportCode": "generic_export.diagnose.piece_by_piece",
    "T2NError": "generic_export.errors",
    "ToleranceLimits": "generic_export.inference_target",
    "TractBinaryDownloader": "generic_export.inference_target.tract.releases.downloader",
    "TractCheckTolerance": "generic_export.inference_target",
    "TractCli": "generic_export.inference_target",
    "TractFeature": "generic_export.inference_target",
    "TractFeatureFlag": "generic_export.inference_target",
    "TractNNEF": "generic_export.inference_target",
    "VariableNamingScheme": "generic_export.torch_graph.naming",
    "as_forward": "generic_export.torch_graph.methods",
    "assert_io": "generic_export.inference_target.tract.checking",
    "assert_io_and_debug_bundle": "generic_export.inference_target.tract.checking",
    "assert_io_cmd_str": "generic_export.inference_target.tract.engines.asking",
    "debug_dumper_pytorch_to_onnx_to_nnef": "generic_export.inference_target.tract.evidence.through_onnx",
    "export_model_to_nnef": "generic_export.export",
    "export_tensors_from_disk_to_nnef": "generic_export.write.weights_only",
    "export_tensors_to_nnef": "generic_export.write.weights_only",
    "open_stream": "generic_export.inference_target.tract.engines.streaming",
    "iter_torch_tensors_from_disk": "generic_export.write.weights_only",
    "trace_execution_piece_by_piece": "generic_export.diagnose.piece_by_piece",
    "trace_forward_execution": "generic_export.diagnose.piece_by_piece",
}

__all__ = [
    "DEFAULT_VARNAME_SCHEME",
    "CustomOpStrategy",
    "InferenceTarget",
    "KhronosNNEF",
    "ModelDiagnoseOutput",
    "SemanticVersion",
    "StatusExport",
    "StatusExportCode",
    "Streaming",
    "T2NError",
    "ToleranceLimits",
    "TractBinaryDownloader",
    "TractCheckTolerance",
    "TractCli",
    "TractFeature",
    "TractFeatureFlag",
    "TractNNEF",
    "VariableNamingScheme",
    "as_forward",
    "assert_io",
    "assert_io_and_debug_bundle",
    "assert_io_cmd_str",
    "debug_dumper_pytorch_to_onnx_to_nnef",
    "export_model_to_nnef",
    "export_tensors_from_disk_to_nnef",
    "export_tensors_to_nnef",
    "iter_torch_tensors_from_disk",
    "open_stream",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
]


keep_importable(
    {
        "generic_export.checking": "generic_export.inference_target.tract.checking",
        "generic_export.exceptions": "generic_export.errors",
        "generic_export.inference_target.tract.wheel": "generic_export.inference_target.tract.engines.wheel",
        "generic_export.ops.builder": "generic_export.translate.builder",
        "generic_export.ops.modules": "generic_export.translate.modules",
        "generic_export.ops.registry": "generic_export.translate.registry",
        "generic_export.utils": "generic_export.inference_target.version",
        "generic_export.torch_graph.harden": "generic_export.torchscript.harden",
        "generic_export.torch_graph.jit_inline": "generic_export.torchscript.harden",
        "generic_export.torch_graph.jit_passes": "generic_export.torchscript.harden",
        "generic_export.weights.disk": "generic_export.write.weights_only",
    }
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'generic_export' has no attribute {name!r}")
