"""Room 1, capture: an `nn.Module` goes in, a `TorchModuleIRGraph` with symbolic sizes comes out.

The only room that touches PyTorch's internals.
"""

from generic_export.torch_graph.ir import FixedTensorList, TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.tracer import TorchModuleTracer

__all__ = [
    "FixedTensorList",
    "TensorKind",
    "TensorVariable",
    "TorchModuleIRGraph",
    "TorchModuleTracer",
    "TorchOp",
]
