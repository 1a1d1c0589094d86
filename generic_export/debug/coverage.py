"""Which operators of a module have an NNEF form: translated, decomposed into others that are, or missing.

In: a module, captured as an export captures it, or operators that were seen while a module ran. Out: an `OperatorCoverage` per
operator, with counts and the place of its first use. Nothing is written, and no weight is read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import generic_export.ops  # noqa: F401 - registers every translation
from generic_export.capture import ModuleCall, capture_with_fallback, evaluation_mode, prepared_module
from generic_export.compat import COMPOSITE, HigherOrderOperator, OpOverload
from generic_export.errors import T2NError
from generic_export.inference_target.base import InferenceTarget
from generic_export.torch_graph.capture.conversion import Conversion
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.decompose.decomposition import SCALAR_TYPES, decomposed, is_annotation
from generic_export.torch_graph.decompose.patches import capture_patches
from generic_export.torch_graph.decompose.rewrites import REWRITES
from generic_export.torch_graph.fusion import STANDARD_FUSIONS, Fusion, apply_fusions
from generic_export.torch_graph.naming import module_frame
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.source_lines import source_in_trace
from generic_export.translate.registry import is_translated
from generic_export.translate.translate import refusals

# Calls that take graphs: regions whose operators count as the module's own, and those that the conversion knows.
_REGIONS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
_KNOWN_LOOPS = frozenset({"cond", "scan"})
# Marks what a decomposition puts in the place of an operator; PyTorch hands `custom` on to such nodes.
_ORIGIN = "t2n_operator"


class Support(enum.Enum):
    """Whether an operator can be written."""

    SUPPORTED = "supported"
    DECOMPOSED = "decomposed"
    MISSING = "missing"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class OperatorUse:
    """One call of an operator.

    Attributes:
        operator: `aten.linear.default`, or the name of a call that takes graphs (`scan`).
        overload: the same as PyTorch's object; None for a call that takes graphs.
        module_path: the module whose forward calls it, "" for the root.
        module_type: its class.
        source: `file.py:line` in the model's code, or "".
    """

    operator: str
    overload: OpOverload | None
    module_path: str
    module_type: str
    source: str


@dataclass(frozen=True)
class OperatorCoverage:
    """What is known of all calls of one operator.

    Attributes:
        operator: `aten.linear.default`.
        support: whether all its calls can be written.
        count: calls.
        becomes: for a decomposed one, the operators in its place.
        refused: calls that cannot be written.
        module_path, module_type, source: its first call; of a missing one, the first that cannot be written.
        reason: why it is missing, or "".
    """

    operator: str
    support: Support
    count: int
    becomes: tuple[str, ...] = ()
    refused: int = 0
    module_path: str = ""
    module_type: str = ""
    source: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ModuleCoverage:
    """The operators of one module.

    Attributes:
        operators: in the order of their first use.
        problems: what keeps the whole from being translated although it was captured, one line each.
        detour: how it was captured when torch.export refused it, as a sentence, or "".
    """

    operators: tuple[OperatorCoverage, ...]
    problems: tuple[str, ...] = ()
    detour: str = ""

    @property
    def complete(self) -> bool:
        """Whether every operator can be written."""
        return not self.problems and all(row.support is not Support.MISSING for row in self.operators)


Weigh = Callable[[str], int]
"""Path of a module -> how many modules of the real model it stands for."""


def _once(_: str) -> int:
    return 1


def module_coverage(
    model: nn.Module,
    args: tuple[Any, ...],
    target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    auto_harden_jit: bool = True,
    fusions: Sequence[Fusion] = (),
) -> ModuleCoverage:
    """Say which operators of a module can be written, captured as `export_model_to_nnef` captures it.

    Args:
        model, args, target, input_names, kwargs, auto_harden_jit: see `export_model_to_nnef`.
        fusions: recognisers beside the standard ones.

    Raises:
        CaptureError, OptionError: as an export.
    """
    keywords = dict(kwargs or {})
    prepared = prepared_module(model, args, keywords, target, auto_harden_jit=auto_harden_jit)
    with evaluation_mode(model), prepared as plain:
        return covered(ModuleCall(plain, args, keywords, input_names), target, fusions)


def covered(
    call: ModuleCall,
    target: InferenceTarget,
    fusions: Sequence[Fusion] = (),
    weigh: Weigh = _once,
    *,
    torchscript: bool = True,
) -> ModuleCoverage:
    """Say the same of a module without scripts in it; the arguments are those of `capture_with_fallback` and `captured_coverage`.

    Raises:
        CaptureError, OptionError: see `capture_with_fallback`.
    """
    read = partial(captured_coverage, fusions=fusions, weigh=weigh)
    found, _, detour = capture_with_fallback(call, target, read, torchscript=torchscript)
    return replace(found, detour=detour)


def captured_coverage(
    tracer: TorchModuleTracer, fusions: Sequence[Fusion] = (), weigh: Weigh = _once
) -> ModuleCoverage:
    """Capture a module and say which of its operators can be written.

    Args:
        tracer: of the module; its `keep` is not used.
        fusions: recognisers beside the standard ones.
        weigh: how often the calls of a module count, by its path.

    Raises:
        CaptureError: torch.export cannot capture the module.
    """
    if tracer.input_names is None:
        names = FlatCall.of(tracer.module, tracer.args, tracer.kwargs).names
        tracer = replace(tracer, input_names=names)
    program = tracer.program()
    uses = list(program_uses(program, tracer.strip_prefix))
    origins = _decompose(program)
    with capture_patches():
        program = decomposed(program, is_translated)
    places = _operators_by_origin(program, origins)
    table = _Table(weigh)
    for use in uses:
        table.add(use, places.get(use.operator, ()))
    try:
        graph = apply_fusions(Conversion(tracer, program).graph(), (*STANDARD_FUSIONS, *fusions))
        for op, error in refusals(graph):
            use = OperatorUse(str(op.target), op.target, op.module_path, op.module_type, op.source)
            table.refuse(use, error.message)
    except T2NError as error:
        table.refuse_unknown()
        return ModuleCoverage(table.rows(), (error.message,))
    return ModuleCoverage(table.rows())


def seen_coverage(uses: Iterable[OperatorUse], weigh: Weigh = _once) -> ModuleCoverage:
    """Say which operators can be written, of those that were seen while a module ran in PyTorch.

    Each is judged by its name alone: the shapes and arguments of its calls are not.
    """
    table = _Table(weigh)
    for use in uses:
        table.add(use, ())
    table.refuse_unknown()
    return ModuleCoverage(table.rows())


def merged(parts: Iterable[ModuleCoverage]) -> ModuleCoverage:
    """Return the coverage of several modules as one: counts are summed, the first use is that of the first part."""
    rows: dict[str, OperatorCoverage] = {}
    problems: dict[str, None] = {}
    for part in parts:
        problems |= dict.fromkeys(part.problems)
        for row in part.operators:
            known = rows.get(row.operator)
            rows[row.operator] = row if known is None else _joined(known, row)
    return ModuleCoverage(tuple(rows.values()), tuple(problems))


def _joined(left: OperatorCoverage, right: OperatorCoverage) -> OperatorCoverage:
    worse = right if right.support is Support.MISSING and left.support is not Support.MISSING else left
    return replace(
        worse,
        count=left.count + right.count,
        refused=left.refused + right.refused,
        becomes=tuple(dict.fromkeys((*left.becomes, *right.becomes))),
    )


# --- what a captured program calls ----------------------------------------------------------------


def program_uses(program: ExportedProgram, strip_prefix: str = "") -> Iterator[OperatorUse]:
    """Yield every operator call of a program and of the graphs in it, in order; arithmetic on sizes is none.

    Args:
        program: just exported.
        strip_prefix: leading path removed from module paths.
    """
    for node in _calls(program):
        path, kind = module_frame(node, strip_prefix)
        source = source_in_trace(node.meta.get("stack_trace") or "")
        overload = node.target if isinstance(node.target, OpOverload) else None
        yield OperatorUse(str(node.target), overload, path, kind, source)


def _calls(program: ExportedProgram) -> Iterator[Node]:
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if _is_call(node))


def _is_call(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return not isinstance(node.meta.get("val"), SCALAR_TYPES) and not is_annotation(node.target)
    return isinstance(node.target, HigherOrderOperator) and str(node.target) not in _REGIONS


def _decompose(program: ExportedProgram) -> frozenset[str]:
    """Mark every call that cannot stay; returns the names of their operators."""
    marked = set()
    for node in _calls(program):
        if isinstance(node.target, OpOverload) and not is_translated(node.target):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _ORIGIN: str(node.target)}
            marked.add(str(node.target))
    return frozenset(marked)


def _operators_by_origin(program: ExportedProgram, origins: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each marked operator, what stands in its place now."""
    found: dict[str, dict[str, None]] = {origin: {} for origin in origins}
    for node in _calls(program):
        origin = (node.meta.get("custom") or {}).get(_ORIGIN)
        if origin in found:
            found[origin][str(node.target)] = None
    return {origin: tuple(names) for origin, names in found.items()}


# --- the table ------------------------------------------------------------------------------------


@dataclass
class _Row:
    """One operator while its calls are counted."""

    first: OperatorUse
    becomes: tuple[str, ...]
    count: int = 0
    refused: int = 0
    refusal: OperatorUse | None = None
    reason: str = ""


class _Table:
    """Counts calls by operator, and what is refused of them."""

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh
        self._rows: dict[str, _Row] = {}

    def add(self, use: OperatorUse, becomes: Sequence[str]) -> None:
        row = self._rows.setdefault(use.operator, _Row(use, tuple(name for name in becomes if name != use.operator)))
        row.count += self._weigh(use.module_path)

    def refuse(self, use: OperatorUse, reason: str) -> None:
        """Note a call that cannot be written; one that a decomposition or a fusion made counts for where it came from."""
        row = self._rows.get(use.operator) or self._row_that_becomes(use.operator)
        if row is None:
            self.add(use, ())
            row = self._rows[use.operator]
        row.refused = min(row.refused + self._weigh(use.module_path), row.count)
        if row.refusal is None:
            row.refusal, row.reason = use, reason

    def refuse_unknown(self) -> None:
        """Note, by its name alone, each operator that nothing is known for."""
        for row in self._rows.values():
            unknown = [name for name in row.becomes if not _is_known(name)] if row.becomes else []
            if unknown or (not row.becomes and not _has_form(row.first)):
                what = f" ({', '.join(unknown)})" if unknown else ""
                row.refused, row.refusal, row.reason = row.count, row.first, f"no NNEF form is registered{what}"

    def _row_that_becomes(self, operator: str) -> _Row | None:
        return next((row for row in self._rows.values() if operator in row.becomes), None)

    def rows(self) -> tuple[OperatorCoverage, ...]:
        return tuple(_finished(name, row) for name, row in self._rows.items())


def _finished(name: str, row: _Row) -> OperatorCoverage:
    place = row.refusal or row.first
    if row.refused:
        support = Support.MISSING
    elif row.first.overload is None or is_translated(row.first.overload):
        support = Support.SUPPORTED
    else:
        support = Support.DECOMPOSED
    becomes = row.becomes if support is Support.DECOMPOSED else ()
    return OperatorCoverage(
        name, support, row.count, becomes, row.refused, place.module_path, place.module_type, place.source, row.reason
    )


def _has_form(use: OperatorUse) -> bool:
    """Say whether an operator is translated, or PyTorch or we can write it with others."""
    if use.overload is None:
        return use.operator in _KNOWN_LOOPS
    if is_translated(use.overload) or use.overload in REWRITES:
        return True
    return use.overload in torch.export.default_decompositions() or use.overload.has_kernel_for_dispatch_key(COMPOSITE)


def _is_known(name: str) -> bool:
    """Say the same of an operator given by its name."""
    overload = torch.ops
    for part in name.split("."):
        overload = getattr(overload, part)
    return isinstance(overload, OpOverload) and is_translated(overload)


__all__ = [
    "ModuleCoverage",
    "OperatorCoverage",
    "OperatorUse",
    "Support",
    "captured_coverage",
    "covered",
    "merged",
    "module_coverage",
    "program_uses",
    "seen_coverage",
]
