"""Which way a module went where its own code asked for a size, and whether what was captured stands for the other way as well.

In: programs captured with `Dim.DYNAMIC`, under which PyTorch notes such a condition and does not hold anybody to it. Out: the
conditions, sizes at which they fail, and whether one program stands for another: `if rest > 0: x = pad(x, rest)` is right where
nothing is left too, and leaving the padding out is not right elsewhere.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from generic_export.compat import REMAINDERS, over_sizes_of_inputs, shape_guards
from generic_export.torch_graph.sizes.proofs import Branch, Sizes, computed
from generic_export.torch_graph.source_lines import source_of_guard

aten = torch.ops.aten

_LEAST = 1
_CONSECUTIVE = 12
_MULTIPLES = (2, 3, 5, 8, 13, 21)
_PRIMES = (7, 31, 97, 331, 641, 1283)
_MOST_TRIALS = 400
_FEW = 16

# What keeps the values and their order.
_COPIES = frozenset((aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default))
_RESHAPES = frozenset((aten.view.default, aten.reshape.default, aten._unsafe_view.default))
# What keeps them where the result has the size that was given; a scale that was given might not.
_ADAPTIVE = frozenset(
    (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
)
_RESIZES = frozenset(
    getattr(aten, name).vec
    for name in (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    )
)


@dataclass(frozen=True)
class GuardedProgram:
    """A program, and the conditions under which the module does what it does.

    Attributes:
        program: as captured.
        branches: those conditions that fail at some of the sizes.
        names: the user's symbols for PyTorch's; those of one name are one size.
        kept: conditions that the engine is held to: other sizes are not looked at.
    """

    program: ExportedProgram
    branches: tuple[Branch, ...]
    names: Mapping[sympy.Symbol, sympy.Expr]
    kept: tuple[Branch, ...] = ()

    @staticmethod
    def of(program: ExportedProgram, names: Mapping[sympy.Symbol, sympy.Expr]) -> GuardedProgram:
        """Read the conditions of a captured program."""
        asked = {
            condition: source
            for guard in shape_guards(program)
            if isinstance(condition := over_sizes_of_inputs(program, guard.expr), sympy.Rel)
            and (source := source_of_guard(guard.sloc.framework_loc))
        }
        trials = trials_of(program, names) if asked else []
        branches = [Branch(condition, source) for condition, source in asked.items()]
        return GuardedProgram(
            program, tuple(branch for branch in branches if not all(map(branch.holds, trials))), names
        )

    @cached_property
    def trials(self) -> list[Sizes]:
        """Sizes of the inputs that the conditions are tried at, small ones first."""
        return trials_of(self.program, self.names)

    def holds(self, sizes: Sizes) -> bool:
        """Say whether the module goes this way at all branches."""
        return all(branch.holds(sizes) for branch in self.branches)

    def named(self, branch: Branch) -> sympy.Basic:
        """Return a condition over the user's symbols."""
        return branch.condition.xreplace(dict(self.names))

    def only(self, branches: Sequence[Branch]) -> GuardedProgram:
        """Return the same way as one of some of its branches; the others are kept."""
        return replace(
            self, branches=tuple(branches), kept=tuple(each for each in self.branches if each not in branches)
        )

    def _allows(self, sizes: Sizes) -> bool:
        return all(branch.holds(sizes) for branch in self.kept)

    @property
    def fills_up(self) -> bool:
        """Whether it is the way of sizes that are no multiple of a number, at every branch."""
        return bool(self.branches) and all(
            isinstance(each.condition, sympy.Ne)
            and isinstance(each.condition.lhs, REMAINDERS)
            and each.condition.rhs == 0
            for each in self.branches
        )

    def shapes_of_another_way(self, example: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return shapes of the inputs at which as many conditions fail as can at once, and as few of those kept, near the example.

        None is smaller than in the example, if that can be: small ones would make one position of few, and sizes of one are
        something else to PyTorch.
        """

        def rank(sizes: Sizes) -> tuple[int, int, tuple[bool, int]]:
            unlike_kept = sum(not branch.holds(sizes) for branch in self.kept)
            failing = sum(branch.holds(sizes) for branch in self.branches)
            return failing, unlike_kept, _far(input_shapes(self.program, sizes), example)

        return input_shapes(self.program, min(self.trials, key=rank))

    def shapes_with_one(self, branch: Branch, example: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Return shapes with 1 for the size that a condition is about: a few of every other, and those of the example.

        Few take less time; a module may not accept them, and what goes another way there is left out.
        """
        (symbol,) = branch.condition.free_symbols
        name, sizes = self.names.get(symbol), symbols_at(self.program, example)
        if sizes is None or name is None:
            return []
        others = [each for each in (*self.branches, *self.kept) if symbol not in each.condition.free_symbols]
        found = []
        for most in (_FEW, max(sizes.values())):
            tried = {each: 1 if self.names.get(each) == name else min(size, most) for each, size in sizes.items()}
            shapes = input_shapes(self.program, tried)
            if shapes not in found and all(each.holds(tried) for each in others):
                found.append(shapes)
        return found

    def stands_for(self, other: GuardedProgram) -> bool:
        """Say whether this program is right where the other one is.

        It is where, at the sizes tried, both compute the same but for padding by nothing, slices of everything and empty pieces.
        """
        shared = [(mine, sizes) for mine, sizes in self._pairs(other) if other.holds(sizes)]
        if not shared:
            return False
        numbered: dict[Any, int] = {}
        mine = _Forms(self.program, [sizes for sizes, _ in shared], numbered).outputs()
        return mine is not None and mine == _Forms(other.program, [sizes for _, sizes in shared], numbered).outputs()

    def shapes_of_a_further_way(
        self, others: Sequence[GuardedProgram], example: Sequence[Sequence[int]]
    ) -> list[tuple[int, ...]] | None:
        """Return shapes of the inputs, near the example, at which the module goes neither this way nor one of the others."""
        found = []
        for other in others:
            for mine, sizes in self._pairs(other):
                shapes = input_shapes(other.program, sizes)
                if not self.holds(mine) and not any(each.goes_at(shapes) for each in others):
                    found.append(shapes)
        return min(found, key=lambda shapes: _far(shapes, example), default=None)

    def goes_at(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Say whether the module goes this way where the inputs have these shapes."""
        sizes = symbols_at(self.program, shapes)
        return sizes is not None and self.holds(sizes)

    def _pairs(self, other: GuardedProgram) -> list[tuple[Sizes, Sizes]]:
        """Return the sizes that another program is tried at, as this program has them and as that one; none if it has not all."""
        places = [symbols_at(self.program, input_shapes(other.program, sizes)) for sizes in other.trials]
        if any(place is None for place in places):
            return []
        return [
            (mine, sizes)
            for mine, sizes in zip(places, other.trials, strict=True)
            if mine is not None and self._allows(mine) and other._allows(sizes)
        ]


# --- sizes ---


def _far(shapes: Sequence[Sequence[int]], example: Sequence[Sequence[int]]) -> tuple[bool, int]:
    """Return whether any size is smaller than in the example, and how far all are from it together."""
    pairs = zip(itertools.chain(*shapes), itertools.chain(*example), strict=True)
    steps = [size - there for size, there in pairs]
    return min(steps, default=0) < 0, sum(map(abs, steps))


def trials_of(program: ExportedProgram, names: Mapping[sympy.Symbol, sympy.Expr]) -> list[Sizes]:
    """Return sizes of every symbol within its range, small ones first: consecutive ones, multiples, primes."""
    ranges = program.range_constraints
    used = [symbol for symbol in ranges if any(symbol in _free(node) for node in _user_inputs(program))]
    sizes = {names.get(symbol, symbol): _sizes_in(ranges[symbol]) for symbol in used}
    if not sizes:
        return []
    if math.prod(map(len, sizes.values())) <= _MOST_TRIALS:
        combinations = [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]
    else:
        generator = random.Random(0)
        combinations = [{size: generator.choice(found) for size, found in sizes.items()} for _ in range(_MOST_TRIALS)]
    found = [{symbol: each[names.get(symbol, symbol)] for symbol in used} for each in combinations]
    return sorted(found, key=lambda each: sum(each.values()))


def _sizes_in(found: Any) -> list[int]:
    least = max(_LEAST, int(found.lower))
    most = int(found.upper) if found.upper.is_Integer else None
    near = [least + step for step in (*range(_CONSECUTIVE), *_PRIMES)]
    far = [least * times + step for times in _MULTIPLES for step in (0, 1, _PRIMES[0])]
    return sorted({size for size in (*near, *far) if most is None or size <= most})


def _user_inputs(program: ExportedProgram) -> list[Node]:
    names = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    return [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]


def _free(node: Node) -> set[sympy.Symbol]:
    dims = [size.node.expr for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
    return set().union(*(dim.free_symbols for dim in dims)) if dims else set()


def _shape_at(node: Node, sizes: Sizes) -> tuple[int, ...]:
    return tuple(_number_at(size, sizes) for size in node.meta["val"].shape)


def input_shapes(program: ExportedProgram, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs at some sizes."""
    return [_shape_at(node, sizes) for node in _user_inputs(program)]


def symbols_at(program: ExportedProgram, shapes: Sequence[tuple[int, ...]]) -> Sizes | None:
    """Return what PyTorch's symbols are where the inputs have these shapes; None where they may not."""
    sizes: dict[sympy.Symbol, int] = {}
    nodes = _user_inputs(program)
    for node, shape in zip(nodes, shapes, strict=True):
        for size, number in zip(node.meta["val"].shape, shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = number
    known = all(_free(node) <= set(sizes) for node in nodes) and input_shapes(program, sizes) == list(shapes)
    ranges = program.range_constraints
    return sizes if known and all(number in ranges[symbol] for symbol, number in sizes.items()) else None


def shapes_with(
    program: ExportedProgram,
    names: Mapping[sympy.Symbol, sympy.Expr],
    example: Sequence[tuple[int, ...]],
    name: sympy.Expr | None,
    size: int,
) -> list[tuple[int, ...]] | None:
    """Return the shapes of an example with another size for one of the user's symbols; None where that may not be."""
    sizes = symbols_at(program, example)
    if sizes is None or name is None:
        return None
    return input_shapes(program, {each: size if names.get(each) == name else number for each, number in sizes.items()})


def _number_at(size: Any, sizes: Sizes) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(computed(size.node.expr)(sizes))


def _number_if_any(size: Any, sizes: Sizes) -> int | None:
    """Return a size; None where it divides by one that is 0, as behind an input that is too short for the module."""
    try:
        return _number_at(size, sizes)
    except ZeroDivisionError:
        return None


# --- what a program computes ---


class _Forms:
    """A number for what each node of a program computes at some sizes; equal numbers compute the same."""

    def __init__(self, program: ExportedProgram, trials: Sequence[Sizes], numbered: dict[Any, int]) -> None:
        self._program = program
        self._trials = trials
        self._numbered = numbered
        self._forms: dict[Node, int] = {}

    def outputs(self) -> Any:
        """Return those of the outputs; None where they cannot be told."""
        places = itertools.count()
        try:
            for node in self._program.graph.nodes:
                if node.op == "output":
                    return self._argument(node.args)
                if node.op == "placeholder":
                    self._forms[node] = self._number(("input", next(places)))
                elif not isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat):
                    self._forms[node] = self._form(node)
        except (LookupError, NameError, TypeError, AttributeError):
            return None  # a size known at run time only, or arguments of another form: there is nothing to compare
        return None

    def _form(self, node: Node) -> int:
        args: Any = node.args
        if node.op == "call_function" and self._changes_nothing(node, args):
            return self._forms[args[0]]
        if node.target is aten.cat.default:
            return self._concatenation(*args)
        if node.target in _RESHAPES:
            return self._number(("reshape", self._argument(args[0]), str(self._sizes(node))))
        return self._number((str(node.target), self._argument(args), self._argument(node.kwargs)))

    def _concatenation(self, parts: Sequence[Node], axis: int = 0) -> int:
        pieces = [part for part in parts if any(self._numbers(part.meta["val"].shape[axis]))]
        if len(pieces) == 1:
            return self._forms[pieces[0]]
        return self._number((str(aten.cat.default), self._argument(pieces), axis))

    def _changes_nothing(self, node: Node, args: Any) -> bool:
        if node.target in _COPIES:
            return True
        if node.target in (aten.constant_pad_nd.default, aten.pad.default):
            return not any(any(self._numbers(amount)) for amount in args[1])
        whole = node.target is aten.slice.Tensor and (len(args) < 5 or args[4] == 1)
        to_a_size = node.target in _ADAPTIVE or (node.target in _RESIZES and args[-1] is None)
        return (whole or to_a_size or node.target in _RESHAPES) and self._sizes(args[0]) == self._sizes(node)

    def _sizes(self, node: Node) -> list[list[int | None]]:
        return [self._numbers(size) for size in node.meta["val"].shape]

    def _numbers(self, value: Any) -> list[int | None]:
        value = value.meta["val"] if isinstance(value, Node) else value
        return [_number_if_any(value, sizes) for sizes in self._trials]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            found = value.meta.get("val")
            return tuple(self._numbers(found)) if isinstance(found, torch.SymInt) else ("form", self._forms[value])
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | torch.SymInt):
            return tuple(self._numbers(value))
        if isinstance(value, list | tuple):
            return tuple(self._argument(each) for each in value)
        if isinstance(value, dict):
            return tuple((key, self._argument(each)) for key, each in sorted(value.items()))
        return str(value)

    def _number(self, key: Any) -> int:
        return self._numbered.setdefault(key, len(self._numbered))


__all__ = ["GuardedProgram", "shapes_with", "symbols_at"]
