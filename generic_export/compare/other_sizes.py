"""An archive compared with its module at other sizes than the example's.

In: a captured graph with symbols, the module, and an engine that runs the archive. Out: nothing, or a `MismatchError` that names
the sizes. Tried are 1, a size above every one of the example, and sizes on both sides of each number that the graph compares a
size with, or cuts one at. A size is passed over where the module does not take it.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from torch import nn

from generic_export.compat import EXTREMA
from generic_export.errors import EngineError, MismatchError
from generic_export.inference_target.example import ExampleRun, call_example
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.torch_graph.dims import Dim, evaluate_dim
from generic_export.torch_graph.ir import TorchModuleIRGraph, TorchOp, is_dim
from generic_export.torch_graph.nested import FlatCall, resize_example
from generic_export.torch_graph.request import DynamicAxes, auto_symbols, size_near, symbol_name
from generic_export.torch_graph.sizes.proofs import computed
from generic_export.torch_graph.sizes.relations import Relation

logger = logging.getLogger("generic_export")

Sizes = Mapping[str, int]
"""A size for each symbol of a graph."""

_FARTHEST = 256  # sizes up to here are searched for the places where a graph changes
_MOST_NUMBERS = 64
_MOST_SIZES = 16
_LEAST_SECONDS = 1.0  # a small archive is compared at all of them
_FEW_VALUES = 4
_MOVED = 0.05
_ENDLESS = 1 << 40  # the end of `x[:, 2:]` is the largest integer


@dataclass(frozen=True)
class Elsewhere:
    """What a module says at other sizes.

    Attributes:
        sizes: of each symbol.
        args, kwargs: arguments of these sizes.
        run: the module's inputs and outputs there.
        changed: the symbols whose size is not the example's.
    """

    sizes: Sizes
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run: ExampleRun
    changed: tuple[str, ...]

    def __str__(self) -> str:
        """The sizes, as `B=1, T=9`."""
        return ", ".join(f"{symbol}={size}" for symbol, size in sorted(self.sizes.items()))


def sizes_beside(graph: TorchModuleIRGraph, tensors: Sequence[torch.Tensor], axes: DynamicAxes) -> list[dict[str, int]]:
    """Return sizes at which a graph may be wrong when it is right at the example's, the most telling ones first.

    Args:
        graph: the captured graph.
        tensors: the example's inputs.
        axes: what was declared of the sizes; only such sizes are returned.
    """
    example = graph.sizes(tensors)
    if not example:
        return []
    larger = {symbol: size + 1 for symbol, size in example.items()}
    ones = [{**example, symbol: 1} for symbol in example]
    beside = [
        {**example, symbol: size}
        for symbol, sizes in _changes(graph, example).items()
        for size in sorted(sizes, key=lambda each, known=example[symbol]: abs(each - known))  # type: ignore[misc]
    ]
    known = [example]
    for wanted in (larger, *ones, *beside):
        allowed = _allowed(graph, axes, wanted)
        if allowed is not None and allowed not in known:
            known.append(allowed)
    return known[1 : _MOST_SIZES + 1]


def _allowed(graph: TorchModuleIRGraph, axes: DynamicAxes, sizes: Sizes) -> dict[str, int] | None:
    """Return the nearest declared sizes, unless the engine refuses them by a condition.

    Bounds that PyTorch found by itself do not count: they are written as assertions, which the engine does not hold a run to.
    """
    near = dict(sizes)
    for symbol in (symbol for given in axes.values() for symbol in given.values()):
        name = symbol_name(symbol)
        if name in near:
            near[name] = size_near(symbol, near[name])
    relations = [Relation.parse(each.relation) for each in graph.conditions if each.relation is not None]
    return near if all(relation.holds(near) for relation in relations) else None


# --- where a graph changes ---


def _changes(graph: TorchModuleIRGraph, example: Sizes) -> dict[str, set[int]]:
    """Return for each symbol the sizes beside those at which some size of the graph reaches a number, or another size."""
    found: dict[str, set[int]] = {symbol: set() for symbol in example}
    for difference in _compared(graph):
        names = {symbol: str(symbol) for symbol in difference.free_symbols}
        if not set(names.values()) <= example.keys():
            continue
        value = computed(difference)
        at = {symbol: example[name] for symbol, name in names.items()}
        for symbol, name in names.items():
            found[name] |= _beside(lambda size, s=symbol, v=value, a=at: v({**a, s: size}))  # type: ignore[misc]
    return found


def _beside(difference: Callable[[int], int]) -> set[int]:
    """Return the last size at which a difference has one sign, and the first ones at which it has another."""
    found: set[int] = set()
    try:
        signs = [_sign(difference(size)) for size in range(1, _FARTHEST + 2)]
    except (NameError, TypeError, ZeroDivisionError):  # a function of PyTorch's that numbers alone do not have
        return found
    for size, (before, after) in enumerate(itertools.pairwise(signs), start=1):
        if before != after:
            found |= {size, size + 1}
    return found


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _compared(graph: TorchModuleIRGraph) -> list[sympy.Expr]:
    """Return differences of sizes whose sign decides what a graph does."""
    found: dict[sympy.Expr, None] = {}
    for op in graph.ops:
        for difference in _compared_in(op):
            if difference.free_symbols:
                found.setdefault(difference)
        if len(found) >= _MOST_NUMBERS:
            break
    return list(found)


def _compared_in(op: TorchOp) -> Iterator[sympy.Expr]:
    shapes = [dim for tensor in op.outputs if tensor is not None for dim in tensor.shape]
    for dim in (*shapes, *_sizes_in(op.args)):
        if isinstance(dim, sympy.Expr):
            for part in dim.atoms(*EXTREMA):
                first, *others = part.args
                yield from (first - other for other in others)
    if op.target is torch.ops.aten.slice.Tensor:
        yield from _cut(op)


def _cut(op: TorchOp) -> Iterator[sympy.Expr]:
    """Yield how much longer an axis is than each number that it is cut at."""
    given = op.arguments()
    length = given["self"].shape[given.get("dim", 0)]
    for end in (given.get("start"), given.get("end")):
        if isinstance(end, int) and 0 < abs(end) < _ENDLESS and isinstance(length, sympy.Expr):
            yield length - abs(end)


def _sizes_in(argument: Any) -> Iterator[Any]:
    if isinstance(argument, tuple):
        for each in argument:
            yield from _sizes_in(each)
    elif is_dim(argument):
        yield argument


# --- what the module says there ---


def elsewhere(
    model: nn.Module, call: FlatCall, graph: TorchModuleIRGraph, sizes: Iterable[Sizes]
) -> Iterator[Elsewhere]:
    """Yield what a module says at each of some sizes that it takes.

    Args:
        model: the module, in eval mode.
        call: the example.
        graph: what was captured of it.
        sizes: where to run it.
    """
    example = graph.sizes(call.tensors)
    for wanted in sizes:
        shapes = [
            [_at(dim, wanted, size) for dim, size in zip(variable.shape, tensor.shape, strict=False)]
            + list(tensor.shape[len(variable.shape) :])
            for variable, tensor in zip(graph.inputs, call.tensors, strict=True)
        ]
        others = list(map(_of_shape, call.tensors, shapes))
        other_args, other_kwargs = call.arguments(others)
        try:
            answered = call_example(model, other_args, other_kwargs)
        except Exception:  # the module does not accept these sizes
            continue
        if len(answered.outputs) == len(graph.outputs) and all(each.numel() for each in answered.outputs):
            run = ExampleRun.from_tensors(others, answered.outputs, graph.output_names)
            changed = tuple(name for name, size in wanted.items() if size != example[name])
            yield Elsewhere(wanted, tuple(other_args), other_kwargs, run, changed)


def _at(dim: Dim, sizes: Sizes, size: int) -> int:
    """Return the size of an axis; that of the example where the axis has no symbol."""
    return evaluate_dim(dim, sizes) if isinstance(dim, sympy.Expr) else size


def _of_shape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor with another one's values, repeated; floats that vary are moved a little, so that rows are no ties."""
    found = resize_example(tensor, shape)
    if list(tensor.shape) == list(shape) or not tensor.is_floating_point() or tensor.numel() <= _FEW_VALUES:
        return found
    if not bool(tensor.isfinite().all()) or len(tensor.unique()) <= _FEW_VALUES:  # a mask
        return found
    noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(found.numel()))
    return found * (1 - _MOVED * noise).to(found)


# --- the comparison ---


def compare_elsewhere(
    target: EngineTarget,
    archive: Path,
    kind: str,
    places: Iterable[Elsewhere],
    seconds: float,
    failing: Callable[[Elsewhere], AbstractContextManager[None]],
) -> None:
    """Compare an archive with its module at other sizes, while there is time.

    Args:
        target: the target whose engine runs the archive.
        archive: the archive.
        kind: the module's class, for messages.
        places: what the module says.
        seconds: after which no further size is begun.
        failing: keeps the case where the two differ.

    Raises:
        MismatchError: the archive answers otherwise than the module.
        EngineError: tract does not run it at other sizes of axes that may become static (`Dim.AUTO`).
    """
    auto = auto_symbols(target.dynamic_axes)
    until = time.perf_counter() + max(seconds, _LEAST_SECONDS)
    with target.opened(archive) as ask:
        for place in places:
            try:
                answers = ask(place.run.inputs)
            except EngineError as error:
                error.symbols = place.changed
                if auto & set(place.changed):
                    raise
                warnings.warn(
                    f"{kind}: tract does not run the archive at {place}, but the module does: {error.message}",
                    stacklevel=3,
                )
                return
            with failing(place):
                _require_same(target, kind, place, answers)
            logger.info("checked %s at %s", kind, place)
            if time.perf_counter() >= until:
                return


def _require_same(target: EngineTarget, kind: str, place: Elsewhere, answers: Sequence[np.ndarray]) -> None:
    failed = [comparison for comparison in target.compared(place.run, answers) if not comparison.passed]
    if failed:
        raise MismatchError(
            f"{kind}: the archive is correct at the sizes of the example, but wrong at {place}: "
            f"{'; '.join(map(str, failed))}",
            "Restrict the sizes (DynamicSize with min, max or multiple_of), or make the axis static. "
            "check_io_sizes=() compares at the example's sizes only.",
            symbols=place.changed,
        )


__all__ = ["Elsewhere", "Sizes", "compare_elsewhere", "elsewhere", "sizes_beside"]
