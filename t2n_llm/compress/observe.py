"""What the linears of a module read while it runs.

In: a module with values, and runs of it. Out: what the runs gave, and `InputStatistics` by linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from generic_export.errors import CaptureError
from quant.imatrix import StatisticsAccumulator
from quant.protocol import InputStatistics

Run = Callable[[], torch.Tensor]
"""Runs a module on one thing, a text or a source; gives its outputs."""


def observe(
    module: nn.Module, runs: Sequence[Run], wanted: Mapping[str, bool], watched: Collection[int] | None = None
) -> tuple[list[torch.Tensor], dict[str, InputStatistics]]:
    """Run a module and collect what its linears read.

    Args:
        module: with values.
        runs: of it.
        wanted: names of linears inside it, and whether their Hessian is needed.
        watched: which runs to collect from; None for all.

    Returns:
        The outputs of each run, and the statistics by linear, of those that were called. Linears that read the same tensor share
        them.
    """
    watch = _Watch(wanted)
    hooks = [module.get_submodule(name).register_forward_pre_hook(watch.hook(name)) for name in wanted]
    try:
        outputs = []
        for index, run in enumerate(runs):
            watch.looks = watched is None or index in watched
            outputs.append(run())
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, watch.statistics()


class _ReachedError(Exception):
    """Carries what a module was about to read."""

    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def _stop(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    raise _ReachedError(args[0])


def first_input(module: nn.Module, run: Callable[[], object], name: str) -> torch.Tensor:
    """Return what a module is given first in a run, which ends there.

    Raises:
        CaptureError: the run does not call it; the error has its name.
    """
    hook = module.register_forward_pre_hook(_stop)
    try:
        run()
    except _ReachedError as reached:
        return reached.inputs
    finally:
        hook.remove()
    raise CaptureError(f"{name} is not called.", "Keep it in f16.")


@dataclass
class _Watch:
    wanted: Mapping[str, bool]
    looks: bool = True
    leaders: dict[str, str] = field(default_factory=dict)
    accumulators: dict[str, StatisticsAccumulator] = field(default_factory=dict)
    _last: tuple[str, torch.Tensor] | None = None

    def hook(self, name: str) -> Callable[[nn.Module, tuple], None]:
        def look(_: nn.Module, args: tuple) -> None:
            if self.looks:
                self._see(name, args[0])

        return look

    def _see(self, name: str, inputs: torch.Tensor) -> None:
        shares = self._last is not None and self._last[1] is inputs
        if name not in self.leaders:
            self.leaders[name] = self._last[0] if shares and self._last is not None else name
        leader = self.leaders[name]
        if leader == name:
            if name not in self.accumulators:
                hessian = any(self.wanted[other] for other in self.wanted)
                self.accumulators[name] = StatisticsAccumulator(inputs.shape[-1], hessian)
            self.accumulators[name].add(inputs)
            self._last = (name, inputs)

    def statistics(self) -> dict[str, InputStatistics]:
        gathered = {name: accumulator.statistics() for name, accumulator in self.accumulators.items()}
        return {name: gathered[leader] for name, leader in self.leaders.items()}


__all__ = ["Run", "first_input", "observe"]
