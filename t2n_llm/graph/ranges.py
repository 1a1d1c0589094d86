"""What f16 activations have to hold: a captured graph is run on typical tokens in f32 before any weight is written.

In: a captured graph, the checkpoint, tokens. Out: the graph with streams that overflow kept times a power of two, and a record of
what was measured for `export.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from generic_export.errors import NumericRangeError
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.precision.magnitudes import measured
from generic_export.torch_graph.precision.rescaling import fitted, without_overflow_guards
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, HEADROOM, ScaleGroup, float_results
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.values import read_tensor
from t2n_llm.reporter import Reporter
from t2n_llm.source.adapter import Adapter
from t2n_llm.source.empty_model import Weightless
from t2n_llm.weights.names import ParameterSources

_LARGEST_SHOWN = 16


@dataclass(frozen=True)
class Ranges:
    """What was measured of the tensors that f16 holds.

    Attributes:
        tokens: how many the model was run on.
        largest: magnitude by module, the largest ones.
        groups: tensors of one scale that overflow f16 or come near, and what was done about them.
    """

    tokens: int
    largest: Mapping[str, float]
    groups: tuple[ScaleGroup, ...]

    def recorded(self) -> dict[str, Any]:
        """Return what `export.json` says."""
        return {
            "tokens": self.tokens,
            "limit": F16_LIMIT,
            "headroom": HEADROOM,
            "max_abs": dict(self.largest),
            "rescaled": [
                {
                    "module": group.where,
                    "max_abs": group.largest,
                    "tensors": len(group.tensors),
                    "factor": 2.0**group.exponent,
                    "in_f32": group.in_f32,
                    "reason": group.obstacle,
                }
                for group in self.groups
            ],
        }


@dataclass(frozen=True)
class Fitted:
    """A captured graph that fits the range of f16.

    Attributes:
        graph: computes the same.
        factors: what the values of a parameter are to be multiplied with, by name.
        ranges: what was measured.
        gave: the outputs in f32, by name, where another graph takes them.
    """

    graph: TorchModuleIRGraph
    factors: Mapping[str, float]
    ranges: Ranges
    gave: Mapping[str, torch.Tensor]


Fit = Callable[[TorchModuleIRGraph], Fitted]
"""Makes a captured graph fit the range of f16."""


def with_factors(graph: NnefGraph, factors: Mapping[str, float]) -> NnefGraph:
    """Return a document whose variables say what the values of their parameters are multiplied with."""
    variables = (replace(each, factor=factors.get(each.parameter, 1.0)) for each in graph.variables)
    return replace(graph, variables=tuple(variables)) if factors else graph


@dataclass(frozen=True)
class RangeRequest:
    """Asks that a graph in f16 be measured on the real weights, and made to fit.

    Attributes:
        checkpoint: the weights.
        adapter: merged into them, or None.
        tokens: int64 ids of typical text.
        reporter: told what was found.
        islands: what overflows is kept in f32, what could be kept smaller included.
    """

    checkpoint: Checkpoint
    adapter: Adapter | None
    tokens: tuple[int, ...]
    reporter: Reporter
    islands: bool = False

    def fit(
        self,
        skeleton: Weightless,
        inputs: Sequence[torch.Tensor],
        captured: TorchModuleIRGraph,
        *,
        hands_on: bool = False,
    ) -> Fitted:
        """Measure a captured graph, and keep what overflows times a power of two, or in f32.

        Args:
            skeleton: the model it is captured from.
            inputs: real ones.
            captured: the model in f16.
            hands_on: whether another graph takes what this one gives, so that its outputs are kept.

        Raises:
            NumericRangeError: what the graph is given or gives overflows; the message names its module.
            MissingTensorError: the checkpoint lacks a parameter.
        """
        self.reporter.stage(f"Measuring activations on {len(self.tokens)} tokens")
        captured = without_overflow_guards(captured)
        updates = self.adapter.updates(skeleton.network) if self.adapter is not None else None
        parameters = ParameterSources.of(skeleton, self.checkpoint, updates)
        types = {variable.name: variable.dtype for variable in captured.parameters}

        def stored(name: str) -> torch.Tensor:
            constant = captured.constants.get(name)
            if constant is None:
                kept = torch.float32 if types[name].is_floating_point else types[name]
                return read_tensor(parameters.find(name), kept)
            # What an empty cache begins with is made where the network is: on shapes alone.
            return torch.empty_like(constant, device="cpu") if constant.is_meta and not constant.numel() else constant

        outputs = dict(zip(captured.output_names, captured.outputs, strict=True)) if hands_on else {}
        run = measured(captured, inputs, stored, [variable.name for variable in outputs.values()])
        largest = run.largest
        self._tell_of_unknown(captured, largest)
        rescaling = fitted(captured, largest, islands=self.islands)
        self._tell(rescaling.groups)
        ranges = Ranges(len(self.tokens), _by_module(captured, largest), rescaling.groups)
        gave = {name: run.values[made.name] for name, made in outputs.items() if made.name in run.values}
        return Fitted(rescaling.graph, rescaling.factors, ranges, gave)

    def _tell_of_unknown(self, captured: TorchModuleIRGraph, largest: Mapping[str, float]) -> None:
        """Tell of what was not measured: operators that PyTorch cannot run alone, and what depends on them."""
        unknown = [op for op in captured.ops if any(each.name not in largest for each in float_results(op))]
        if unknown:
            self.reporter.warn(
                f"activations of {len(unknown)} operators were not measured, the first is {unknown[0].target} "
                f"in {unknown[0].module_path or 'the root'}: they may overflow f16."
            )

    def _tell(self, groups: Sequence[ScaleGroup]) -> None:
        """Say what was done, and what has little room left; refuse what neither fits nor may be f32."""
        islands = [group for group in groups if group.in_f32]
        unfit = next((each for each in groups if each.overflows and not each.exponent and not each.in_f32), None)
        if unfit is not None:
            raise NumericRangeError(
                f"{_size(unfit)}; f16 holds at most {F16_LIMIT:.0f}, and they cannot be rescaled: {unfit.obstacle}.",
                "Use --activations f32 (the default), which keeps f16 weights.",
            )
        if islands:
            count = sum(len(group.tensors) for group in islands)
            self.reporter.warn(f"{_size(max(islands, key=_largest))}: {count} tensors are kept in f32.")
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
