"""What every inference target answers; the export pipeline only calls these hooks, in this order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from generic_export.inference_target.example import ExampleCall, ExampleRun
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.sizes.declared_axes import check_names
from generic_export.translate.choices import Numerics, Spelling


class InferenceTarget:
    """Base of all targets.

    Attributes:
        dynamic_axes: `{name: {axis: symbol}}`, the axes that stay symbolic; one symbol is one size.
        check_io: run the archive in the target's engine and compare with PyTorch before the export returns.
    """

    dynamic_axes: DynamicAxes = MappingProxyType({})
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

    @property
    def refuses_sizes(self) -> bool:
        """Whether the engine refuses a run at sizes that an archive declares itself wrong at."""
        return False

    def with_dynamic_axes(self, axes: DynamicAxes) -> InferenceTarget:
        """Return the target with other dynamic axes, whatever class of yours it is."""
        other = copy.copy(self)
        object.__setattr__(other, "dynamic_axes", axes)
        return other

    def pre_trace(
        self, model: nn.Module, input_names: Sequence[str] | None, output_names: Sequence[str] | None
    ) -> None:
        """Refuse a module, dynamic axes, or an engine that is not there, before any work is done.

        Args:
            model: the module.
            input_names, output_names: the names that were given; None where they follow from the module.

        Raises:
            T2NError: the target cannot serve this export.
        """
        if input_names is not None:
            check_names(self.dynamic_axes, input_names, output_names)

    def post_capture(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        """Rewrite the captured graph before it is translated."""
        return graph

    def post_trace(self, nnef_graph: NnefGraph, active_custom_extensions: list[str]) -> NnefGraph | None:
        """Rewrite the translated document, or add to what it declares.

        Args:
            nnef_graph: the document, symbols and assertions of the dynamic axes included; it is immutable.
            active_custom_extensions: the lines that it declares, such as `tract_symbol S`; what is appended is declared too.

        Returns:
            Another document; None for the same.
        """
        return nnef_graph

    def specific_fragments(self, model: nn.Module) -> Mapping[str, str]:
        """Return fragments that the document needs for this target: their text by their names.

        A fragment with the name of an operator stands for that operator; one that the document has already is left out.
        """
        return {}

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the finished document as the target's engine reads it, or refuse it."""
        return graph

    def post_export(
        self,
        model: nn.Module,
        nnef_graph: NnefGraph,
        args: list[Any],
        exported_filepath: Path,
        debug_bundle_path: Path | None = None,
    ) -> None:
        """Prove the archive, when `check_io` is set.

        Args:
            model: the module, in eval mode.
            nnef_graph: the document that was written.
            args: arguments of the forward; an export gives an `ExampleCall`, which knows what PyTorch answered.
            exported_filepath: the archive.
            debug_bundle_path: where the case is written when the check fails.

        Raises:
            EngineError: the engine refused or failed.
            MismatchError: its outputs differ from PyTorch's.
        """


__all__ = ["ExampleCall", "ExampleRun", "InferenceTarget"]
