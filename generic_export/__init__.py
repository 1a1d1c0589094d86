"""Any `nn.Module` to an NNEF archive for tract. Knows nothing about language models or Hugging Face.

The names below are imported when first used: a command line that only prints its help should not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from generic_export.earlier_paths import keep_importable

if TYPE_CHECKING:
    from generic_export.debug.archive.through_onnx import debug_dumper_pytorch_to_onnx_to_nnef
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
    from generic_export.inference_target.tract.releases.downloader import TractBinaryDownloader
    from generic_export.opened_archive import open_archive
    from generic_export.torch_graph.methods import as_forward
    from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme
    from generic_export.torch_graph.request import DynamicSize
    from generic_export.write.weights_only import (
        export_tensors_from_disk_to_nnef,
        export_tensors_to_nnef,
        iter_torch_tensors_from_disk,
    )

_HOMES = {
    name: module
    for module, names in {
        "generic_export.diagnose.piece_by_piece": "CustomOpStrategy ModelDiagnoseOutput StatusExport StatusExportCode "
        "trace_execution_piece_by_piece trace_forward_execution",
        "generic_export.errors": "T2NError",
        "generic_export.export": "export_model_to_nnef",
        "generic_export.inference_target": "InferenceTarget KhronosNNEF SemanticVersion ToleranceLimits TractCheckTolerance "
        "TractCli TractFeature TractFeatureFlag TractNNEF",
        "generic_export.inference_target.tract.checking": "assert_io assert_io_and_debug_bundle",
        "generic_export.inference_target.tract.engines.asking": "assert_io_cmd_str",
        "generic_export.inference_target.tract.engines.streaming": "Streaming open_stream",
        "generic_export.debug.archive.through_onnx": "debug_dumper_pytorch_to_onnx_to_nnef",
        "generic_export.inference_target.tract.releases.downloader": "TractBinaryDownloader",
        "generic_export.opened_archive": "open_archive",
        "generic_export.torch_graph.methods": "as_forward",
        "generic_export.torch_graph.naming": "DEFAULT_VARNAME_SCHEME VariableNamingScheme",
        "generic_export.torch_graph.request": "DynamicSize",
        "generic_export.write.weights_only": "export_tensors_from_disk_to_nnef export_tensors_to_nnef iter_torch_tensors_from_disk",
    }.items()
    for name in names.split()
}

__all__ = [
    "DEFAULT_VARNAME_SCHEME",
    "CustomOpStrategy",
    "DynamicSize",
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
    "open_archive",
    "open_stream",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
]


keep_importable(
    {
        "generic_export.checking": "generic_export.inference_target.tract.checking",
        "generic_export.coverage": "generic_export.debug.coverage",
        "generic_export.exceptions": "generic_export.errors",
        "generic_export.inference_target.tract.wheel": "generic_export.inference_target.tract.engines.wheel",
        "generic_export.ops.builder": "generic_export.translate.builder",
        "generic_export.ops.modules": "generic_export.translate.modules",
        "generic_export.ops.registry": "generic_export.translate.registry",
        "generic_export.utils": "generic_export.inference_target.version",
        "generic_export.remodeler": "generic_export.remodel",
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
