"""The exporters that a node can be tried with, each answering with a `StatusExport`.

In: a `Case`. `nnef` is this package's own, checked in tract by a worker process; `fx` is `torch.export`; `onnx_dynamo` and
`torch_script` write ONNX, which tract reads for the check. All run on every recorded call. What the user says counts more than
what we would: `exporter_kwargs` are laid over our own.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim

from generic_export.capture import evaluation_mode
from generic_export.compare.comparison import MeasuredTolerance
from generic_export.debug.attempt.attempt import Attempt, AttemptOptions
from generic_export.debug.attempt.piece_module import PieceModule, calls_for, piece_module
from generic_export.debug.attempt.worker import Limits, Worker, wait_for_news
from generic_export.debug.piece_by_piece.status import StatusExport, StatusExportCode
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recording import RecordedCall
from generic_export.debug.records import Outcome, Stage, Verdict
from generic_export.errors import MissingExtraError, OptionError, T2NError
from generic_export.inference_target.example import as_array
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.target import TractNNEF


@dataclass(frozen=True)
class ExportRequest:
    """What a node is tried with.

    Attributes:
        keywords: options of the exporter: `target`, `fusions`, `limits` for `nnef`; those of `torch.export.export` or
            `torch.onnx.export` for the others.
        discrepancies: run what was exported and compare.
        dynamic: keep the axes that vary between calls symbolic; None: of nodes that were called more than once.
        isolated: the children are left out (`nnef`; the other exporters see opaque operators in their places).
        atol, rtol: limits of a comparison.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    discrepancies: bool = True
    dynamic: bool | None = True
    isolated: bool = False
    atol: float = 1e-2
    rtol: float = 1e-1

    @property
    def flags(self) -> StatusExportCode:
        """What any status of it says."""
        return StatusExportCode.CHILDC if self.isolated else StatusExportCode.NONE


Exporter = Callable[[Case, ExportRequest], StatusExport]


@dataclass(frozen=True)
class _Entry:
    """An exporter, the arguments that it is given here and nowhere else, and the packages that it needs."""

    export: Exporter
    taken: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()


def exporter_named(name: str, keywords: Mapping[str, Any]) -> Exporter:
    """Return an exporter.

    Args:
        name: of `EXPORTERS`.
        keywords: what it is going to be called with.

    Raises:
        OptionError: there is none of that name, or a keyword is given to it here already.
        MissingExtraError: it needs a package that is not installed.
    """
    if name not in EXPORTERS:
        raise OptionError(f"unknown exporter {name!r}.", f"Use one of {', '.join(EXPORTERS)}.")
    entry = EXPORTERS[name]
    for keyword in entry.taken & set(keywords):
        raise OptionError(
            f"exporter_kwargs has {keyword!r}, which the recorded calls say.", f"Leave it out of {name!r}'s."
        )
    for package in entry.needs:
        if find_spec(package) is None:
            raise MissingExtraError(f"exporter {name!r} needs the package {package}.", "pip install 't2n-llm[debug]'")
    return entry.export


# --- nnef -------------------------------------------------------------------------------------------


def export_nnef(case: Case, request: ExportRequest) -> StatusExport:
    """Write the node for tract and check it there; `exported` is the verdict."""
    keywords = dict(request.keywords)
    limits: Limits = keywords.pop("limits", Limits())
    tolerance = MeasuredTolerance(request.atol, request.rtol)
    with tempfile.TemporaryDirectory(prefix="piece-") as folder:
        options = AttemptOptions(
            target=keywords.pop("target", None) or TractNNEF(),
            folder=Path(folder),
            fusions=tuple(keywords.pop("fusions", ())),
            tolerance=tolerance if request.discrepancies else MeasuredTolerance(float("inf"), 0.0),
            isolated=request.isolated,
            dynamic=bool(request.dynamic),
        )
        if keywords:
            raise OptionError(
                f"exporter 'nnef' takes no {next(iter(keywords))!r}.", "It takes target, fusions and limits."
            )
        verdict = _in_worker(case, options, limits)
    return _status_of(verdict, request)


def _in_worker(case: Case, options: AttemptOptions, limits: Limits) -> Verdict:
    key, path = case.piece.key, case.piece.path
    worker = Worker(key, path, lambda reached: Attempt(case, options, reached).run(), limits, isolated=options.isolated)
    try:
        while True:
            verdict = worker.look()
            if verdict is not None:
                return verdict
            wait_for_news([worker])
    except BaseException:
        worker.kill()
        raise


def _status_of(verdict: Verdict, request: ExportRequest) -> StatusExport:
    flags = request.flags
    if verdict.outcome is Outcome.OK:
        return StatusExport(StatusExportCode.OK | flags, exported=verdict)
    if verdict.stage is Stage.COMPARE:
        flags |= StatusExportCode.DISC
    step = {Stage.COMPARE: "DISC", Stage.LOAD: "EVAL", Stage.RUN: "EVAL"}.get(verdict.stage or Stage.CAPTURE, "EXPORT")
    where = f"{verdict.source}: " if verdict.source else ""
    return StatusExport(StatusExportCode.FAIL | flags, step, f"{where}{verdict.error}", exported=verdict)


# --- torch.export -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A node ready for an exporter of PyTorch's."""

    calls: Sequence[RecordedCall]
    module: PieceModule
    examples: tuple[torch.Tensor, ...]
    shapes: tuple[dict[int, Any], ...]

    @staticmethod
    def of(case: Case, request: ExportRequest) -> _Node:
        dynamic = bool(request.dynamic)
        calls = calls_for(case, dynamic=dynamic)
        module = piece_module(case, calls[0])
        axes = module.dynamic_axes(dynamic=dynamic)
        shapes = tuple(dict.fromkeys(axes.get(part.name, {}), Dim.DYNAMIC) for part in module.feed.parts)
        if "dynamic_shapes" in request.keywords:
            shapes = _shapes_given(request.keywords["dynamic_shapes"], module)
        return _Node(calls, module, module.examples(dynamic=dynamic), shapes)


def _shapes_given(given: Any, module: PieceModule) -> tuple[dict[int, Any], ...]:
    """Return the dynamic axes that the user gives, per input of the graph.

    Args:
        given: as `torch.export.export` takes them for the module itself, or as `guess_dynamic_shapes` returns them.
        module: whose graph takes flat tensors.

    Raises:
        OptionError: the size of an input is put together from others.
    """
    names = list(dict.fromkeys(part.name.split(".")[0] for part in module.feed.parts))
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        by_name = {**dict(zip(names, given[0], strict=False)), **given[1]}
    else:
        by_name = dict(given) if isinstance(given, Mapping) else dict(zip(names, given or (), strict=False))
    composed = next((part.name for part in module.feed.parts if part.name not in module.feed.trees), None)
    if composed is not None:
        raise OptionError(f"dynamic_shapes cannot be given: the sizes of {composed} follow from other inputs.")
    return tuple(_inside(by_name, part.name.split(".")) or {} for part in module.feed.parts)


def _inside(nest: Any, steps: Sequence[str]) -> Any:
    """Return what is at a dotted path of a nest; None where it ends before."""
    for step in steps:
        if isinstance(nest, Mapping):
            nest = nest.get(step)
        else:
            nest = (
                nest[int(step)]
                if isinstance(nest, (list, tuple)) and step.isdigit() and int(step) < len(nest)
                else None
            )
    return nest


def export_fx(case: Case, request: ExportRequest) -> StatusExport:
    """Run `torch.export`; `exported` is the `ExportedProgram`."""
    with evaluation_mode(case.module), torch.no_grad():
        try:
            node = _Node.of(case, request)
            options = {"strict": False, **request.keywords, "dynamic_shapes": (node.shapes,)}
            program = torch.export.export(node.module, node.examples, **options)
        except Exception as error:  # torch.export raises many unrelated classes
            return _failed("EXPORT", error, request)
        run = program.module()
        return _checked(node, request, lambda inputs: [as_array(t) for t in run(*inputs)], program, node.shapes)


# --- ONNX -------------------------------------------------------------------------------------------


def export_onnx_dynamo(case: Case, request: ExportRequest) -> StatusExport:
    """Run `torch.onnx.export(dynamo=True)`; `exported` is the file's bytes."""
    return _export_onnx(case, request, dynamo=True)


def export_torch_script(case: Case, request: ExportRequest) -> StatusExport:
    """Run `torch.onnx.export(dynamo=False)`, which traces with TorchScript; `exported` is the file's bytes."""
    return _export_onnx(case, request, dynamo=False)


def _export_onnx(case: Case, request: ExportRequest, *, dynamo: bool) -> StatusExport:
    with (
        tempfile.TemporaryDirectory(prefix="piece-onnx-") as folder,
        evaluation_mode(case.module),
        torch.no_grad(),
    ):
        path = Path(folder) / "model.onnx"
        try:
            node = _Node.of(case, request)
            _write_onnx(node, path, request, dynamo=dynamo)
        except Exception as error:  # torch.onnx raises many unrelated classes
            return _failed("EXPORT", error, request)
        try:
            with TractWheel().load(path) as engine:
                ask = lambda inputs: engine.run([as_array(tensor) for tensor in inputs])  # noqa: E731
                return _checked(node, request, ask, path.read_bytes(), node.shapes)
        except T2NError as error:
            return _failed("EVAL", error, request)


def _write_onnx(node: _Node, path: Path, request: ExportRequest, *, dynamo: bool) -> None:
    names = request.keywords.get("input_names") or [part.name for part in node.module.feed.parts]
    options: dict[str, Any] = {"dynamo": dynamo, "input_names": names}
    if dynamo:
        options |= {"dynamic_shapes": (node.shapes,), "external_data": False, "verbose": False}
    elif request.dynamic:
        options["dynamic_axes"] = {n: list(axes) for n, axes in zip(names, node.shapes, strict=True) if axes}
    options |= {name: value for name, value in request.keywords.items() if name != "dynamic_shapes"}
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with silence[0], silence[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(node.module, node.examples, path, **options)


# --- the check --------------------------------------------------------------------------------------


def _checked(
    node: _Node,
    request: ExportRequest,
    run: Callable[[Sequence[torch.Tensor]], list[np.ndarray]],
    exported: Any,
    shapes: Any,
) -> StatusExport:
    """Run what was exported on every recorded call and compare; all calls are looked at, the worst is told."""
    flags, tolerance = request.flags, MeasuredTolerance(request.atol, request.rtol)
    reasons: list[tuple[float, str]] = []
    for recorded in node.calls if request.discrepancies else ():
        leaves = {name: tensor.clone() for name, tensor in node.module.leaves(recorded).items()}
        if set(node.module.feed.trees) - set(leaves):
            continue
        expected = node.module.answers(recorded)
        try:
            answers = run(list(node.module.feed.inputs(leaves).values()))
        except Exception as error:  # an exported program may refuse other sizes in many ways
            return _failed("EVAL", error, request)
        for (name, reference), answer in zip(expected.items(), answers, strict=True):
            dtype = str(reference.dtype).removeprefix("torch.")
            found = tolerance.compare(name, answer, as_array(reference), dtype, lambda: None)
            if not found.passed:
                reasons.append((found.max_abs_error, str(found)))
    if reasons:
        _, worst = max(reasons, key=lambda item: item[0])
        return StatusExport(StatusExportCode.FAIL_DISC | flags, "DISC", worst, exported, shapes)
    return StatusExport(StatusExportCode.OK | flags, exported=exported, dynamic_shapes=shapes)


def _failed(step: str, error: BaseException, request: ExportRequest) -> StatusExport:
    flags = request.flags
    reason = "".join(traceback.format_exception(error))
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return StatusExport(StatusExportCode.FAIL | flags, step, f"{type(error).__name__}: {first}\n{reason}", error=error)


_ONNX = frozenset({"model", "args", "f", "kwargs"})
EXPORTERS: Mapping[str, _Entry] = {
    "nnef": _Entry(export_nnef),
    "fx": _Entry(export_fx, frozenset({"mod", "args", "kwargs"})),
    "onnx_dynamo": _Entry(export_onnx_dynamo, _ONNX, ("onnx", "onnxscript")),
    "torch_script": _Entry(export_torch_script, _ONNX, ("onnx",)),
    "to_onnx": _Entry(export_onnx_dynamo, _ONNX, ("onnx", "onnxscript")),  # whichever way PyTorch has to ONNX today
}


__all__ = ["EXPORTERS", "ExportRequest", "Exporter", "exporter_named"]
