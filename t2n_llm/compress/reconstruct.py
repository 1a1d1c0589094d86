"""Quantising the linears of a layer one after the other, each so that it makes up for those before it.

In: a resident layer, runs of it on what the quantised layers before give, and runs on what the original ones give. Out: blocks by
linear. What each should give is what it gives in the original model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from generic_export.compat import parameters_of
from quant.blocks import Q4Blocks
from quant.gptq import DriftAccumulator
from quant.protocol import InputStatistics, Quantizer
from t2n_llm.compress.observe import Run, first_input

_HELD_OUT = 8  # one run in so many is only judged by


@dataclass(frozen=True)
class Original:
    """What a layer does in the original model.

    Attributes:
        outputs: of each run.
        inputs: what each linear read in each run, [rows, K]; only of linears that every run calls once, for every position.
        groups: the names of these linears, those that read the same tensor together, in the order of their calls.
    """

    outputs: list[torch.Tensor]
    inputs: Mapping[str, Sequence[torch.Tensor]]
    groups: Sequence[Sequence[str]]

    @staticmethod
    def of(layer: nn.Module, runs: Sequence[Run], linears: Collection[str]) -> Original:
        """Run a layer that has its own values."""
        seen: list[dict[str, list[torch.Tensor]]] = []
        outputs = []
        for run in runs:
            calls: dict[str, list[torch.Tensor]] = {}
            hooks = [layer.get_submodule(name).register_forward_pre_hook(_recorder(calls, name)) for name in linears]
            try:
                outputs.append(run())
            finally:
                for hook in hooks:
                    hook.remove()
            positions = outputs[-1].numel() // outputs[-1].shape[-1]
            seen.append({name: found for name, found in calls.items() if _is_whole(found, positions)})
        steady = [name for name in seen[0] if all(name in calls for calls in seen)]
        groups: dict[int, list[str]] = {}
        for name in steady:
            groups.setdefault(id(seen[0][name][0]), []).append(name)
        return Original(outputs, {name: [calls[name][0] for calls in seen] for name in steady}, tuple(groups.values()))


@dataclass(frozen=True)
class Rebuilt:
    """The blocks of a linear.

    Attributes:
        blocks: chosen for a weight that makes up for altered inputs.
        statistics: of these inputs.
    """

    blocks: Q4Blocks
    statistics: InputStatistics


def reconstruct(
    layer: nn.Module,
    weights: Mapping[str, torch.Tensor],
    quantizers: Mapping[str, Quantizer],
    runs: Sequence[Run],
    original: Original,
    fewest: int,
) -> dict[str, Rebuilt]:
    """Quantise linears again, in place, if that brings the layer's outputs nearer to the original's in runs held out.

    Args:
        layer: its linears are quantised.
        weights: float32 [N, K] as they were before, by linear.
        quantizers: choose levels and scales.
        runs: of the layer, behind quantised ones.
        original: what it does in the original model, in the same runs.
        fewest: rows below which a linear is left alone.

    Returns:
        What was made, by linear; nothing when the layer is as it was.
    """
    if not original.groups:
        return {}
    learned, judging = split(len(runs))
    before = {name: layer.get_parameter(f"{name}.weight") for group in original.groups for name in group}
    start = _judged(layer, runs, original, judging)
    made: dict[str, Rebuilt] = {}
    for group in original.groups:
        true = original.inputs[group[0]]
        pairs = _paired(layer, group[0], [runs[i] for i in learned], [true[i] for i in learned])
        seen = pairs.statistics()
        for name in group if seen.tokens >= fewest else ():
            blocks = quantizers[name].quantize(pairs.corrected(weights[name]), seen)
            made[name] = Rebuilt(blocks, seen)
            replace_weight(layer.get_submodule(name), blocks.dequantize())
    if _judged(layer, runs, original, judging) < start:
        return made
    for name, values in before.items():
        replace_weight(layer.get_submodule(name), values)
    return {}


def split(count: int) -> tuple[list[int], list[int]]:
    """Return which of so many runs are learned from, and which ones only judge; a single one does both."""
    judging = list(range(0, count, _HELD_OUT))
    return [index for index in range(count) if index not in judging] or judging, judging


def distance(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the mean squared difference of hidden states [..., H], each position relative to its own mean square."""
    of_runs = []
    for given, meant in zip(outputs, wanted, strict=True):
        power = meant.square().mean(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        of_runs.append(float(((given - meant).square().mean(dim=-1) / power).mean()))
    return sum(of_runs) / len(of_runs)


def replace_weight(module: nn.Module, values: torch.Tensor) -> None:
    """Give a module other values, in another parameter: whoever holds the old one keeps its values."""
    parameters_of(module)["weight"] = nn.Parameter(values, requires_grad=False)


def _judged(layer: nn.Module, runs: Sequence[Run], original: Original, judging: Sequence[int]) -> float:
    return distance([runs[index]() for index in judging], [original.outputs[index] for index in judging])


def _paired(layer: nn.Module, linear: str, runs: Sequence[Run], true: Sequence[torch.Tensor]) -> DriftAccumulator:
    """Return how what a linear reads in runs belongs to what it should read."""
    pairs = DriftAccumulator(true[0].shape[-1])
    for run, meant in zip(runs, true, strict=True):
        pairs.add(first_input(layer.get_submodule(linear), run, linear), meant)
    return pairs


def _recorder(calls: dict[str, list[torch.Tensor]], name: str) -> Callable[[nn.Module, tuple], None]:
    def look(_: nn.Module, args: tuple) -> None:
        calls.setdefault(name, []).append(args[0])

    return look


def _is_whole(calls: Sequence[torch.Tensor], positions: int) -> bool:
    return len(calls) == 1 and calls[0].numel() // calls[0].shape[-1] == positions
