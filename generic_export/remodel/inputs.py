"""What a plan makes of a sub-graph's inputs: axes declared, collapsed and pinned, inputs bound and renamed.

In: a `Signature` and a `SubgraphPlan`. Out: an `InputSide` and example inputs of the archive, or an error that names the line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from generic_export.remodel.boundary import BoundTo, Fixed, InputBoundary, InputSide, SameAs, SizeOf
from generic_export.remodel.plan import (
    AxisName,
    Bind,
    BindConstant,
    BindSize,
    BindValue,
    InputPlan,
    OutputPlan,
    Place,
    SubgraphPlan,
    dims_text,
)
from generic_export.remodel.subgraph import NamedTensor, Signature
from generic_export.remodel.symbols import SymbolTable
from generic_export.torch_graph.dims import dim_symbol
from generic_export.torch_graph.naming import identifier

_P = TypeVar("_P", InputPlan, OutputPlan)


@dataclass(frozen=True)
class Planned:
    """One input and what the plan says of it.

    Attributes:
        tensor: the input, its axes as the plan's `shape`, or else the sub-graph, declares them; then as `axes` calls them.
        own_dims: the axes before `axes`.
        plan: what becomes of it.
        place: where the plan says so.
    """

    tensor: NamedTensor
    own_dims: tuple[AxisName, ...]
    plan: InputPlan
    place: Place

    def axes_of(self, symbol: str, table: SymbolTable, place: Place) -> list[int]:
        """Return the axes that bear a symbol, called by any of its names.

        Raises:
            OptionError: there is none; the message names the place.
        """
        named = enumerate(zip(self.own_dims, self.tensor.dims, strict=True))
        dynamic = [(axis, own, dim) for axis, (own, dim) in named if isinstance(dim, str)]
        found = [axis for axis, own, dim in dynamic if symbol in (own, dim, table.canonical[dim])]
        if not found:
            raise place.unknown(f"symbol of input {self.tensor.name!r}", symbol, [dim for _, _, dim in dynamic])
        return found


def declared_inputs(signature: Signature, plan: SubgraphPlan, place: Place) -> list[Planned]:
    """Return a sub-graph's inputs with their axes as the plan declares them.

    Raises:
        OptionError: an input is unknown, or its axes are not as the example has them.
    """
    names = [tensor.name for tensor in signature.inputs]
    plans: dict[str, Planned] = {}
    for name, (one, here) in plans_by_name("input", plan.inputs, names, place).items():
        tensor = signature.inputs[names.index(name)]
        own = tuple(tensor.dims if one.shape is None else _checked_shape(tensor, one.shape, here.at("shape")))
        plans[name] = Planned(NamedTensor(name, tensor.value, _renamed_axes(tensor, own, one, here)), own, one, here)
    return [
        plans.get(tensor.name, Planned(tensor, tensor.dims, InputPlan(), place.at("inputs", tensor.name)))
        for tensor in signature.inputs
    ]


def plans_by_name(
    kind: str, plans: Mapping[str, _P], names: Sequence[str], place: Place
) -> dict[str, tuple[_P, Place]]:
    """Return what a plan says of inputs or outputs and where, by their own names.

    Raises:
        OptionError: one is unknown, or planned twice.
    """
    found: dict[str, tuple[_P, Place]] = {}
    for key, one in plans.items():
        here = place.at(f"{kind}s", key)
        name = find_name(kind, key, names, here)
        if name in found:
            raise here.error(f"{kind} {name!r} is planned twice.", "Write all its changes in one place.")
        found[name] = (one, here)
    return found


def find_name(kind: str, name: str, names: Sequence[str], place: Place) -> str:
    """Return the input or output that a plan means, by its dotted name or as the graph writes it (`states_0`).

    Raises:
        OptionError: there is none, or more than one.
    """
    if name in names:
        return name
    written = [known for known in names if identifier(known) == name]
    if len(written) != 1:
        raise place.unknown(kind, name, names)
    return written[0]


def _renamed_axes(tensor: NamedTensor, own: Sequence[AxisName], plan: InputPlan, place: Place) -> tuple[AxisName, ...]:
    dims = list(own)
    for number, symbol in plan.axes.items():
        here = place.at("axes", str(number))
        axis = _axis_number(number, tensor, here)
        if not isinstance(dims[axis], str):
            raise here.error(f"axis {number} of {tensor.name!r} is not dynamic.", "Declare it with shape.")
        dims[axis] = symbol
    for axis, dim in enumerate(dims):
        if isinstance(dim, str):
            with place.at("shape", axis).named():
                dim_symbol(dim)
    return tuple(dims)


def _checked_shape(tensor: NamedTensor, shape: Sequence[AxisName], place: Place) -> Sequence[AxisName]:
    sizes = list(tensor.value.shape)
    if len(shape) != len(sizes):
        raise place.error(
            f"{len(shape)} axes are declared, but input {tensor.name!r} has {len(sizes)}.", f"Its example is {sizes}."
        )
    for axis, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise place.at(axis).error(
                f"axis {axis} of {tensor.name!r} is declared {dim}, but its example has {size}.",
                "Use that size, or a symbol (and pin it).",
            )
    return shape


def _axis_number(number: int, tensor: NamedTensor, place: Place) -> int:
    rank = tensor.value.ndim
    if not -rank <= number < rank:
        raise place.error(f"{tensor.name!r} has {rank} axes and no axis {number}.", "Count axes from 0.")
    return number % rank


# --- what becomes of them ---------------------------------------------------------------------------


def input_side(
    signature: Signature,
    inputs: Sequence[Planned],
    table: SymbolTable,
    pins: Mapping[str, int],
    place: Place,
) -> InputSide:
    """Return what the plan makes of all inputs.

    Args:
        signature: the boundary as it is.
        inputs: its inputs as planned.
        table: their symbols.
        pins: sizes of pinned symbols, by the archive's name.
        place: of the sub-graph's plan.

    Raises:
        OptionError: a collapse or a bind names what is not there, or leaves an input without a source.
    """
    collapsed = [_collapsed_axes(one, table) for one in inputs]
    gone = _collapsed_symbols(inputs, collapsed, table, pins)
    fixed = dict(pins) | gone
    _require_collapsed_everywhere(inputs, collapsed, table, pins, gone)
    boundaries = tuple(_boundary(one, axes, inputs, table) for one, axes in zip(inputs, collapsed, strict=True))
    if all(one.bound is not None for one in boundaries):
        raise place.at("inputs").error(
            "every input is bound, so the archive would have no input.", "Leave at least one unbound."
        )
    _require_distinct(boundaries, inputs)
    order = _bound_order(boundaries, inputs)
    carriers = _carriers(boundaries)
    _require_carried(boundaries, inputs, carriers, fixed)
    return InputSide(signature.call, boundaries, order, carriers, fixed)


def pinned_sizes(plan: SubgraphPlan, table: SymbolTable, place: Place) -> dict[str, int]:
    """Return the pinned sizes by the archive's names.

    Raises:
        OptionError: a symbol is unknown, pinned to two sizes, or to less than 1.
    """
    pins: dict[str, int] = {}
    for symbol, size in plan.pins.items():
        here = place.at("pins", symbol)
        name = table.name(symbol, here)
        if size < 1:
            raise here.error(f"{symbol} is pinned to {size}.", "Pin it to 1 or more.")
        if pins.setdefault(name, size) != size:
            raise here.error(f"{name} is pinned to {pins[name]} and to {size}.", "Pin it once.")
    return pins


def resized(tensor: torch.Tensor, dims: Sequence[AxisName], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return an example tensor at other sizes of symbols: its beginning, or itself again and again.

    Args:
        tensor: the example.
        dims: its axes.
        sizes: the new ones, of some of the symbols.
    """
    for axis, dim in enumerate(dims):
        size = sizes.get(dim) if isinstance(dim, str) else None
        if size is not None and size != tensor.shape[axis]:
            wanted = torch.arange(size, device=tensor.device) % max(tensor.shape[axis], 1)
            tensor = tensor.index_select(axis, wanted)
    return tensor


def _collapsed_axes(one: Planned, table: SymbolTable) -> tuple[int, ...]:
    named = enumerate(one.plan.collapse)
    return tuple(
        sorted({axis for at, name in named for axis in one.axes_of(name, table, one.place.at("collapse", at))})
    )


def _collapsed_symbols(
    inputs: Sequence[Planned], collapsed: Sequence[tuple[int, ...]], table: SymbolTable, pins: Mapping[str, int]
) -> dict[str, int]:
    gone = {}
    for one, axes in zip(inputs, collapsed, strict=True):
        for axis in axes:
            name = table.canonical[str(one.tensor.dims[axis])]
            if pins.get(name, 1) != 1:
                raise one.place.at("collapse").error(
                    f"{name} is pinned to {pins[name]}: only an axis of size 1 can disappear.", "Omit one of the two."
                )
            gone[name] = 1
    return gone


def _require_collapsed_everywhere(
    inputs: Sequence[Planned],
    collapsed: Sequence[tuple[int, ...]],
    table: SymbolTable,
    pins: Mapping[str, int],
    gone: Collection[str],
) -> None:
    """Refuse a symbol that is 1 in one input and something else in another."""
    for one, axes in zip(inputs, collapsed, strict=True):
        for axis, dim in enumerate(one.tensor.dims):
            left = isinstance(dim, str) and table.canonical[dim] in gone and axis not in axes
            if left and one.plan.bind is None and table.canonical[str(dim)] not in pins:
                raise one.place.at("collapse").error(
                    f"input {one.tensor.name!r} keeps {dim}, but another input collapses it.",
                    f"Collapse it here too, or pin {dim} to 1, or give this axis a symbol of its own.",
                )


def _boundary(one: Planned, collapsed: tuple[int, ...], inputs: Sequence[Planned], table: SymbolTable) -> InputBoundary:
    tensor = one.tensor
    rename = one.plan.rename
    if rename is not None and one.plan.bind is not None:
        raise one.place.at("rename").error("a bound input has no name in the archive.", "Drop the rename.")
    return InputBoundary(
        name=tensor.name,
        outer_name=tensor.name if rename is None else rename,
        dtype=tensor.value.dtype,
        device=tensor.value.device,
        raw_dims=one.own_dims,
        dims=_canonical(tensor, table),
        collapsed=collapsed,
        bound=None if one.plan.bind is None else _resolved(one, one.plan.bind, inputs, table),
        told="" if one.plan.bind is None else bind_text(one.plan.bind),
    )


def bind_text(bind: Bind) -> str:
    """Return a bind as people read it: `audio.T`, `length` or `3`."""
    if isinstance(bind, BindSize):
        return f"{bind.source}.{bind.axis}"
    return bind.source if isinstance(bind, BindValue) else str(bind.value)


def _resolved(one: Planned, bind: Bind, inputs: Sequence[Planned], table: SymbolTable) -> BoundTo:
    here = one.place.at("bind")
    if isinstance(bind, BindConstant):
        return Fixed(_constant(one, bind, table, here))
    names = [other.tensor.name for other in inputs]
    source = names.index(find_name("source", bind.source, names, here))
    if inputs[source] is one:
        raise here.error(f"input {one.tensor.name!r} is bound to itself.", "Name another input.")
    if isinstance(bind, BindValue):
        _require_expandable(repr(names[source]), _canonical(inputs[source].tensor, table), one, table, here)
        return SameAs(source)
    if one.tensor.value.dtype is torch.bool:
        raise here.error(f"input {one.tensor.name!r} is boolean and cannot hold a size.", "Bind it to true.")
    return SizeOf(source, _source_axis(bind, inputs[source], table, here))


def _source_axis(bind: BindSize, source: Planned, table: SymbolTable, place: Place) -> int:
    if isinstance(bind.axis, int):
        return _axis_number(bind.axis, source.tensor, place)
    return source.axes_of(bind.axis, table, place)[0]


def _constant(one: Planned, bind: BindConstant, table: SymbolTable, place: Place) -> torch.Tensor:
    example = one.tensor.value
    try:
        made = torch.tensor(bind.value)
        kept = made.to(example.dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise place.error(f"this constant is not a tensor: {error}.", "Rows must have equal lengths.") from None
    if not example.dtype.is_floating_point and not torch.equal(kept.to(made.dtype), made):
        raise place.error(f"{bind.value} is out of range for {example.dtype}, the dtype of {one.tensor.name!r}.")
    _require_expandable("the constant", tuple(kept.shape), one, table, place)
    return kept.to(example.device)


def _require_expandable(
    what: str, source: Sequence[AxisName], target: Planned, table: SymbolTable, place: Place
) -> None:
    dims = _canonical(target.tensor, table)
    pairs = list(zip(reversed(source), reversed(dims), strict=False))
    if len(source) > len(dims) or any(one not in (1, other) for one, other in pairs):
        raise place.error(
            f"{what} {dims_text(source)} does not fit into {target.tensor.name!r} {dims_text(dims)}.",
            "Bind to an input of the same shape.",
        )


def _canonical(tensor: NamedTensor, table: SymbolTable) -> tuple[AxisName, ...]:
    return tuple(table.canonical[dim] if isinstance(dim, str) else dim for dim in tensor.dims)


def _require_distinct(boundaries: Sequence[InputBoundary], inputs: Sequence[Planned]) -> None:
    taken: dict[str, str] = {}
    for boundary, one in zip(boundaries, inputs, strict=True):
        if boundary.bound is not None:
            continue
        written = identifier(boundary.outer_name)
        if written in taken:
            raise one.place.at("rename").error(
                f"inputs {taken[written]!r} and {one.tensor.name!r} both get the name {written!r} in the archive.",
                "Rename one of them.",
            )
        taken[written] = one.tensor.name


def _bound_order(boundaries: Sequence[InputBoundary], inputs: Sequence[Planned]) -> tuple[int, ...]:
    """Return the positions of bound inputs, each after what it is computed from."""
    waiting = [position for position, one in enumerate(boundaries) if one.bound is not None]
    order: list[int] = []
    while waiting:
        ready = [position for position in waiting if _source_of(boundaries[position]) not in waiting]
        if not ready:
            names = [inputs[position].tensor.name for position in waiting]
            raise (
                inputs[waiting[0]]
                .place.at("bind")
                .error(
                    f"{', '.join(names)} are bound to each other in a circle.",
                    "Bind one of them to an input that remains.",
                )
            )
        order += ready
        waiting = [position for position in waiting if position not in ready]
    return tuple(order)


def _source_of(boundary: InputBoundary) -> int | None:
    return boundary.bound.source if isinstance(boundary.bound, (SizeOf, SameAs)) else None


def _carriers(boundaries: Sequence[InputBoundary]) -> dict[str, tuple[int, int]]:
    carriers: dict[str, tuple[int, int]] = {}
    for position, boundary in enumerate(boundaries):
        for axis, dim in enumerate(boundary.dims):
            if boundary.bound is None and isinstance(dim, str):
                carriers.setdefault(dim, (position, axis))
    return carriers


def _require_carried(
    boundaries: Sequence[InputBoundary],
    inputs: Sequence[Planned],
    carriers: Mapping[str, tuple[int, int]],
    fixed: Mapping[str, int],
) -> None:
    """Refuse a bound input with an axis whose size nobody gives."""
    for boundary, one in zip(boundaries, inputs, strict=True):
        for dim in boundary.dims if boundary.bound is not None else ():
            if isinstance(dim, str) and dim not in carriers and dim not in fixed:
                raise one.place.at("bind").error(
                    f"no input of the archive has {dim}, an axis of {one.tensor.name!r} {dims_text(boundary.dims)}.",
                    f"Collapse {dim}, pin it, or alias it with the symbol of an input that remains.",
                )
