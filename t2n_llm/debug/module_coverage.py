"""Which operators the modules of a model need, each captured by itself: for a model that cannot be captured as a whole.

In: a config. Out: the coverage of all modules that can be captured, and those that cannot. The tiny model is run, and its modules
are captured from the outside in, each with what it received.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from generic_export.capture import ModuleCall
from generic_export.compat import CAPTURE_LOGGERS, OpOverload, TorchDispatchMode
from generic_export.debug.coverage import ModuleCoverage, OperatorUse, Weigh, covered, merged, seen_coverage
from generic_export.debug.record.pieces import kinds_of_calls
from generic_export.debug.record.recording import RecordedCall
from generic_export.diagnose import Recording, observe
from generic_export.errors import CaptureError, T2NError, described
from generic_export.inference_target import TractNNEF
from generic_export.logs import logging_at
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.source_lines import PACKAGE, running_source
from kvcache import explicit_operators
from kvcache.compat import cache_keyword, cache_of
from kvcache.operators import OperatorNames
from t2n_llm.debug.tiny_model import tiny_model
from t2n_llm.graph.capture import FUSIONS, TORCHSCRIPT
from t2n_llm.source.layer_cut import layers_path

_STEPS = 5
_OWN = os.path.dirname(os.path.dirname(__file__))
# Bookkeeping of eager mode: no value depends on it.
_BOOKKEEPING = frozenset({"aten.detach.default", "aten.lift_fresh.default", "aten.alias.default"})


@dataclass(frozen=True)
class UncapturedModule:
    """A module that cannot be captured although all modules in it can (or there are none).

    Attributes:
        path: in the shallow model.
        class_name: its class.
        count: modules of the whole model that are like it.
        message, hint: why, and what to do.
        source: `file.py:line` in the model's code, or "".
    """

    path: str
    class_name: str
    count: int
    message: str
    hint: str = ""
    source: str = ""


def call_coverage(call: ModuleCall, weigh: Weigh, dynamic_axes: DynamicAxes | None = None) -> ModuleCoverage:
    """Return the coverage of a module, captured as an export does.

    Args:
        call: the module and its arguments.
        weigh: how often each module counts.
        dynamic_axes: None for none.
    """
    target = TractNNEF(dynamic_axes=dynamic_axes or {}, check_io=False)
    return covered(call, target, FUSIONS, weigh, torchscript=TORCHSCRIPT)


def layer_of(path: str, layers: str) -> int | None:
    """Return the number of the layer that a module is in, or None."""
    match = re.match(rf"{re.escape(layers)}\.(\d+)(?:\.|$)", path) if layers else None
    return int(match[1]) if match else None


def modules_coverage(
    config: Any, trust_remote_code: bool, cause: T2NError
) -> tuple[ModuleCoverage, tuple[UncapturedModule, ...]]:
    """Run the tiny model, then capture its modules from the outside in.

    Args:
        config: of the whole model.
        trust_remote_code: allow code that comes with the model.
        cause: why the whole cannot be captured.

    Raises:
        CaptureError: the tiny model cannot be made or run.
    """
    try:
        twin = tiny_model(config, trust_remote_code=trust_remote_code)
        with explicit_operators() as operators:
            model = _twin_model(twin.model, operators, trust_remote_code)
            record = record_forward(model)
            layers = layers_path(model, twin.config)
            search = _ModuleSearch(record, lambda path: twin.cut.weight(layer_of(path, layers)))
            with logging_at(logging.CRITICAL, *CAPTURE_LOGGERS):
                search.visit()
    except T2NError as error:
        raise CaptureError(
            f"{cause.message} Its modules cannot be captured either: {error.message}", error.hint
        ) from error
    return merged(search.parts), tuple(search.uncaptured.values())


def _twin_model(make: Any, operators: OperatorNames, trust_remote_code: bool) -> nn.Module:
    """Make the twin with our attention, or with its own where its class takes no other."""
    try:
        model: nn.Module = make(operators=operators, trust_remote_code=trust_remote_code)
    except ValueError:
        model = make(trust_remote_code=trust_remote_code)
    return model


_SOURCE = re.compile(r"\b[\w.-]+\.py:\d+")


class _ModuleSearch:
    """Captures modules from the outside in; goes into one only when it cannot be captured itself."""

    def __init__(self, record: ForwardRecord, weigh: Weigh) -> None:
        self._uses = record.uses
        self._weigh = weigh
        self._kinds = kinds_of_calls(record.recording)
        self._inside: dict[int | None, list[RecordedCall]] = {}
        for recorded in record.recording.calls:
            if recorded.call.turn == 0:
                self._inside.setdefault(recorded.call.parent, []).append(recorded)
        self._seen: dict[str, ModuleCoverage | T2NError] = {}
        self.parts: list[ModuleCoverage] = []
        self.uncaptured: dict[str, UncapturedModule] = {}

    def visit(self, parent: int | None = None) -> bool:
        """Add the coverage of what is called inside a call, the root by default; returns whether all of it was captured."""
        captured_ones = [self._visit_call(recorded) for recorded in self._inside.get(parent, ())]
        return all(captured_ones)

    def _visit_call(self, recorded: RecordedCall) -> bool:
        kind, path = self._kinds[recorded.call.index], recorded.call.path
        if kind not in self._seen:
            self._seen[kind] = self._captured(recorded)
        outcome = self._seen[kind]
        if isinstance(outcome, ModuleCoverage):
            self.parts.append(self._placed(outcome, path))
            return True
        self.parts.append(seen_coverage([use for use in self._uses if use.module_path == path], self._weigh))
        if self.visit(recorded.call.index):
            self._blame(kind, recorded, outcome)
        return False

    def _captured(self, recorded: RecordedCall) -> ModuleCoverage | T2NError:
        """Return the coverage of a module, with paths relative to it and each call counted once."""
        path = recorded.call.path
        # Inside a layer the counts are multiplied later, since the modules of several layers share them.
        weigh: Weigh = (lambda _: 1) if self._weigh(path) > 1 else (lambda inner: self._weigh(_join(path, inner)))
        try:
            args, kwargs = recorded.arguments.rebuilt(recorded.inputs().__getitem__)
            return call_coverage(ModuleCall(recorded.module, args, kwargs), weigh)
        except T2NError as error:
            return error

    def _placed(self, coverage: ModuleCoverage, path: str) -> ModuleCoverage:
        factor = self._weigh(path)
        rows = tuple(
            replace(
                row,
                count=row.count * factor,
                refused=row.refused * factor,
                module_path=_join(path, row.module_path),
            )
            for row in coverage.operators
        )
        return ModuleCoverage(rows, coverage.problems)

    def _blame(self, kind: str, recorded: RecordedCall, error: T2NError) -> None:
        path = recorded.call.path
        source = _SOURCE.search(error.message)
        found = UncapturedModule(
            path, recorded.call.class_name, 0, error.message, error.hint or "", source[0] if source else ""
        )
        known = self.uncaptured.get(kind, found)
        self.uncaptured[kind] = replace(known, count=known.count + self._weigh(path))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


@dataclass(frozen=True)
class ForwardRecord:
    """One run of a model.

    Attributes:
        recording: every call of its modules, without a cache.
        uses: every operator that ran inside a module, with a cache.
    """

    recording: Recording
    uses: tuple[OperatorUse, ...]


def record_forward(model: nn.Module) -> ForwardRecord:
    """Run a causal LM: once whole for the calls, then with its cache, a few tokens and one more, for the operators.

    Raises:
        CaptureError: the model does not run.
    """
    ids = torch.arange(_STEPS)[None] + 3
    try:
        with torch.no_grad():
            with observe(model, max_calls=1) as recording:
                model(input_ids=ids, use_cache=False)
            with ModuleTracker() as tracker, _OperatorWatch(recording, tracker) as watch:
                _run_with_cache(model, ids)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(f"{type(model).__name__} does not run in PyTorch: {described(error)}") from error
    return ForwardRecord(recording, tuple(watch.uses))


def _run_with_cache(model: nn.Module, ids: torch.Tensor) -> None:
    result = model(input_ids=ids, use_cache=True)
    cache = cache_of(result)
    if cache is not None:
        model(input_ids=ids[:, :1], use_cache=True, **{cache_keyword(model.forward): cache})


class _OperatorWatch(TorchDispatchMode):
    """Notes every operator that runs, with the module and the line of the model's code that called it."""

    def __init__(self, recording: Recording, tracker: ModuleTracker) -> None:
        super().__init__()
        self._recording, self._tracker = recording, tracker
        self.uses: list[OperatorUse] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Names begin with the root's class; the innermost module has the longest.
        inside = self._tracker.parents - {"Global"}
        if inside and str(func) not in _BOOKKEEPING:
            module = self._recording.model.get_submodule(max(inside, key=len).partition(".")[2])
            path = self._recording.paths[module][0]
            self.uses.append(OperatorUse(str(func), func, path, type(module).__name__, running_source((PACKAGE, _OWN))))
        return func(*args, **(kwargs or {}))


__all__ = [
    "ForwardRecord",
    "UncapturedModule",
    "call_coverage",
    "layer_of",
    "modules_coverage",
    "record_forward",
]
