"""What every inference target answers; the export pipeline only calls these hooks, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from generic_export.inference_target.example import ExampleRun
from generic_export.nnef.graph import NnefFragment, NnefGraph
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.request import DynamicAxes
from generic_export.translate.choices import Numerics, Spelling


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
    def spelling(self) -> Spelling:
        """Which of two ways to say the same thing is written."""
        return Spelling()

    @property
    def properties(self) -> Mapping[str, str | float]:
        """Key/value pairs that the document carries about its making."""
        return {}

    def pre_trace(self, model: nn.Module) -> None:
        """Refuse a module, or an engine that is not there, before any work is done.

        Raises:
            T2NError: the target cannot serve this export.
        """

    def post_trace(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        """Rewrite the captured graph before it is translated."""
        return graph

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Rewrite or refuse the NNEF document before it is written."""
        return graph

    def specific_fragments(self, graph: NnefGraph) -> Sequence[NnefFragment]:
        """Return fragments that the document needs for this target, after `post_translate`.

        A fragment with the name of an operator stands for that operator; one that the document has already is left out.
        """
        return ()

    def post_export(self, archive: Path, example: ExampleRun) -> None:
        """Prove the archive; called only when `check_io` is set.

        Raises:
            EngineError: the engine refused or failed.
            MismatchError: its outputs differ from PyTorch's.
        """


__all__ = ["ExampleRun", "InferenceTarget"]
