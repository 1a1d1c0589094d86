"""Symbols under a plan: which become one, which are fixed, what must hold between the rest.

In: the declared axes of a sub-graph's inputs, and what a plan says of symbols. Out: `SymbolTable`, then `Relations`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from generic_export.remodel.plan import Place, SubgraphPlan, SymbolConstraint
from generic_export.remodel.subgraph import NamedTensor
from generic_export.torch_graph.dims import dim_symbol
from generic_export.torch_graph.request import DynamicSize
from generic_export.torch_graph.sizes.relations import Relation, Size


@dataclass(frozen=True)
class SymbolTable:
    """What the symbols of a sub-graph are called in the end.

    Attributes:
        canonical: by the module's own name, the name in the archive.
        sizes: by the name in the archive, the size at the example.
    """

    canonical: Mapping[str, str]
    sizes: Mapping[str, int]

    @staticmethod
    def of(inputs: Sequence[NamedTensor], plan: SubgraphPlan, place: Place) -> SymbolTable:
        """Apply the aliases, and the constraints that make two symbols one.

        Raises:
            OptionError: a symbol is unknown, renamed twice, or stands for two sizes in the example.
        """
        own = tuple(dict.fromkeys(dim for tensor in inputs for dim in tensor.dims if isinstance(dim, str)))
        names = {symbol: symbol for symbol in own} | _aliased(own, plan, place.at("aliases"))
        canonical = _merged(names, plan.constraints, place.at("constraints"))
        return SymbolTable(canonical, _example_sizes(inputs, canonical, place.at("inputs")))

    @property
    def known(self) -> tuple[str, ...]:
        """Every name a plan may call a symbol by."""
        return tuple(dict.fromkeys([*self.canonical, *self.sizes]))

    def name(self, symbol: str, place: Place) -> str:
        """Return the name in the archive of a symbol that a plan calls by either name.

        Raises:
            OptionError: there is no such symbol.
        """
        found = self.canonical.get(symbol, symbol if symbol in self.sizes else None)
        if found is None:
            raise place.unknown("symbol", symbol, self.known)
        return found


def _aliased(own: Sequence[str], plan: SubgraphPlan, place: Place) -> dict[str, str]:
    names: dict[str, str] = {}
    for target, sources in plan.aliases.items():
        with place.at(target).named():
            dim_symbol(target)
        if not sources:
            raise place.at(target).error("no symbol is renamed to this one.", "List one or more.")
        for index, source in enumerate(sources):
            here = place.at(target, index)
            if source not in own:
                raise here.unknown("symbol", source, own)
            if source in names:
                raise here.error(f"symbol {source!r} is also renamed to {names[source]!r}.", "Use one name.")
            names[source] = target
    for target in plan.aliases:
        if names.get(target, target) != target:
            raise place.at(target).error(
                f"symbol {target!r} is itself renamed to {names[target]!r}.", "Use the final name."
            )
    return names


def _merged(names: Mapping[str, str], constraints: Mapping[str, SymbolConstraint], place: Place) -> dict[str, str]:
    """Return the names with those symbols made one that a constraint says are equal."""
    merged = dict(names)
    for symbol, constraint in constraints.items():
        if constraint.equals is None or not constraint.equals.strip().isidentifier():
            continue
        here = place.at(symbol, "equals")
        kept = constraint.equals.strip()
        for name in (symbol, kept):
            if name not in merged and name not in merged.values():
                raise here.unknown("symbol", name, dict.fromkeys([*merged, *merged.values()]))
        gone, stays = merged.get(symbol, symbol), merged.get(kept, kept)
        merged = {own: stays if name == gone else name for own, name in merged.items()} | {gone: stays}
    return merged


def _example_sizes(inputs: Sequence[NamedTensor], canonical: Mapping[str, str], place: Place) -> dict[str, int]:
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for tensor in inputs:
        for axis, dim in enumerate(tensor.dims):
            if not isinstance(dim, str):
                continue
            name, size = canonical[dim], tensor.value.shape[axis]
            where = f"axis {axis} of {tensor.name!r}"
            if sizes.setdefault(name, size) != size:
                raise place.at(tensor.name).error(
                    f"{where} has size {size} in the example, but {first[name]} has {sizes[name]}, and both are "
                    f"{name}.",
                    "Use different symbols, or an example in which they are equal.",
                )
            first.setdefault(name, where)
    return sizes


# --- what must hold ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relations:
    """What holds between the symbols that are left.

    Attributes:
        bounds: smallest and largest size, by symbol; PyTorch is told, and the archive asserts them.
        multiples: what divides a symbol's size; PyTorch is told, and the archive refuses others.
        assertions: everything else, as tract reads it.
    """

    bounds: Mapping[str, tuple[int | None, int | None]]
    multiples: Mapping[str, int]
    assertions: tuple[str, ...]

    def texts(self) -> tuple[str, ...]:
        """Return all of it as text."""
        ranges = [
            f"{symbol} {sign} {bound}"
            for symbol, bounds in self.bounds.items()
            for sign, bound in zip((">=", "<="), bounds, strict=True)
            if bound is not None
        ]
        multiples = [f"{symbol} is a multiple of {factor}" for symbol, factor in self.multiples.items()]
        return (*ranges, *multiples, *self.assertions)


def relations_of(
    table: SymbolTable,
    fixed: Mapping[str, int],
    plan: SubgraphPlan,
    place: Place,
    given: Sequence[str] = (),
    declared: Mapping[str, DynamicSize] | None = None,
) -> Relations:
    """Gather what a sub-graph and its plan say of sizes, in the archive's names; hold it against the example.

    Args:
        table: the symbols.
        fixed: sizes of those that are fixed, by the archive's name.
        plan: the plan.
        place: where it stands.
        given: assertions of the sub-graph itself.
        declared: what it says of sizes, by its own names.

    Raises:
        OptionError: something unknown is named, or the example (or a pinned size) is not as it should be.
    """
    judge = _Judge(table, fixed)
    bounds: dict[str, tuple[int | None, int | None]] = {}
    multiples: dict[str, int] = {}
    assertions: list[str] = []
    for symbol, size in (declared or {}).items():
        if symbol in table.canonical:
            name = table.canonical[symbol]
            _narrow(bounds, name, size.least if size.multiple_of > 1 else size.min, size.max)
            multiples[name] = math.lcm(size.multiple_of, multiples.get(name, 1))
    for text in given:
        assertions += judge.kept(text, Place())
    for symbol, constraint in plan.constraints.items():
        here = place.at("constraints", symbol)
        name = table.name(symbol, here)
        _require_sensible(constraint, here)
        _narrow(bounds, name, constraint.min, constraint.max)
        if constraint.multiple_of is not None:
            factor = multiples[name] = math.lcm(constraint.multiple_of, multiples.get(name, 1))
            _narrow(bounds, name, factor, None)  # none of it would be a multiple too, but PyTorch takes no such size
            # Held against the example and no more: told as `T == 8*(T/8)` beside a range, tract 0.23.9 never ends loading.
            judge.held(f"{factor} * ({name} / {factor}) == {name}", here.at("multiple_of"))
        assertions += judge.equality(name, constraint.equals, here.at("equals"))
    for index, text in enumerate(plan.assertions):
        assertions += judge.kept(text, place.at("assertions", index))
    for name, limits in bounds.items():
        for sign, bound in zip((">=", "<="), limits, strict=True):
            if bound is not None:
                judge.held(f"{name} {sign} {bound}", place.at("constraints", name))
    return Relations(
        {name: limits for name, limits in bounds.items() if name not in fixed and limits != (None, None)},
        {name: factor for name, factor in multiples.items() if name not in fixed and factor > 1},
        tuple(dict.fromkeys(assertions)),
    )


@dataclass(frozen=True)
class _Judge:
    """Renames relations and holds them against the example."""

    table: SymbolTable
    fixed: Mapping[str, int]

    def kept(self, text: str, place: Place) -> list[str]:
        """Return a relation in the archive's names; nothing when only fixed sizes are in it."""
        relation, names = self.held(text, place)
        if relation.divided_and_whole:
            symbol = relation.divided_and_whole[0]
            raise place.error(
                f"{text!r} uses {symbol} both divided and whole: tract does not finish loading this together "
                f"with a range of {symbol}.",
                f"Say that {symbol} is a multiple with constraints: {{{symbol}: {{multiple_of: ...}}}}.",
            )
        renamed = relation.replaced({symbol: self.fixed.get(name, name) for symbol, name in names.items()})
        return [renamed.text] if renamed.symbols else []

    def held(self, text: str, place: Place) -> tuple[Relation, dict[str, str]]:
        """Return a relation that holds at the example, and what its symbols are called in the archive."""
        with place.named():
            relation = Relation.parse(text)
        names = {symbol: self.table.name(symbol, place) for symbol in relation.symbols}
        sizes = {symbol: self.fixed.get(name, self.table.sizes[name]) for symbol, name in names.items()}
        if not relation.holds(sizes):
            told = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            raise place.error(
                f"{text!r} does not hold at {told or 'any size'}.", "Correct it, or the example, or the pinned sizes."
            )
        return relation, names

    def equality(self, name: str, size: str | None, place: Place) -> list[str]:
        """Return the relation that a symbol is always this size; nothing when the two are one symbol."""
        if size is None:
            return []
        with place.named():
            parsed = Size.parse(size)
        return [] if parsed.text.isidentifier() else self.kept(f"{name} == {parsed.text}", place)


def _require_sensible(constraint: SymbolConstraint, place: Place) -> None:
    if constraint.min is not None and constraint.max is not None and constraint.min > constraint.max:
        raise place.error(f"min {constraint.min} is above max {constraint.max}.", "Swap them.")
    for field, value in (("min", constraint.min), ("max", constraint.max), ("multiple_of", constraint.multiple_of)):
        if value is not None and value < (0 if field == "min" else 1):
            raise place.at(field).error(f"{field} is {value}.", "Sizes are counted from 0, multiples from 1.")


def _narrow(bounds: dict[str, tuple[int | None, int | None]], name: str, low: int | None, high: int | None) -> None:
    """Take the tighter of two ranges."""
    before_low, before_high = bounds.get(name, (None, None))
    lows = [bound for bound in (before_low, low) if bound is not None]
    highs = [bound for bound in (before_high, high) if bound is not None]
    bounds[name] = (max(lows, default=None), min(highs, default=None))
