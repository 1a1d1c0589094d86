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
    """Base class of export targets.

    Attributes:
        dynamic_axes: `{name: {axis: symbol}}`, the axes that stay symbolic. Axes with the same symbol have the same size.
        check_io: run the archive in the target's engine and compare it with PyTorch before the export returns.
    """

    dynamic_axes: DynamicAxes = MappingProxyType({})
    check_io: bool = True

    @property
    def numerics(self) -> Numerics:
        """Operators of an f16 graph that compute in f32."""
        return Numerics()

    @property
    def spelling(self) -> Spelling:
        """Which form is written where NNEF has several equivalent forms."""
        return Spelling()

    @property
    def properties(self) -> Mapping[str, str | float]:
        """Key/value pairs that describe the export and are stored in the document."""
        return {}

    @property
    def refuses_sizes(self) -> bool:
        """Whether the engine refuses to run at sizes that the archive excludes."""
        return False

    def with_dynamic_axes(self, axes: DynamicAxes) -> InferenceTarget:
        """Return a copy of this target with other dynamic axes. Subclasses keep their class.

        Args:
            axes: as the attribute `dynamic_axes`.
        """
        other = copy.copy(self)
        object.__setattr__(other, "dynamic_axes", axes)
        return other

    def pre_trace(
        self, model: nn.Module, input_names: Sequence[str] | None, output_names: Sequence[str] | None
    ) -> None:
        """Validate the module, the dynamic axes and the engine before the export starts. Override to add checks.

        Args:
            model: the module to export.
            input_names: names of the inputs; None if they are derived from the module.
            output_names: names of the outputs; None if they are derived from the module.

        Raises:
            T2NError: the target cannot be used for this export.
        """
        if input_names is not None:
            check_names(self.dynamic_axes, input_names, output_names)

    def post_capture(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        """Rewrite the captured graph before it is translated. Override to change it.

        Args:
            graph: the captured graph.
        """
        return graph

    def post_trace(self, nnef_graph: NnefGraph, active_custom_extensions: list[str]) -> NnefGraph | None:
        """Rewrite the translated document, or add declarations to it. Override to change it.

        Args:
            nnef_graph: the document, with the symbols and assertions of the dynamic axes. It is immutable.
            active_custom_extensions: declarations of the document, such as `tract_symbol S`. Appended lines are declared too.

        Returns:
            The new document, or None to keep `nnef_graph`.
        """
        return nnef_graph

    def specific_fragments(self, model: nn.Module) -> Mapping[str, str]:
        """Return the fragments that this target adds to the document, as `{name: text}`.

        A fragment with the name of an operator replaces that operator. Fragments that the document already defines are skipped.

        Args:
            model: the module to export.
        """
        return {}

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the final document in the form that the target's engine reads, or raise.

        Args:
            graph: the translated document.
        """
        return graph

    def post_export(
        self,
        model: nn.Module,
        nnef_graph: NnefGraph,
        args: list[Any],
        exported_filepath: Path,
        debug_bundle_path: Path | None = None,
    ) -> None:
        """Compare the archive with PyTorch if `check_io` is set.

        Args:
            model: the module, in eval mode.
            nnef_graph: the document that was written.
            args: arguments of the forward. During an export this is an `ExampleCall`, which also holds PyTorch's outputs.
            exported_filepath: path of the archive.
            debug_bundle_path: where to write a debug bundle if the check fails; None writes none.

        Raises:
            EngineError: the engine refused the archive or failed to run it.
            MismatchError: its outputs differ from PyTorch's.
        """


__all__ = ["ExampleCall", "ExampleRun", "InferenceTarget"]
