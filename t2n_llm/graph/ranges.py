"""The ranges of f16 activations: captured graphs run on typical tokens in f32, before they are translated.

In: captured `ModelGraph`s with parameters, tokens. Out: the same with streams that overflow stored times a power of two, and the
measured magnitudes for `export.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from generic_export.errors import GraphError, NumericRangeError
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.precision.magnitudes import measured
from generic_export.torch_graph.precision.rescaling import fitted, without_overflow_guards
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, ScaleGroup, float_results
from generic_export.weights.values import read_tensor
from t2n_llm.model_graph import ModelGraph, Ranges
from t2n_llm.reporter import Reporter

_LARGEST_SHOWN = 16


TypicalInputs = Callable[[ModelGraph, Sequence[int], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Returns typical inputs of a graph by name, from token ids and the outputs of the graphs before it."""


def fit_ranges(graphs: Sequence[ModelGraph], request: RangeRequest, typical: TypicalInputs) -> list[ModelGraph]:
    """Measure captured f16 graphs in the order in which they run, and make them fit the range of f16.

    Args:
        graphs: captured, with parameters.
        request: tokens, and how to store what overflows.
        typical: inputs of each graph; a graph that lacks one is not measured.

    Raises:
        NumericRangeError: the inputs or outputs of a graph overflow; the message names the module.
        MissingTensorError: the checkpoint lacks a parameter.
    """
    fitted_graphs, given = [], dict[str, torch.Tensor]()
    for graph in graphs:
        inputs = typical(graph, request.tokens, given)
        if set(graph.inputs) <= set(inputs):
            graph, outputs = request.fit(
                graph, [inputs[name] for name in graph.inputs], keep_outputs=graph is not graphs[-1]
            )
            given |= outputs
        fitted_graphs.append(graph)
    return fitted_graphs


@dataclass(frozen=True)
class RangeRequest:
    """How f16 graphs are measured on the weights, and made to fit.

    Attributes:
        tokens: int64 ids of typical text.
        reporter: receives what was found.
        f32_regions: keep what overflows in f32, also where rescaling would do.
    """

    tokens: tuple[int, ...]
    reporter: Reporter
    f32_regions: bool = False

    def fit(
        self, graph: ModelGraph, inputs: Sequence[torch.Tensor], *, keep_outputs: bool = False
    ) -> tuple[ModelGraph, Mapping[str, torch.Tensor]]:
        """Run a captured graph in f32, and store what overflows f16 times a power of two, or in f32.

        Args:
            graph: captured, with parameters.
            inputs: typical ones, with values.
            keep_outputs: return the outputs too, for the graphs that read them.

        Returns:
            The graph with `ranges` and `factors`, and its f32 outputs by name.

        Raises:
            NumericRangeError: the inputs or outputs overflow; the message names the module.
            MissingTensorError: the checkpoint lacks a parameter.
            GraphError: the graph is not captured, or has no parameters.
        """
        if graph.captured is None or graph.parameters is None:
            raise GraphError(f"graph {graph.role!r} cannot be measured.", "Capture it, and call with_parameters.")
        self.reporter.stage(f"Measuring activations on {len(self.tokens)} tokens")
        captured, parameters = without_overflow_guards(graph.captured), graph.parameters
        types = {variable.name: variable.dtype for variable in captured.parameters}

        def stored(name: str) -> torch.Tensor:
            constant = captured.constants.get(name)
            if constant is None:
                kept = torch.float32 if types[name].is_floating_point else types[name]
                return read_tensor(parameters.find(name), kept)
            # What an empty cache begins with is made where the network is: on shapes alone.
            return torch.empty_like(constant, device="cpu") if constant.is_meta and not constant.numel() else constant

        outputs = dict(zip(captured.output_names, captured.outputs, strict=True)) if keep_outputs else {}
        run = measured(captured, inputs, stored, [variable.name for variable in outputs.values()])
        self._warn_of_unmeasured(captured, run.largest)
        rescaling = fitted(captured, run.largest, f32_regions=self.f32_regions)
        self._report(rescaling.groups)
        ranges = Ranges(len(self.tokens), _by_module(captured, run.largest), rescaling.groups)
        kept = {name: run.values[made.name] for name, made in outputs.items() if made.name in run.values}
        return replace(graph, captured=rescaling.graph, factors=rescaling.factors, ranges=ranges), kept

    def _warn_of_unmeasured(self, captured: TorchModuleIRGraph, largest: Mapping[str, float]) -> None:
        """Warn of operators that were not measured: PyTorch cannot run them alone, or they depend on one."""
        unknown = [op for op in captured.ops if any(each.name not in largest for each in float_results(op))]
        if unknown:
            self.reporter.warn(
                f"activations of {len(unknown)} operators were not measured, the first is {unknown[0].target} "
                f"in {unknown[0].module_path or 'the root'}: they may overflow f16."
            )

    def _report(self, groups: Sequence[ScaleGroup]) -> None:
        """Say what was done, and what has little room left; refuse what neither fits nor may be f32."""
        regions = [group for group in groups if group.in_f32]
        unfit = next((each for each in groups if each.overflows and not each.exponent and not each.in_f32), None)
        if unfit is not None:
            raise NumericRangeError(
                f"{_size(unfit)}; f16 holds at most {F16_LIMIT:.0f}, and they cannot be rescaled: {unfit.obstacle}.",
                "Use --activations f32 (the default), which keeps f16 weights.",
            )
        if regions:
            count = sum(len(group.tensors) for group in regions)
            self.reporter.warn(f"{_size(max(regions, key=_largest))}: {count} tensors are kept in f32.")
        scaled = [group for group in groups if group.exponent]
        if scaled:
            top, count = max(scaled, key=_largest), sum(len(group.tensors) for group in scaled)
            self.reporter.warn(
                f"{_size(top)}: {count} tensors are rescaled by a power of two, 2^{top.exponent} for those."
            )
        near = [group for group in groups if not group.exponent and not group.in_f32]
        if near:
            room = F16_LIMIT / max(map(_largest, near))
            self.reporter.warn(f"{_size(max(near, key=_largest))}: f16 overflows at {room:.1f} times that.")


def _largest(group: ScaleGroup) -> float:
    return group.largest


def _size(group: ScaleGroup) -> str:
    return f"values of {group.where or 'the model'} reach {group.largest:.3g}"


def _by_module(graph: TorchModuleIRGraph, largest: Mapping[str, float]) -> dict[str, float]:
    """Return the largest f16 value that each module makes, of the modules with the largest ones."""
    found: dict[str, float] = {}
    for op in graph.ops:
        for variable in op.outputs:
            if variable is not None and variable.dtype is torch.float16 and variable.name in largest:
                found[op.module_path] = max(found.get(op.module_path, 0.0), largest[variable.name])
    top = sorted(found, key=lambda path: -found[path])[:_LARGEST_SHOWN]
    return {path: found[path] for path in top}
