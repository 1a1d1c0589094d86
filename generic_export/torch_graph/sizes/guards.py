"""What a capture assumed of sizes, and what becomes of each assumption.

In: a program that was captured for any size. PyTorch notes what it took for granted (`T >= 8`, since a kernel has 8 places). Out:
the conditions under which the program does what its module does.

| an assumption | becomes |
|---|---|
| proved for every size that is declared | nothing |
| holds from, or up to, some size of one symbol | the smallest or largest size: tract refuses others |
| holds at the multiples of a number alone | that multiple: tract refuses others |
| of several symbols, in words that tract has | a relation: tract refuses sizes that break it |
| anything else | no relation: the capture is refused (`tracer.py`), with the line that asked |

A condition of the model's own code is dropped if `tracer.py` shows that the program is also right where it fails. In a large
graph, a smallest size below which the module raises an error is stated, and not checked by tract.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from generic_export.compat import EXTREMA, INFINITY, SMALLER, over_sizes_of_inputs, shape_guards
from generic_export.errors import DimensionError
from generic_export.torch_graph.dims import dim_text, plain_size, whole_size
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.sizes.answers import proved
from generic_export.torch_graph.sizes.proofs import Branch, Sizes, computed, is_zero_exactly
from generic_export.torch_graph.sizes.relations import Relation
from generic_export.torch_graph.source_lines import node_source, source_of_guard

aten = torch.ops.aten

Names = Mapping[sympy.Symbol, sympy.Expr]
"""The user's symbols for PyTorch's, or what PyTorch saw of a declared multiple (`S//8`)."""

_BOUND = re.compile(r"(\w+) (>=|<=) (\d+)")
_LARGEST_TRIED, _LARGEST_SIZE = 4096, 1 << 40
SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
"""The operators that drop axes of size 1."""


@dataclass(frozen=True)
class _Span:
    """Where a condition on one symbol holds: from `least` to `most` (None: without end), at multiples of `step`."""

    least: int
    most: int | None
    step: int = 1


def assumptions(program: ExportedProgram, names: Names, decided: Sequence[Branch] = (), after: int = 0) -> list[Branch]:
    """Return what is assumed of sizes and is not proved for all of them, each once.

    Args:
        program: as captured.
        names: the user's symbols for PyTorch's; those of one name are one size.
        decided: what was decided beside PyTorch's own guards.
        after: how many of the guards that PyTorch noted to leave out.
    """
    if not names:
        return []
    first: dict[sympy.Expr, sympy.Symbol] = {}
    same = {symbol: first.setdefault(name, symbol) for symbol, name in names.items()}
    least = _declared_least(program, same)
    found: dict[sympy.Basic, Branch] = {}
    for branch in (*_noted(program, after), *decided):
        whole = over_sizes_of_inputs(program, branch.condition).xreplace(same)
        for part in _parts(whole):
            if part.free_symbols <= least.keys() and not _is_proved(part, least):
                known = found.get(part, branch)
                found[part] = Branch(part, known.source or branch.source, known.is_certain or branch.is_certain)
    return list(found.values())


def conditions_of(branch: Branch, example: Sizes, names: Names) -> list[SizeCondition]:
    """Return the conditions under which an assumption holds, as tract reads them.

    tract has no `min` or `max` of several sizes: which one it is in the example becomes a condition too. Where one of several
    conditions has to hold, it is one that holds in the example.
    """
    if isinstance(branch.condition, sympy.Or):
        chosen = next(each for each in sorted(branch.condition.args, key=str) if computed(each)(example))
        return conditions_of(replace(branch, condition=chosen), example, names)
    if len(branch.condition.free_symbols) == 1 or not branch.condition.has(*EXTREMA):
        return [_condition(branch, example, names)]
    parts = _as_in_example(branch.condition, example)
    least = dict.fromkeys(branch.condition.free_symbols, 1)
    return [_condition(replace(branch, condition=part), example, names) for part in parts if not proved(part, least)]


def _as_in_example(condition: sympy.Basic, example: Sizes) -> Iterator[sympy.Basic]:
    """Yield a condition with that of several sizes that is the smaller or larger one in the example, and that it is."""
    while found := [each for each in condition.atoms(*EXTREMA) if not any(arg.has(*EXTREMA) for arg in each.args)]:
        extremum = min(found, key=str)
        value = computed(extremum)(example)
        chosen = next(arg for arg in extremum.args if computed(arg)(example) == value)
        is_smaller = isinstance(extremum, SMALLER)
        others = [arg for arg in extremum.args if arg is not chosen]
        yield from (sympy.Le(chosen, other) if is_smaller else sympy.Ge(chosen, other) for other in others)
        condition = condition.xreplace({extremum: chosen})
    yield condition


def _condition(branch: Branch, example: Sizes, names: Names) -> SizeCondition:
    text = str(branch.condition.xreplace(dict(names)))
    if not branch.holds(example):  # an axis of one position that is dropped, and may be longer
        return SizeCondition(None, text, branch.source)
    span = _span(branch, example)
    is_frozen = span is not None and (span.least > 1 or span.most == 1) and span.most is not None
    is_equality = isinstance(branch.condition, sympy.Eq)
    if span is None or (is_frozen and not is_equality):
        return SizeCondition(_relation(branch, example, names), text, branch.source)
    relation = None if is_frozen else _relation_of_span(span, branch, names)
    # What kernels ask for, and the ends of tables, are in the ranges of symbols, which the document states.
    is_bound = span.step == 1 and (span.most is not None or not is_equality)
    is_nothing = span == _Span(1, None)  # what holds wherever there is something at all
    return SizeCondition(relation, text, branch.source, stated=is_bound and (is_nothing or not branch.source))


def bounds_of(conditions: Sequence[SizeCondition]) -> dict[str, tuple[int, int | None]]:
    """Return the smallest and the largest size of each symbol, as far as conditions say no more than that."""
    said = [_BOUND.fullmatch(condition.relation or "") for condition in conditions]
    found: dict[str, tuple[int, int | None]] = {}
    for symbol, kind, text in (match.groups() for match in said if match is not None):
        least, most = found.get(symbol, (0, None))
        number = int(text)
        found[symbol] = (
            (max(least, number), most) if kind == ">=" else (least, number if most is None else min(most, number))
        )
    return found


def larger_sizes(conditions: Sequence[SizeCondition]) -> dict[sympy.Symbol, sympy.Expr]:
    """Return what symbols are never smaller than, where conditions say so: U of T for `T - U >= 0`."""
    relations = [Relation.parse(condition.relation) for condition in conditions if condition.relation is not None]
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for symbol, least in filter(None, (relation.larger for relation in relations)):
        # One is said of the other, and never the other of a third: all are put in at once.
        if found.keys().isdisjoint(least.free_symbols) and not any(each.has(symbol) for each in found.values()):
            found.setdefault(symbol, least)
    return found


def without_weaker(conditions: Sequence[SizeCondition]) -> list[SizeCondition]:
    """Return conditions without smallest and largest sizes that others imply, and each relation once.

    Each relation that tract is to check makes it slower to load (`W >= 3`, `W >= 7`, ... of a chain of convolutions).
    """
    bounds = bounds_of(conditions)
    told: dict[str | None, SizeCondition] = {}
    for condition in conditions:  # of those with one relation, one that has a line
        bound = _BOUND.fullmatch(condition.relation or "")
        if bound is not None and int(bound[3]) != bounds[bound[1]][bound[2] == "<="]:
            continue
        if condition.relation not in told or not told[condition.relation].source:
            told[condition.relation] = condition
    return list(told.values())


def least_size(condition: SizeCondition) -> tuple[str, int] | None:
    """Return the symbol and the number of a smallest size; None for any other condition."""
    bound = _BOUND.fullmatch(condition.relation or "")
    return (bound[1], int(bound[3])) if bound is not None and bound[2] == ">=" else None


# --- what is assumed ---


def _noted(program: ExportedProgram, after: int) -> Iterator[Branch]:
    for guard in shape_guards(program)[after:]:
        yield Branch(guard.expr, source_of_guard(guard.sloc.framework_loc))
    for node in program.graph.nodes:
        if node.target in SQUEEZES:
            yield from _squeezed(node)


def _squeezed(node: Node) -> Iterator[Branch]:
    """Yield that axes of a size that may be one, and would be dropped then, are not."""
    given: Any = node.args
    shape = given[0].meta["val"].shape
    chosen = given[1] if len(given) > 1 else range(len(shape))
    for axis in [chosen] if isinstance(chosen, int) else chosen:
        if isinstance(shape[axis], torch.SymInt):
            yield Branch(sympy.Ge(shape[axis].node.expr, 2), node_source(node), is_certain=True)


def _declared_least(program: ExportedProgram, same: Mapping[sympy.Symbol, sympy.Symbol]) -> dict[sympy.Symbol, int]:
    """Return the smallest size of each symbol, as far as it was declared."""
    ranges = program.range_constraints
    found = {symbol: ranges.get(symbol) for symbol in same}
    lower = {symbol: int(each.lower) for symbol, each in found.items() if each is not None and each.lower.is_Integer}
    return {symbol: lower.get(symbol, 0) for symbol in same}


def _parts(condition: sympy.Basic) -> Iterator[sympy.Basic]:
    """Yield the comparisons that all have to hold, without factors that both sides have."""
    if isinstance(condition, sympy.And):
        for each in condition.args:
            yield from _parts(each)
    elif isinstance(condition, sympy.core.relational.Relational):
        if getattr(condition, "gts", None) != INFINITY:  # `M <= int_oo`, which PyTorch writes of ranges without end
            yield _without_common_factors(condition)
    elif condition != sympy.true:
        yield condition


def _without_common_factors(condition: Any) -> sympy.Basic:
    sides = [sympy.Mul.make_args(sympy.factor_terms(side)) for side in (condition.lhs, condition.rhs) if side != 0]
    factors = [each for each in sides[0] if each.is_Symbol and all(each in side for side in sides)]
    numbers = [int(each) for side in sides for each in side if each.is_Integer]
    if len(numbers) == len(sides) and (common := math.gcd(*numbers)) > 1:
        factors.append(sympy.Integer(common))
    if not factors:
        return condition
    product = sympy.Mul(*factors)
    return type(condition)(*(sympy.expand(sympy.expand(side) / product) for side in (condition.lhs, condition.rhs)))


def _is_proved(part: sympy.Basic, least: Mapping[sympy.Symbol, int]) -> bool:
    """Say whether a comparison holds at every declared size, where there is something at all."""
    if isinstance(part, sympy.Eq) and is_zero_exactly(part.lhs - part.rhs):
        return True
    return part == sympy.true or proved(part, {symbol: max(1, least[symbol]) for symbol in part.free_symbols})


# --- where an assumption on one symbol holds ---


def _span(branch: Branch, example: Sizes) -> _Span | None:
    """Return the sizes at which a condition on one symbol holds, those of the example among them; None where they are no span."""
    if len(branch.condition.free_symbols) != 1:
        return None
    (symbol,) = branch.condition.free_symbols
    holds = _holds(branch.condition, symbol)
    given = example[symbol]
    if not holds(given):
        return None
    last = max(_LARGEST_TRIED, 2 * given)
    least = next((size + 1 for size in range(given, 0, -1) if not holds(size)), 1)
    most = next((size - 1 for size in range(given, last + 1) if not holds(size)), None)
    if most is None:
        return _Span(least, None if proved(branch.condition, {symbol: least}) else _last_size(holds, last))
    span = _Span(least, most)
    is_frozen = least > 1 and isinstance(branch.condition, sympy.Eq)
    return _multiples(branch.condition, symbol, holds, last) or span if is_frozen else span


def _last_size(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the last size at which a condition holds (2**29 // 400 for `400*b <= 2**29`), or None for one that no tensor has."""
    beyond = _LARGEST_SIZE
    if holds(beyond):
        return None
    while beyond - most > 1:
        between = (most + beyond) // 2
        most, beyond = (between, beyond) if holds(between) else (most, between)
    return most


def holds_for_many(branch: Branch) -> bool:
    """Say whether an assumption on one symbol holds for every size from 2 on."""
    symbols = sorted(branch.condition.free_symbols, key=str)
    if len(symbols) != 1:
        return False
    holds = _holds(branch.condition, symbols[0])
    return all(map(holds, range(2, _LARGEST_TRIED)))


def holds_at_one_alone(branch: Branch) -> bool:
    """Say whether an assumption on one symbol holds for a size of 1, and for no larger one."""
    symbols = sorted(branch.condition.free_symbols, key=str)
    if len(symbols) != 1:
        return False
    holds = _holds(branch.condition, symbols[0])
    return holds(1) and not any(map(holds, range(2, _LARGEST_TRIED)))


def is_largest_size(branch: Branch, example: Sizes) -> bool:
    """Say whether an assumption on one symbol holds up to some size, that of the example among them, and no further."""
    span = _span(branch, example)
    return span is not None and span.least == 1 and span.most is not None and span.most > 1


def _holds(condition: sympy.Basic, symbol: sympy.Symbol) -> Callable[[int], bool]:
    at = computed(condition)

    def holds(size: int) -> bool:
        try:
            return bool(at({symbol: size}))
        except ZeroDivisionError:
            return False

    return holds


def _multiples(condition: sympy.Basic, symbol: sympy.Symbol, holds: Callable[[int], bool], last: int) -> _Span | None:
    """Return that a condition holds at the multiples of a number, where that is proved: every other multiple, or one of more."""
    found = [size for size in range(1, last + 1) if holds(size)]
    steps = {later - earlier for earlier, later in itertools.pairwise(found)}
    if len(steps) != 1 or found[0] not in steps:
        return None
    count = sympy.Dummy("count", integer=True, positive=True)
    if not proved(condition.subs(symbol, found[0] * count), {count: 1}):
        return None
    return _Span(1, None, found[0])


def _relation_of_span(span: _Span, branch: Branch, names: Names) -> str:
    (symbol,) = branch.condition.free_symbols
    whole, factor = whole_size(names[symbol])
    if span.step > 1:
        step = span.step * factor
        return f"{whole} - {step}*({whole}/{step}) == 0"
    return f"{whole} >= {span.least * factor}" if span.most is None else f"{whole} <= {(span.most + 1) * factor - 1}"


# --- several symbols ---


def _relation(branch: Branch, example: Sizes, names: Names) -> str | None:
    """Return a condition as tract reads it; one that two sizes differ is said of the side that the example is on."""
    condition = branch.condition
    if not isinstance(condition, sympy.core.relational.Relational):
        return None
    kind, difference = type(condition), sympy.expand(condition.lhs - condition.rhs)
    if kind in (sympy.Lt, sympy.Le):
        kind, difference = {sympy.Lt: sympy.Gt, sympy.Le: sympy.Ge}[kind], -difference
    if kind is sympy.Ne:
        above = int(computed(difference)(example)) > 0
        kind, difference = sympy.Gt, difference if above else -difference
    if difference.has(*EXTREMA):  # tract dies of them in an assertion
        return None
    try:
        plain = plain_size(sympy.expand(difference.xreplace(dict(names))))
        if kind is sympy.Eq:
            return f"{dim_text(plain)} == 0"
        constant, rest = plain.as_coeff_Add()
        constant -= 1 if kind is sympy.Gt else 0
        is_falling = all(term.as_coeff_Mul()[0] < 0 for term in sympy.Add.make_args(rest))
        return f"{dim_text(-rest)} <= {constant}" if is_falling else f"{dim_text(rest)} >= {-constant}"
    except DimensionError:
        return None


__all__ = [
    "SQUEEZES",
    "Names",
    "assumptions",
    "bounds_of",
    "conditions_of",
    "holds_at_one_alone",
    "holds_for_many",
    "is_largest_size",
    "larger_sizes",
    "least_size",
    "without_weaker",
]
