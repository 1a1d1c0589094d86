"""What every inference target answers; the export pipeline only calls these hooks, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from generic_export.nnef.graph import NnefGraph
from generic_export.ops.builder import Numerics
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.tracer import DynamicAxes


@dataclass(frozen=True)
class ExampleRun:
    """One run of the PyTorch module, to compare an engine with.

    Attributes:
        inputs: input arrays, in the order of the graph's inputs.
        outputs: what PyTorch answered, in the order of the graph's outputs.
        output_names: names of the outputs, for messages.
    """

    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    output_names: Sequence[str]

    @staticmethod
    def from_tensors(
        inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], output_names: Sequence[str]
    ) -> ExampleRun:
        """Copy tensors of any device into arrays (bf16 widened to f32)."""
        return ExampleRun([_array(t) for t in inputs], [_array(t) for t in outputs], tuple(output_names))


def _array(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().cpu()
    plain = plain.dequantize() if plain.is_quantized else plain
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).contiguous().numpy()


@dataclass(frozen=True, kw_only=True)
class InferenceTarget:
    """Base of all targets.

    Args:
        dynamic_axes: `{input name: {axis: symbol}}`, the axes that stay symbolic; one symbol is one size.
        check_io: run the archive in the target's engine and compare with PyTorch before the export returns.
    """

    dynamic_axes: DynamicAxes = field(default_factory=dict)
    check_io: bool = True

    @property
    def numerics(self) -> Numerics:
        """Where an f16 graph computes in f32."""
        return Numerics()

    @property
    def properties(self) -> Mapping[str, str | float]:
        """Key/value pairs that the document carries about its making."""
        return {}

    def post_trace(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        """Rewrite the captured graph before it is translated."""
        return graph

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Rewrite or refuse the NNEF document before it is written."""
        return graph

    def post_export(self, archive: Path, example: ExampleRun) -> None:
        """Prove the archive; called only when `check_io` is set.

        Raises:
            EngineError: the engine refused or failed.
            MismatchError: its outputs differ from PyTorch's.
        """
