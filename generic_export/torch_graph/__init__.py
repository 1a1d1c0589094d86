"""Room 1, capture: an `nn.Module` goes in, a `TorchModuleIRGraph` with symbolic sizes comes out.

The only room that touches PyTorch's internals. The names below are for readers of a graph: it with its example inputs
(`capture/snapshot.py`); the rooms behind this one take the graph itself (`ir.py`).
"""

from generic_export.torch_graph.capture.snapshot import Data, PythonConstant
from generic_export.torch_graph.capture.snapshot import GraphSnapshot as TorchModuleIRGraph
from generic_export.torch_graph.capture.snapshot import OpSnapshot as TorchOp
from generic_export.torch_graph.capture.snapshot import TensorListSnapshot as FixedTensorList
from generic_export.torch_graph.capture.snapshot import TensorSnapshot as TensorVariable
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.ir import TensorKind
from generic_export.torch_graph.methods import as_forward

__all__ = [
    "Data",
    "FixedTensorList",
    "PythonConstant",
    "TensorKind",
    "TensorVariable",
    "TorchModuleIRGraph",
    "TorchModuleTracer",
    "TorchOp",
    "as_forward",
]
