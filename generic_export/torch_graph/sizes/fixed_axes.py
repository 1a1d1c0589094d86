"""Symbols of a captured graph made numbers, without a capture of its own: what `Dim.AUTO` becomes where the model fixes an axis.

In: a graph, and a size for some of its symbols. Out: the graph as if those axes had been static.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import sympy

from generic_export.torch_graph.dims import Dim, dim_symbol, simplify_dim
from generic_export.torch_graph.ir import FixedTensorList, SizeCondition, TensorVariable, TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.request import DynamicAxes, auto_symbols, symbol_name
from generic_export.torch_graph.sizes.guards import Names, bounds_of, conditions_of
from generic_export.torch_graph.sizes.proofs import Branch, Sizes

_NAME = re.compile(r"[A-Za-z_]\w*")
_MULTIPLE = re.compile(r"(\w+) - (\d+)\*\(\1/\2\) == 0")


def symbols_in(condition: SizeCondition) -> frozenset[str]:
    """Return the symbols that a condition is about (and names of functions, which no symbol has)."""
    return frozenset(_NAME.findall(condition.relation or condition.text))


def settled(
    branch: Branch, example: Sizes, names: Names, auto: Collection[str]
) -> tuple[list[SizeCondition], dict[str, Dim]]:
    """Return the conditions of an assumption, and what becomes of symbols of `Dim.AUTO` so that tract can check them.

    Symbols become one where they have one size in the example and that is enough (a mask has the shape of its ids); else numbers.
    An equation between sizes (16*16 patches for 256 rows of a table) leaves next to nothing of an axis: numbers again.

    Args:
        branch: the assumption.
        example: the size of each of PyTorch's symbols.
        names: the user's symbols for PyTorch's.
        auto: the symbols of `Dim.AUTO`.
    """
    conditions = conditions_of(branch, example, names)
    loose = {symbol for symbol in branch.condition.free_symbols if str(names.get(symbol)) in auto}
    if not loose or all(map(_is_kept, conditions)):
        return conditions, {}
    first: dict[int, sympy.Symbol] = {}
    for symbol in sorted(branch.condition.free_symbols, key=lambda each: (each in loose, str(names[each]))):
        first.setdefault(example[symbol], symbol)
    same = {symbol: first[example[symbol]] for symbol in loose if first[example[symbol]] is not symbol}
    merged = branch.condition.xreplace(same)
    left = [] if merged == sympy.true else conditions_of(replace(branch, condition=merged), example, names)
    if same and all(map(_is_kept, left)):
        return left, {str(names[symbol]): names[other] for symbol, other in same.items()}
    return [], {str(names[symbol]): example[symbol] for symbol in loose}


def join_changes(changes: dict[str, Dim], further: Mapping[str, Dim]) -> None:
    """Add to what symbols become; where one is to become two things, these are one size too, and a number wins."""
    for name, size in further.items():
        known = changes.get(name, size)
        if isinstance(known, int) and not isinstance(size, int):
            known, size = size, known
        changes[name] = size
        if not isinstance(known, int) and known != size:
            changes[str(known)] = size


def _is_kept(condition: SizeCondition) -> bool:
    """Say whether a condition leaves its axes dynamic."""
    relation = condition.relation
    return relation is not None and (not relation.endswith("== 0") or _MULTIPLE.fullmatch(relation) is not None)


def with_sizes(graph: TorchModuleIRGraph, sizes: Mapping[str, Dim]) -> TorchModuleIRGraph:
    """Return a graph with numbers, or other symbols, for some of its symbols.

    Args:
        graph: of symbolic sizes.
        sizes: what each symbol becomes.
    """
    return _Fixing(sizes).graph(graph) if sizes else graph


def equal_symbols(sizes: Mapping[str, int], chosen: Collection[str]) -> dict[str, Dim]:
    """Return one symbol for all that have the size of a chosen one: what is tried before symbols become numbers.

    A mask may have another batch than its ids for the module, which broadcasts it, and not for the graph.

    Args:
        sizes: of the symbols of `Dim.AUTO` in the example.
        chosen: those that are in question.
    """
    first: dict[int, str] = {}
    for name in sorted(sizes):
        first.setdefault(sizes[name], name)
    asked = {sizes[name] for name in chosen}
    return {name: dim_symbol(first[size]) for name, size in sizes.items() if size in asked and first[size] != name}


def auto_axes(axes: DynamicAxes, graph: TorchModuleIRGraph) -> str:
    """Return which axes of `Dim.AUTO` a graph has at one size, or up to a size, as text; "" where there is none."""
    auto, shapes = auto_symbols(axes), {variable.name: variable.shape for variable in graph.inputs}
    bounds = bounds_of(graph.conditions)
    static: dict[str, list[str]] = {}
    bounded: dict[str, str] = {}
    for name, given in axes.items():
        for axis, symbol in given.items():
            size = shapes[name][axis] if symbol_name(symbol) in auto else None
            if isinstance(size, int):
                static.setdefault(name, []).append(f"{axis} ({size})")
            elif (most := bounds.get(str(size), (0, None))[1]) is not None:
                bounded.setdefault(str(size), f"axis {axis} of {name!r} is at most {most}")
    alike: dict[str, list[str]] = {}
    for name, sizes in static.items():
        alike.setdefault(", ".join(sizes), []).append(name)
    told = [f"{', '.join(names)}: {sizes}" for sizes, names in alike.items()]
    fixed = f"axes are static in the archive, at the example's sizes: {'; '.join(told)}." if told else ""
    limited = f"{'; '.join(bounded.values())}." if bounded else ""
    return " ".join(text for text in (fixed, limited) if text)


class _Fixing:
    """One replacement of symbols."""

    def __init__(self, sizes: Mapping[str, Dim]) -> None:
        self.sizes = sizes
        self._replacements = {dim_symbol(name): sympy.sympify(size) for name, size in sizes.items()}
        for _ in sizes:  # one that becomes another, which becomes a number
            self._replacements = {old: new.xreplace(self._replacements) for old, new in self._replacements.items()}

    def graph(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        return replace(
            graph,
            inputs=tuple(map(self._variable, graph.inputs)),
            outputs=tuple(map(self._variable, graph.outputs)),
            ops=tuple(map(self._op, graph.ops)),
            symbols=tuple(each for each in graph.symbols if each.name not in self.sizes),
            conditions=tuple(self._condition(each) for each in graph.conditions if not self._is_met(each)),
            declarations=tuple(each for each in graph.declarations if each.name not in self.sizes),
        )

    def _op(self, op: TorchOp) -> TorchOp:
        outputs = tuple(None if each is None else self._variable(each) for each in op.outputs)
        kwargs = {name: self._argument(each) for name, each in op.kwargs.items()}
        return replace(op, args=self._argument(op.args), kwargs=kwargs, outputs=outputs)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, TensorVariable):
            return self._variable(argument)
        if isinstance(argument, FixedTensorList):
            return FixedTensorList(self._argument(argument.elements))
        if isinstance(argument, tuple):
            return tuple(map(self._argument, argument))
        if isinstance(argument, TorchModuleIRGraph):  # the body of a loop
            return self.graph(argument)
        return self._dim(argument) if isinstance(argument, sympy.Expr) else argument

    def _variable(self, variable: TensorVariable) -> TensorVariable:
        return replace(variable, shape=tuple(map(self._dim, variable.shape)))

    def _dim(self, dim: Dim) -> Dim:
        return simplify_dim(dim.xreplace(self._replacements)) if isinstance(dim, sympy.Expr) else dim

    def _is_met(self, condition: SizeCondition) -> bool:
        """Say whether a condition is one on fixed sizes: it holds at those of the example."""
        return not any(self._new(name) is None for name in symbols_in(condition))

    def _new(self, name: str) -> int | None:
        """Return the number that a symbol becomes; None where it is none."""
        found = self._replacements.get(dim_symbol(name))
        return int(found) if found is not None and found.is_Integer else None

    def _condition(self, condition: SizeCondition) -> SizeCondition:
        def replaced(name: re.Match[str]) -> str:
            return str(self._replacements.get(dim_symbol(name[0]), name[0]))

        relation = None if condition.relation is None else _NAME.sub(replaced, condition.relation)
        return replace(condition, relation=relation, text=_NAME.sub(replaced, condition.text))


__all__ = ["auto_axes", "equal_symbols", "join_changes", "settled", "symbols_in", "with_sizes"]
