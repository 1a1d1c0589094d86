"""What a plan makes of a sub-graph's outputs: axes collapsed, outputs kept, ordered and renamed.

In: an `InputSide`, example tensors and a `SubgraphPlan`. Out: an `OutputBoundary` for each output and the order of those kept.
How output axes follow the symbols is found by running the module at a second size of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.remodel.boundary import InputSide, OutputBoundary
from generic_export.remodel.inputs import find_name, plans_by_name, resized
from generic_export.remodel.plan import AxisName, OutputPlan, Place, SubgraphPlan, dims_text
from generic_export.remodel.subgraph import NamedTensor
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.nested import named_outputs

Run = Callable[[Mapping[str, int]], list[torch.Tensor]]
"""Runs the module at these sizes of symbols, the others being those of the example, and returns its outputs."""


def runner(module: nn.Module, side: InputSide, unbound: Sequence[torch.Tensor]) -> Run:
    """Return what runs a module on an example at other sizes.

    Args:
        module: the module.
        side: its inputs.
        unbound: example tensors of those that stay, with all their axes.
    """
    boundaries = side.outer

    def run(sizes: Mapping[str, int]) -> list[torch.Tensor]:
        given = [resized(tensor, one.dims, sizes) for tensor, one in zip(unbound, boundaries, strict=True)]
        tensors = [tensor.clone() for tensor in side.completed(given)]  # a forward may write to its arguments
        args, kwargs = side.call.arguments(tensors)
        with torch.no_grad(), evaluation_mode(module):
            return list(named_outputs(module(*args, **kwargs))[1])

    return run


def output_boundaries(
    names: Sequence[str],
    run: Run,
    sizes: Mapping[str, int],
    fixed: Collection[str],
    plan: SubgraphPlan,
    place: Place,
) -> tuple[OutputBoundary, ...]:
    """Return what the plan makes of each output.

    Args:
        names: of the module's outputs.
        run: the module.
        sizes: of all symbols at the example, fixed ones included.
        fixed: the symbols that are.
        plan: the plan of the sub-graph.
        place: where that stands.

    Raises:
        OptionError: an output is unknown, or an axis that is to disappear is not of size 1.
    """
    plans = plans_by_name("output", plan.outputs, names, place)
    example = run({})
    dims = _output_dims(run, example, sizes)
    boundaries = []
    for name, tensor, axes in zip(names, example, dims, strict=True):
        one, here = plans.get(name, (OutputPlan(), place.at("outputs", name)))
        labels = tuple(axis.label for axis in axes)
        collapsed = _collapsed(NamedTensor(name, tensor, labels), one, here.at("collapse"))
        for axis in collapsed:
            _require_fixed(axes[axis], name, fixed, here.at("collapse"))
        boundaries.append(OutputBoundary(name, one.rename or name, tensor.dtype, labels, collapsed))
    return tuple(boundaries)


def kept_outputs(
    outputs: Sequence[OutputBoundary], plan: SubgraphPlan, input_names: Sequence[str], place: Place
) -> tuple[int, ...]:
    """Return the positions of the outputs that the archive has, in its order.

    Raises:
        OptionError: an output is unknown or kept twice, none is kept, or two inputs or outputs are written alike.
    """
    names = [output.name for output in outputs]
    kept = list(range(len(outputs)))
    if plan.outputs_keep is not None:
        kept = []
        for index, name in enumerate(plan.outputs_keep):
            here = place.at("outputs_keep", index)
            position = names.index(_kept_name(name, outputs, here))
            if position in kept:
                raise here.error(f"output {name!r} is listed twice.", "Name each output once.")
            kept.append(position)
        if not kept:
            raise place.at("outputs_keep").error("no output is listed.", "Name one or more.")
    taken = {identifier(name): f"input {name!r}" for name in input_names}
    for position in kept:
        output = outputs[position]
        written = identifier(output.outer_name)
        if written in taken:
            raise place.at("outputs", output.name, "rename").error(
                f"{taken[written]} and output {output.name!r} both get the name {written!r} in the archive.",
                "Rename one of them.",
            )
        taken[written] = f"output {output.name!r}"
    return tuple(kept)


def _kept_name(name: str, outputs: Sequence[OutputBoundary], place: Place) -> str:
    """Return the module's name of a kept output, which may be called by its new name when no other has that."""
    names = [output.name for output in outputs]
    renamed = [output.name for output in outputs if output.outer_name == name]
    return renamed[0] if name not in names and len(renamed) == 1 else find_name("output", name, names, place)


def _collapsed(output: NamedTensor, plan: OutputPlan, place: Place) -> tuple[int, ...]:
    axes = []
    for index, axis in enumerate(plan.collapse):
        here = place.at(index)
        number = _number(axis, output, here)
        size = output.value.shape[number]
        if size != 1:
            raise here.error(
                f"axis {number} of output {output.name!r} has size {size}: only one of size 1 can disappear.",
                "Collapse or pin its symbol at the inputs.",
            )
        axes.append(number)
    return tuple(sorted(set(axes)))


def _number(axis: AxisName, output: NamedTensor, place: Place) -> int:
    rank = output.value.ndim
    if isinstance(axis, int):
        if not -rank <= axis < rank:
            raise place.error(f"output {output.name!r} has {rank} axes and no axis {axis}.", "Count from 0.")
        return axis % rank
    found = [number for number, dim in enumerate(output.dims) if dim == axis]
    if len(found) != 1:
        raise place.error(
            f"{len(found) or 'none'} of the axes of output {output.name!r} {dims_text(output.dims)} is {axis}.",
            "Use the number of the axis.",
        )
    return found[0]


@dataclass(frozen=True)
class _Axis:
    """An axis of an output.

    Attributes:
        label: its size, its symbol, or `f(T)`; `7?` where the module did not run at a second size of every symbol.
        follows: the symbols that it depends on.
    """

    label: AxisName
    follows: tuple[str, ...] = ()


def _require_fixed(axis: _Axis, name: str, fixed: Collection[str], place: Place) -> None:
    """Refuse an axis that has size 1 in the example only."""
    moving = [symbol for symbol in axis.follows if symbol not in fixed]
    if moving:
        raise place.error(
            f"an axis of output {name!r} depends on {', '.join(moving)}: it is not always 1.",
            "Collapse or pin that symbol on the inputs.",
        )


def _output_dims(run: Run, example: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[tuple[_Axis, ...]]:
    shapes = [tuple(tensor.shape) for tensor in example]
    probes = {symbol: _probed(run, shapes, symbol, size) for symbol, size in sizes.items()}
    known = {symbol: probe for symbol, probe in probes.items() if probe is not None}
    dims: list[tuple[_Axis, ...]] = []
    for position, shape in enumerate(shapes):
        axes = []
        for axis, size in enumerate(shape):
            found = _axis(size, {symbol: (other, got[position][axis]) for symbol, (other, got) in known.items()}, sizes)
            unsure = not found.follows and len(known) < len(probes)
            axes.append(_Axis(f"{size}?") if unsure else found)
        dims.append(tuple(axes))
    return dims


def _axis(size: int, found: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> _Axis:
    """Return an axis from what it became when each symbol got another size."""
    moved = tuple(symbol for symbol, (_, now) in found.items() if now != size)
    if not moved:
        return _Axis(size)
    (other, now), symbol = found[moved[0]], moved[0]
    is_symbol = len(moved) == 1 and size == sizes[symbol] and now == other
    return _Axis(symbol if is_symbol else f"f({', '.join(moved)})", moved)


def _probed(
    run: Run, shapes: Sequence[tuple[int, ...]], symbol: str, size: int
) -> tuple[int, list[tuple[int, ...]]] | None:
    """Return another size of a symbol and the shapes it leads to; None when the module runs at no other."""
    for other in (2 * size, size // 2, size - 1):
        if other < 1 or other == size:
            continue
        try:
            found = [tuple(tensor.shape) for tensor in run({symbol: other})]
        except Exception:  # the module's own: it cannot run at that size
            continue
        if [len(shape) for shape in found] == [len(shape) for shape in shapes]:
            return other, found
    return None
