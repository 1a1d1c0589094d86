"""The sizes at which a captured program does what its module does, where those are not all sizes.

In: a program, and its module with an example. Out: the conditions on sizes under which PyTorch captured it that matter. One does
where both are run at sizes at which it fails, and the module says something else, or refuses them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node

from generic_export.compat import (
    EXTREMA,
    OpOverload,
    pytree,
    questions_seen,
    schema_of,
    shape_guards,
    slice_ends_decided,
)
from generic_export.errors import DimensionError
from generic_export.torch_graph.branches import (
    Branch,
    Sizes,
    input_shapes,
    source_in_model,
    source_of_guard,
    symbols_at,
    trials_of,
)
from generic_export.torch_graph.dims import dim_text, plain_size, whole_size
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.naming import node_source
from generic_export.torch_graph.other_sizes import repeated
from generic_export.torch_graph.size_proofs import computed

aten = torch.ops.aten

Run = Callable[[Sequence[torch.Tensor]], Any]

_MOST_RUNS = 6
_NEAR = 13
_FARTHEST = 2048
_MOST_VALUES, _TIMES = 1 << 16, 4  # of the inputs, and as many times those of the example: both are run
_ALIKE = 1e-3
_MINIMUM = re.compile(r"(\w+) >= (\d+)")
_PYTHON_OF_SIZES = ("torch/__init__.py", "torch/fx/experimental/", "generic_export/compat.py", "unittest/mock.py")
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


@contextmanager
def questions_of_one() -> Iterator[list[Branch]]:
    """Note what a model's code asks of sizes, and would be told otherwise of a size of one: PyTorch takes each for two or more."""
    asked: list[Branch] = []

    def note(question: Any, answer: bool) -> None:
        if not isinstance(question, sympy.core.relational.Relational) or not question.free_symbols:
            return
        condition = question if answer else sympy.Not(question)
        if isinstance(condition, sympy.core.relational.Relational) and _fails_at_one(condition):
            source = _asking_line()
            if source:
                asked.append(Branch(condition, source))

    with questions_seen(note):
        yield asked


@contextmanager
def slices_decided() -> Iterator[list[Branch]]:
    """Note from which end slices count whose ends are sizes."""
    decided: list[Branch] = []
    with slice_ends_decided(lambda condition: decided.append(Branch(condition, _asking_line()))):
        yield decided


def _fails_at_one(condition: sympy.Basic) -> bool:
    holds = computed(condition)
    try:
        far = {symbol: 101 + 7 * place for place, symbol in enumerate(sorted(condition.free_symbols, key=str))}
        return holds(far) and not all(holds({**far, symbol: 1}) for symbol in far)
    except (NameError, TypeError, ZeroDivisionError):
        return False


def _asking_line() -> str:
    """Return file and line of the model that asks; "" where PyTorch asks for reasons of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__ or any(part in frame.f_code.co_filename for part in _PYTHON_OF_SIZES)
    ):
        frame = frame.f_back
    return source_in_model(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def needed_conditions(
    program: ExportedProgram,
    module: Run,
    tensors: Sequence[torch.Tensor],
    asked: Sequence[Branch],
    names: Mapping[sympy.Symbol, sympy.Expr],
    certain: Sequence[Branch] = (),
) -> tuple[SizeCondition, ...]:
    """Return the conditions on sizes that a program needs to say what its module says.

    Args:
        program: as captured.
        module: takes flat tensors.
        tensors: the example; where they or the module have no values, what the model's own code asked for is needed.
        asked: what `questions_of_one` noted.
        names: the user's symbols for PyTorch's.
        certain: conditions that the graph needs whatever it says elsewhere.
    """
    example = symbols_at(program, [tensor.shape for tensor in tensors])
    suspects = _suspects(program, asked)
    if example is None or not (suspects or certain):
        return ()
    most = max(_MOST_VALUES, _TIMES * sum(tensor.numel() for tensor in tensors))
    candidates = list(_candidates(program, example))
    places: dict[tuple[tuple[str, int], ...], list[Branch]] = {}
    for branch in suspects:
        if not _holds(branch, example):
            continue
        found = (sizes for sizes in (*_own_candidates(branch, example), *candidates) if _fails(branch, sizes))
        for sizes in _first_and_last([sizes for sizes in found if _values(program, sizes) <= most]):
            places.setdefault(tuple(sorted((str(s), n) for s, n in sizes.items())), []).append(branch)
    by_name = {str(symbol): symbol for symbol in example}
    without_values = any(each.is_meta for each in (*tensors, *program.state_dict.values()))
    ranked = sorted(places.items(), key=lambda place: not any(branch.source for branch in place[1]))
    bounds = {bound.condition for bound in _bounds(program)}
    needed = {branch.condition: branch for branch in certain if branch.condition.free_symbols <= example.keys()}
    for place, branches in ranked[:_MOST_RUNS]:
        sizes = {by_name[name]: number for name, number in place}
        same = None if without_values else _says_the_same(program, module, tensors, sizes)
        if without_values or same is False:
            own = [branch for branch in branches if branch.source]
            needed |= {branch.condition: branch for branch in own or ([] if without_values else branches)}
        elif same is None:  # the module refuses these sizes, and the engine may not know
            least = [branch for branch in branches if branch.condition in bounds or _is_minimum(branch, example, names)]
            needed |= {branch.condition: branch for branch in least}
    return tuple(_described(branch, example, names, bounds) for branch in needed.values())


def agrees(program: ExportedProgram, module: Run, tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether a program says what its module says; False where they have no values."""
    if any(each.is_meta for each in (*tensors, *program.state_dict.values())):
        return False
    expected, answered = _result(module, tensors), _result(lambda given: _interpreted(program, given), tensors)
    return expected is not None and answered is not None and _alike(expected, answered)


def minima(conditions: Sequence[SizeCondition]) -> dict[str, int]:
    """Return the smallest size of each symbol, as far as conditions say no more than that."""
    said = [_MINIMUM.fullmatch(condition.relation or "") for condition in conditions]
    found: dict[str, int] = {}
    for symbol, least in (match.groups() for match in said if match is not None):
        found[symbol] = max(int(least), found.get(symbol, 0))
    return found


# --- which conditions may matter ---


def _suspects(program: ExportedProgram, asked: Sequence[Branch]) -> list[Branch]:
    """Return conditions that may fail at some size: bounds, guards, what was asked of one, and axes that are one to be dropped."""
    symbols = set(program.range_constraints)
    guards = [
        Branch(guard.expr, source_of_guard(guard.sloc.framework_loc))
        for guard in shape_guards(program)
        if isinstance(guard.expr, sympy.Rel)
    ]
    squeezed = [branch for node in program.graph.nodes if node.target in _SQUEEZES for branch in _squeezed(node)]
    every = {branch.condition: branch for branch in (*_bounds(program), *guards, *squeezed, *asked)}
    return [branch for branch in every.values() if branch.condition.free_symbols <= symbols]


def _bounds(program: ExportedProgram) -> Iterator[Branch]:
    """Yield the bounds of symbols; PyTorch takes every size for two or more, of which `questions_of_one` knows what matters."""
    for symbol, found in program.range_constraints.items():
        if found.lower.is_Integer and found.lower > 2:
            yield Branch(sympy.Ge(symbol, found.lower), "")
        if found.upper.is_Integer:
            yield Branch(sympy.Le(symbol, found.upper), "")


def _squeezed(node: Node) -> Iterator[Branch]:
    given: Any = node.args
    shape = given[0].meta["val"].shape
    chosen = given[1] if len(given) > 1 else range(len(shape))
    for axis in [chosen] if isinstance(chosen, int) else chosen:
        if isinstance(shape[axis], torch.SymInt):
            yield Branch(sympy.Ge(shape[axis].node.expr, 2), node_source(node) or "squeeze")


# --- where they fail ---


def _candidates(program: ExportedProgram, example: Sizes) -> Iterator[Sizes]:
    """Yield sizes near the example's, one symbol at a time from 1 on, then all at once."""
    ranges = program.range_constraints
    for symbol in example:
        yield from ({**example, symbol: size} for size in range(1, example[symbol] + _NEAR) if size in ranges[symbol])
    yield from trials_of(program)


def _own_candidates(branch: Branch, example: Sizes) -> Iterator[Sizes]:
    """Yield sizes beside the numbers in a condition."""
    numbers = {int(number) for number in branch.condition.atoms(sympy.Integer) if 0 < number < 1 << 24}
    for symbol in sorted(branch.condition.free_symbols, key=str):
        yield from (
            {**example, symbol: number + step} for number in sorted(numbers) for step in (0, 1, -1) if number + step > 0
        )


def _first_and_last(found: Sequence[Sizes]) -> list[Sizes]:
    return [found[0], found[-1]] if len(found) > 1 else list(found)


def _values(program: ExportedProgram, sizes: Sizes) -> int:
    return sum(math.prod(shape) for shape in input_shapes(program, sizes))


def _holds(branch: Branch, sizes: Sizes) -> bool:
    try:
        return branch.holds(sizes)
    except (NameError, TypeError, ZeroDivisionError, KeyError):
        return False


def _fails(branch: Branch, sizes: Sizes) -> bool:
    try:
        return not branch.holds(sizes)
    except (NameError, TypeError, ZeroDivisionError, KeyError):
        return False


# --- what happens there ---


def _says_the_same(program: ExportedProgram, module: Run, example: Sequence[torch.Tensor], sizes: Sizes) -> bool | None:
    """Say whether module and program agree at some sizes; None where both refuse them."""
    tensors = tuple(map(repeated, example, input_shapes(program, sizes)))
    expected, answered = _result(module, tensors), _result(lambda given: _interpreted(program, given), tensors)
    if expected is None or answered is None:
        return None if expected is answered else False
    return _alike(expected, answered)


def _result(run: Run, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    try:
        with torch.no_grad():
            found = pytree.tree_leaves(run([tensor.clone() for tensor in tensors]))
    except Exception:  # whatever a module says to sizes that it does not take
        return None
    return [each for each in found if isinstance(each, torch.Tensor)]


def _interpreted(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> Any:
    given = iter(tensors)
    kept = {**program.constants, **program.state_dict}
    values = [
        next(given) if spec.kind is InputKind.USER_INPUT else kept[spec.target or ""]
        for spec in program.graph_signature.input_specs
    ]
    outputs = _AsCaptured(program.graph_module).run(*values)
    own = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"}
    specs = program.graph_signature.output_specs
    return [value for value, spec in zip(outputs, specs, strict=True) if spec.arg.name in own]


class _AsCaptured(Interpreter):
    """Runs a graph with the axes dropped that were one when it was captured, whatever a dynamic one is now."""

    def run_node(self, n: Node) -> Any:
        if n.op != "output" and not n.users and not _writes(n):  # a part of a split that is not there at every size
            return None
        if n.target not in _SQUEEZES:
            return super().run_node(n)
        (given, *_), _ = self.fetch_args_kwargs_from_env(n)
        source: Any = n.args[0]
        axes = _dropped(n, [size == 1 and not isinstance(size, torch.SymInt) for size in source.meta["val"].shape])
        return given.squeeze(axes)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _dropped(node: Node, fixed: Sequence[bool]) -> tuple[int, ...]:
    chosen: Any = node.args[1] if len(node.args) > 1 else range(len(fixed))
    axes = [chosen] if isinstance(chosen, int) else chosen
    return tuple(axis for axis in axes if fixed[axis])


def _alike(expected: Sequence[torch.Tensor], answered: Sequence[torch.Tensor]) -> bool:
    return len(expected) == len(answered) and all(map(_near, expected, answered))


def _near(expected: torch.Tensor, answered: torch.Tensor) -> bool:
    if expected.shape != answered.shape or expected.dtype is not answered.dtype:
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return bool(torch.equal(expected, answered))
    scale = max(1.0, float(expected.abs().nan_to_num().max())) if expected.numel() else 1.0
    return torch.allclose(expected, answered, rtol=0.0, atol=_ALIKE * scale, equal_nan=True)


# --- how they are told ---


def _described(
    branch: Branch, example: Sizes, names: Mapping[sympy.Symbol, sympy.Expr], bounds: Collection[sympy.Basic]
) -> SizeCondition:
    condition = branch.condition.xreplace(dict(names))
    try:
        relation = _relation(branch.condition, example, names)
    except DimensionError:
        relation = None
    relation = relation or _from_some_size_on(branch, example, names)
    return SizeCondition(relation, str(condition), branch.source, branch.condition in bounds)


def _is_minimum(branch: Branch, example: Sizes, names: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Say whether sizes are equal from some size on, as `min(S, 4)` and 4 are: with that known, the engine loads what needs it."""
    extrema = branch.condition.has(*EXTREMA)
    return isinstance(branch.condition, sympy.Eq) and extrema and _from_some_size_on(branch, example, names) is not None


def _from_some_size_on(branch: Branch, example: Sizes, names: Mapping[sympy.Symbol, sympy.Expr]) -> str | None:
    """Return the smallest size from which on a condition holds; None where it fails above the example too, or by another symbol."""
    deciding = [symbol for symbol in branch.condition.free_symbols if _fails(branch, {**example, symbol: 1})]
    if len(deciding) != 1:
        return None
    (symbol,) = deciding
    if any(_fails(branch, {**example, other: 7 * example[other] + 1}) for other in branch.condition.free_symbols):
        return None
    least = next((size + 1 for size in range(_FARTHEST, 0, -1) if _fails(branch, {**example, symbol: size})), 1)
    whole, factor = whole_size(names[symbol])
    return f"{whole} >= {least * factor}" if least <= example[symbol] else None


def _relation(condition: Any, example: Sizes, names: Mapping[sympy.Symbol, sympy.Expr]) -> str | None:
    """Return a condition as tract reads it; one that two sizes differ is said of the side that the example is on.

    Raises:
        DimensionError: a size in it has no form in tract's language.
    """
    kind, difference = type(condition), sympy.expand(condition.lhs - condition.rhs)
    if kind in (sympy.Lt, sympy.Le):
        kind, difference = {sympy.Lt: sympy.Gt, sympy.Le: sympy.Ge}[kind], -difference
    if kind is sympy.Ne:
        above = int(computed(difference)(example)) > 0
        kind, difference = sympy.Gt, difference if above else -difference
    if difference.has(*EXTREMA):  # tract dies of them in an assertion
        return None
    difference = plain_size(sympy.expand(difference.xreplace(dict(names))))
    if kind is sympy.Eq:
        return f"{dim_text(difference)} == 0"
    if kind is sympy.Gt:
        kind, difference = sympy.Ge, sympy.expand(difference - 1)
    if kind is not sympy.Ge:
        return None
    constant, rest = difference.as_coeff_Add()
    whole, factor = whole_size(rest)
    if whole.is_Symbol:
        return f"{whole} >= {-constant * factor}"
    whole, factor = whole_size(-rest)
    if whole.is_Symbol:
        return f"{whole} <= {constant * factor + factor - 1}"
    return f"{dim_text(difference)} >= 0"


__all__ = ["agrees", "minima", "needed_conditions", "questions_of_one", "slices_decided"]
