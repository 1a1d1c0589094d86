"""What a program assumes of sizes, and whether it is right at others: by what it would do there, or by running it.

In: a program captured at the example's sizes. Out: one that is right on both sides of the conditions in the model's code, and the
conditions that are left.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node

from generic_export.compat import OpOverload, pytree, schema_of
from generic_export.torch_graph.capture.branches import GuardedProgram, symbols_at
from generic_export.torch_graph.capture.causes import refused
from generic_export.torch_graph.capture.conversion import symbol_names
from generic_export.torch_graph.capture.exported_program import CapturedProgram, DynamicShapes, capture_once
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.nested import FlatCall, resize_example
from generic_export.torch_graph.request import CaptureRequest, auto_symbols
from generic_export.torch_graph.sizes.guards import (
    SQUEEZES,
    assumptions,
    holds_at_one_alone,
    holds_for_many,
    is_largest_size,
)
from generic_export.torch_graph.sizes.proofs import Branch, Sizes
from generic_export.torch_graph.state import buffers_kept

_MOST_VALUES_ELSEWHERE = 1 << 24  # of inputs that are made to see whether another way is the same
Run = Callable[[Sequence[torch.Tensor]], Any]

_ALIKE = 1e-3
_MOST_WAYS = 4


def assumed_branches(
    request: CaptureRequest, found: CapturedProgram, names: Sequence[str], after: int = 0
) -> list[Branch]:
    """Return what is to hold, or to be shown to be right elsewhere: sizes of one are left to who checks the archive at them."""
    symbols = symbol_names(replace(request, input_names=names), found.program)
    branches = assumptions(found.program, symbols, found.decided, after)
    return branches if request.conditional else [branch for branch in branches if not holds_for_many(branch)]


def example_sizes(request: CaptureRequest, program: ExportedProgram, branch: Branch, call: FlatCall) -> Sizes:
    """Return the size of each symbol in the example.

    Raises:
        SpecializedAxisError: a symbol is not the size of an input's axis, so tract cannot check a condition on it.
    """
    sizes = symbols_at(program, [tensor.shape for tensor in call.tensors])
    if sizes is None:
        raise refused(request.module, SizeCondition(None, str(branch.condition), branch.source), "")
    return sizes


def right_elsewhere(
    request: CaptureRequest,
    found: CapturedProgram,
    branches: Sequence[Branch],
    call: FlatCall,
    shapes: DynamicShapes,
) -> tuple[CapturedProgram, Sequence[Branch]]:
    """Return a program that is right on both sides of the conditions in the model's code, and the conditions left.

    A condition that fails at 1 alone is tried there. A program that fills sizes up to a multiple is tried at whole ones,
    or taken with a warning.

    Raises:
        SpecializedAxisError: there is none, and the archive would not be held to the condition (`conditional`).
    """
    named = replace(request, input_names=call.names)
    own = GuardedProgram(found.program, tuple(filter(_is_of_model, branches)), symbol_names(named, found.program))
    at_one = [each for each in own.branches if holds_for_many(each)]
    right = _right_at_one(request, own, call)
    branches = [each for each in branches if each not in right]
    own = replace(own, branches=tuple(each for each in own.branches if each not in right))
    open_branches = [each for each in own.branches if each not in at_one and not _is_auto(request, own, each)]
    if not open_branches:
        return found, branches
    side = _other_side(request, own, call, shapes)
    if side and all(map(holds_at_one_alone, open_branches)):
        found_there, left = _beside_one(request, side, call, shapes)
        if not any(holds_for_many(each) for each in left):
            return found_there, left
    joined = side and _joined(request, found, side, own, call, shapes)
    if joined:
        return joined
    for branch in open_branches if len(own.branches) > 1 else ():
        one = own.only([branch])
        other = _other_side(request, one, call, shapes)
        joined = other and _joined(request, found, other, one, call, shapes)
        if joined:
            return right_elsewhere(request, *joined, call, shapes)
    filled = side and _filled_up(request, found, side, own, call)
    if filled:
        return filled
    if side and not request.conditional:
        _refuse_one_size(request, own, call)
    return found, branches


@dataclass(frozen=True)
class _OtherSide:
    """What was captured where conditions fail, and with which inputs."""

    captured: CapturedProgram
    way: GuardedProgram
    tensors: tuple[torch.Tensor, ...]


def _other_side(
    request: CaptureRequest, own: GuardedProgram, call: FlatCall, shapes: DynamicShapes
) -> _OtherSide | None:
    """Capture a module where the conditions of one way fail; None where there is no such side, or no memory for it."""
    return _side_at(own.shapes_of_another_way([tensor.shape for tensor in call.tensors]), request, own, call, shapes)


def _side_at(
    elsewhere: Sequence[tuple[int, ...]],
    request: CaptureRequest,
    own: GuardedProgram,
    call: FlatCall,
    shapes: DynamicShapes,
) -> _OtherSide | None:
    if sum(map(math.prod, elsewhere)) > _MOST_VALUES_ELSEWHERE:  # a condition on memory: it stays one
        return None
    tensors = tuple(map(resize_example, call.tensors, elsewhere))
    try:
        captured = capture_once(request.module, replace(call, tensors=tensors), shapes)
        way = GuardedProgram.of(
            captured.program, symbol_names(replace(request, input_names=call.names), captured.program)
        )
    except Exception:  # the model does not accept these sizes
        return None
    kept = {own.named(branch) for branch in own.kept}
    there = replace(call, tensors=tensors)
    right = _right_at_one(request, way, there)
    asked = [each for each in way.branches if each not in right]
    way = replace(way, branches=tuple(asked))
    return _OtherSide(captured, way.only([each for each in asked if way.named(each) not in kept]), tensors)


def _beside_one(
    request: CaptureRequest, side: _OtherSide, call: FlatCall, shapes: DynamicShapes
) -> tuple[CapturedProgram, Sequence[Branch]]:
    """Return the program of larger sizes where an example has sizes of one, and the conditions left: it may be right at one too."""
    branches = assumed_branches(request, side.captured, call.names)
    return right_elsewhere(request, side.captured, branches, replace(call, tensors=side.tensors), shapes)


def _joined(
    request: CaptureRequest,
    found: CapturedProgram,
    side: _OtherSide,
    own: GuardedProgram,
    call: FlatCall,
    shapes: DynamicShapes,
) -> tuple[CapturedProgram, Sequence[Branch]] | None:
    """Return the one of two programs that stands for both, and the conditions left; None where neither does."""
    kept = {own.named(branch) for branch in own.kept}
    for one, another, captured in ((own, side.way, found), (side.way, own, side.captured)):
        if not _stands_for_all(one, another, request, own, call, shapes):
            continue
        left = assumed_branches(request, captured, call.names)
        left = [branch for branch in left if not _is_of_model(branch) or one.named(branch) in kept]
        if kept <= {one.named(branch) for branch in left}:
            return captured, left
    return None


def _stands_for_all(
    one: GuardedProgram,
    another: GuardedProgram,
    request: CaptureRequest,
    own: GuardedProgram,
    call: FlatCall,
    shapes: DynamicShapes,
) -> bool:
    """Say whether a program stands for another, and for those of the sizes of neither: `if high or wide:` has three ways."""
    others = [another]
    while one.stands_for(others[-1]):
        further = one.shapes_of_a_further_way(others, [tensor.shape for tensor in call.tensors])
        if further is None:
            return True
        side = _side_at(further, request, own, call, shapes) if len(others) < _MOST_WAYS else None
        if side is None:
            return False
        others.append(side.way)
    return False


def _filled_up(
    request: CaptureRequest, found: CapturedProgram, side: _OtherSide, own: GuardedProgram, call: FlatCall
) -> tuple[CapturedProgram, Sequence[Branch]] | None:
    """Return the program that fills sizes up to a multiple where it is right for whole ones too, and the conditions left."""
    chosen = found if own.fills_up else side.captured if side.way.fills_up else None
    places = (call.tensors, side.tensors)
    if chosen is None or not _fills_up_everywhere(request, chosen.program, own.branches[0], places):
        return None
    left = assumed_branches(request, chosen, call.names)
    return chosen, [branch for branch in left if not _is_of_model(branch)]


def _is_auto(request: CaptureRequest, way: GuardedProgram, branch: Branch) -> bool:
    """Say whether a condition is on axes of `Dim.AUTO` alone, which are captured once: tract holds them to the condition."""
    names = {str(way.names.get(symbol)) for symbol in branch.condition.free_symbols}
    return names <= auto_symbols(request.dynamic_axes)


def _right_at_one(request: CaptureRequest, way: GuardedProgram, call: FlatCall) -> list[Branch]:
    """Return the conditions that fail at one size alone, of 1, and where a program says what its module says: by running both."""
    example = [tensor.shape for tensor in call.tensors]
    agreeing: dict[sympy.Basic, bool] = {}
    at_one = [branch for branch in way.branches if holds_for_many(branch)]
    for branch in at_one:
        (symbol,) = branch.condition.free_symbols
        if symbol not in agreeing:
            trials = [
                tuple(map(resize_example, call.tensors, shapes)) for shapes in way.shapes_with_one(branch, example)
            ]
            agreeing[symbol] = any(_agrees(request, way.program, tensors) for tensors in trials)
    return [branch for branch in at_one if all(agreeing[symbol] for symbol in branch.condition.free_symbols)]


def _agrees(request: CaptureRequest, program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether a program and the module say the same, by running both."""
    with buffers_kept(request.module):
        return agrees(program, lambda given: request.module(*given), tensors)


def _refuse_one_size(request: CaptureRequest, way: GuardedProgram, call: FlatCall) -> None:
    """Refuse a program that is right on one side of a condition on one size, other than up to a largest size.

    Raises:
        SpecializedAxisError: there is such a condition.
    """
    example = example_sizes(request, way.program, way.branches[0], call)
    for branch in way.branches:
        if len(branch.condition.free_symbols) == 1 and not is_largest_size(branch, example):
            raise refused(request.module, SizeCondition(None, str(way.named(branch)), branch.source), "")


def _fills_up_everywhere(
    request: CaptureRequest, program: ExportedProgram, branch: Branch, places: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Say whether a program that fills sizes up to a multiple is right for whole ones: by running it, or with a warning."""
    if request.conditional:
        return all(_agrees(request, program, place) for place in places)
    # a whole block where nothing is missing, hidden by a mask (Pegasus-X)
    warnings.warn(
        f"{type(request.module).__name__} at {branch.source}: sizes that are no multiple are filled up. "
        "The archive does so with whole ones too, which is right where what is filled in is masked: compare such a size.",
        stacklevel=2,
    )
    return True


def _is_of_model(branch: Branch) -> bool:
    """Say whether a model's own code asked, and may have gone another way."""
    return bool(branch.source) and not branch.is_certain


def agrees(program: ExportedProgram, module: Run, tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether a program says what its module says; False where they have no values."""
    if any(each.is_meta for each in (*tensors, *program.state_dict.values())):
        return False
    expected, answered = _result(module, tensors), _result(lambda given: _interpreted(program, given), tensors)
    return expected is not None and answered is not None and _alike(expected, answered)


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
    """Runs a graph; `squeeze` drops the axes whose size was fixed at 1 in the capture, and no dynamic one."""

    def run_node(self, n: Node) -> Any:
        # A part of a split that is not there at every size; placeholders without users take their arguments all the same.
        if n.op not in ("output", "placeholder") and not n.users and not _writes(n):
            return None
        if n.target not in SQUEEZES:
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


__all__ = ["assumed_branches", "example_sizes", "right_elsewhere"]
