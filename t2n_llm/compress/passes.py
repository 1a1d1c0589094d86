"""Quantising a model of several stacks of layers, such as an encoder and a decoder, with what its layers really see.

In: a network with its values, passes over it, and which algorithm each parameter gets. Out: what `calibrate` makes of a language
model. Each stack is walked like the layers of one, the stacks in the order in which they run, so that a decoder hears of the source
what the quantised encoder says. What stands outside of them (projections, the head), and lists of layers that do not simply follow
each other, are watched in whole passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import OptionError
from generic_export.interrupts import asking
from quant.protocol import InputStatistics
from t2n_llm.compress.calibrate import CalibrationRun, Choice
from t2n_llm.compress.observe import Run, observe
from t2n_llm.compress.progress import LayerProgress
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.compress.walk import LayerCall, run_layer

Pass = Callable[[Any], torch.Tensor]
"""Runs a network on one source and the text made of it, without caches; gives its logits."""

_STATES = "hidden_states"


def calibrate_passes(
    network: nn.Module,
    choice: Choice,
    passes: Sequence[Pass],
    *,
    work_dir: Path,
    progress: Callable[[LayerProgress], None] | None = None,
) -> CalibrationResult:
    """Quantise the linears of a network on what passes over it make them read.

    Args:
        network: with float32 values, all in memory; where an algorithm compensates errors they are the quantised ones afterwards.
        choice: which algorithm each parameter gets.
        passes: over it.
        work_dir: where the packed tensors are written; it must exist, and outlive the result.
        progress: told after every layer of a stack.

    Raises:
        OptionError: there are no passes.
        WeightError: values or statistics are not finite.
    """
    if not passes:
        raise OptionError("there is no calibration data.", "Use a few dozen samples.")
    runs = [partial(each, network) for each in passes]
    run = CalibrationRun(network, choice, work_dir)
    stacks = _stacks(network, runs[0])
    count, done = sum(len(stack.layers) for stack in stacks), 0
    with torch.no_grad():
        for stack in stacks:
            hidden, calls = _recorded(stack, runs)
            original = list(hidden) if run.reconstructs else None
            for index, layer in enumerate(asking(stack.layers)):
                layer_runs = _runs(layer, hidden, calls[index])
                originals = None if original is None else _runs(layer, original, calls[index])
                with nullcontext() if run.sequential else _kept(layer):
                    made = run.quantize_layer(layer, f"{stack.name}.{index}", layer_runs, originals)
                hidden, original = made.outputs, made.original
                done += 1
                if progress is not None:
                    progress(LayerProgress(done, count, made.error))
        run.quantize_outside([stack.name for stack in stacks], runs)
    return run.made


def pass_statistics(network: nn.Module, passes: Sequence[Pass]) -> dict[str, InputStatistics]:
    """Return the mean squares of what every linear of a network reads, under each name of its weight; nothing is quantised.

    Args:
        network: with float32 values.
        passes: over it.
    """
    linears = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    with torch.no_grad():
        _, seen = observe(network, [partial(each, network) for each in passes], dict.fromkeys(linears, False))
    named = list(network.named_parameters(remove_duplicate=False))
    return {
        name: statistics
        for path, statistics in seen.items()
        for name, parameter in named
        if parameter is linears[path].weight
    }


@dataclass(frozen=True)
class _Stack:
    """Layers that follow each other: each reads what the one before gives, once a pass.

    Attributes:
        name: qualified name of their list.
        layers: in order.
    """

    name: str
    layers: tuple[nn.Module, ...]


@dataclass
class _Chain:
    """Sees, for the length of a `with` block around one pass, how the layers of a stack are called.

    Attributes:
        stack: its layers.
        calls: of the layers so far, in order.
        first: what entered the first one.
        whole: nothing has spoken against a chain so far.
    """

    stack: _Stack
    calls: list[LayerCall] = field(default_factory=list)
    first: torch.Tensor | None = None
    whole: bool = True
    _left: torch.Tensor | None = None
    _hooks: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> _Chain:
        for index, layer in enumerate(self.stack.layers):
            before = layer.register_forward_pre_hook(partial(self._enters, index), with_kwargs=True)
            after = layer.register_forward_hook(self._leaves)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def complete(self) -> bool:
        """Whether every layer was called once, each with what the one before gave."""
        return self.whole and len(self.calls) == len(self.stack.layers)

    def _enters(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        further = {name: value for name, value in kwargs.items() if args or name != _STATES}
        states = args[0] if args else kwargs.get(_STATES)
        follows = index == 0 or (self._left is not None and _is_same(states, self._left))
        keeps = any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))
        self.whole &= isinstance(states, torch.Tensor) and index == len(self.calls) and follows and not keeps
        self.calls.append(LayerCall(args[1:], further))
        if index == 0:
            self.first = states

    def _leaves(self, _: nn.Module, __: tuple[Any, ...], result: Any) -> None:
        self._left = result[0] if isinstance(result, tuple) else result


def _is_same(states: Any, others: Any) -> bool:
    """Say whether two tensors are one; a dropout that does nothing gives another object for it."""
    both = isinstance(states, torch.Tensor) and isinstance(others, torch.Tensor)
    return both and states.data_ptr() == others.data_ptr() and states.shape == others.shape


def _stacks(network: nn.Module, run: Run) -> list[_Stack]:
    """Return the stacks of a network that can be walked, in the order in which a pass reaches them."""
    order: list[str] = []
    with ExitStack() as hooks, torch.no_grad():
        chains = []
        for stack in _lists(network):
            reached = stack.layers[0].register_forward_pre_hook(lambda *_, name=stack.name: order.append(name))
            hooks.callback(reached.remove)
            chains.append(hooks.enter_context(_Chain(stack)))
        run()
    complete = {chain.stack.name: chain.stack for chain in chains if chain.complete}
    return [complete[name] for name in order if name in complete]


def _lists(network: nn.Module) -> list[_Stack]:
    """Return the outermost lists of layers."""
    found: list[_Stack] = []
    for name, module in network.named_modules():
        inside = any(name.startswith(f"{stack.name}.") for stack in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside and all(map(_multiplies, module)):
            found.append(_Stack(name, tuple(module)))
    return found


def _multiplies(layer: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) for module in layer.modules())


def _recorded(stack: _Stack, runs: Sequence[Run]) -> tuple[list[torch.Tensor], list[list[LayerCall]]]:
    """Return what enters the first layer in each run, [1, L, H], and the calls of each layer by run."""
    hidden: list[torch.Tensor] = []
    calls: list[list[LayerCall]] = [[] for _ in stack.layers]
    for run in asking(runs):
        with _Chain(stack) as chain:
            run()
        if not chain.complete or chain.first is None:
            raise OptionError(
                f"the layers {stack.name} are not called in the same way for every sample.",
                "Use --compress q4_0 without calibration.",
            )
        hidden.append(chain.first)
        for of_layer, call in zip(calls, chain.calls, strict=True):
            of_layer.append(call)
    return hidden, calls


def _runs(layer: nn.Module, hidden: Sequence[torch.Tensor], calls: Sequence[LayerCall]) -> list[Run]:
    """Return a layer's run of each source."""
    return [partial(run_layer, layer, *each) for each in zip(hidden, calls, strict=True)]


@contextmanager
def _kept(layer: nn.Module) -> Iterator[None]:
    """Put a layer's own parameters back after the block."""
    own = [(module, dict(parameters_of(module))) for module in layer.modules()]
    try:
        yield
    finally:
        for module, parameters in own:
            parameters_of(module).update(parameters)


__all__ = ["Pass", "calibrate_passes", "pass_statistics"]
