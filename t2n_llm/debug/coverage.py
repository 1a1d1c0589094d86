"""`cover_model`: which operators a model needs and which of them can be written, from its config alone, in seconds.

In: a config. Out: a `CoverageReport`. One layer of each kind is captured as the export does it; where that fails, the
tiny twin is captured module by module, so that the operators of all that can be captured are known, and what cannot.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from generic_export.capture import ModuleCall
from generic_export.compat import CAPTURE_LOGGERS, OpOverload, TorchDispatchMode
from generic_export.debug.coverage import (
    ModuleCoverage,
    OperatorCoverage,
    OperatorUse,
    Support,
    Weigh,
    covered,
    merged,
    seen_coverage,
)
from generic_export.debug.record.pieces import kinds_of_calls
from generic_export.debug.record.recording import RecordedCall
from generic_export.diagnose import Recording, observe
from generic_export.documents import producer_version
from generic_export.errors import CaptureError, T2NError, described
from generic_export.inference_target import TractNNEF
from generic_export.logs import logging_at
from generic_export.torch_graph.capture.tracer import torch_version
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.source_lines import PACKAGE, running_source
from kvcache import explicit_operators
from kvcache.compat import cache_keyword, cache_of
from kvcache.operators import OperatorNames
from t2n_llm.debug.tiny_model import tiny_model
from t2n_llm.graph.capture import FUSIONS, TORCHSCRIPT, WRAPPER_ATTRIBUTE
from t2n_llm.graph.causal_lm import causal_lm
from t2n_llm.graph.options import GraphOptions
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import open_config
from t2n_llm.source.layer_cut import LayerCut, cut_layers, layers_path
from t2n_llm.source.reference import SourceRef

logger = logging.getLogger(__name__)

DECODER = "cached decoder"
MODULES = "module by module"

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


@dataclass(frozen=True)
class CoverageReport:
    """What is known of a model before any weight is read.

    Attributes:
        model: as the user named it.
        architecture: class of the model.
        model_type: of its config.
        how: `cached decoder` (captured as an export does it) or `module by module`.
        layers: numbers of the layers that were captured; each stands for its kind.
        depth: layers of the model.
        operators: in the order of their first use; counts are those of the whole model.
        problems: what keeps the whole from being captured or translated, one line each.
        uncaptured: modules whose own code cannot be captured.
        seconds: taken.
        versions: of PyTorch, transformers and this package.
    """

    model: str
    architecture: str
    model_type: str
    how: str
    layers: tuple[int, ...]
    depth: int
    operators: tuple[OperatorCoverage, ...]
    problems: tuple[str, ...]
    uncaptured: tuple[UncapturedModule, ...]
    seconds: float
    versions: Mapping[str, str]

    def of(self, support: Support) -> tuple[OperatorCoverage, ...]:
        """Return the operators that are supported, decomposed or missing."""
        return tuple(row for row in self.operators if row.support is support)

    @property
    def complete(self) -> bool:
        """Whether every operator can be written and the whole model can be captured."""
        return not (self.problems or self.uncaptured or self.of(Support.MISSING))

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        totals = {
            str(support): {"operators": len(rows := self.of(support)), "calls": sum(row.count for row in rows)}
            for support in Support
        }
        operators = [asdict(row) | {"support": str(row.support)} for row in self.operators]
        plain = {key: value for key, value in asdict(self).items() if key != "operators"}
        return {"complete": self.complete, **plain, "totals": totals, "operators": operators}


def cover_model(
    source: str | SourceRef,
    *,
    every_layer: bool = False,
    reporter: Reporter | None = None,
) -> CoverageReport:
    """Say which operators a model needs, and which of them can be written.

    Args:
        source: hub id, folder, config file or `.gguf` file; of a hub repository only the config is fetched.
        every_layer: capture all layers instead of one of each kind (slower, the same answer).
        reporter: told what happens; None logs.

    Raises:
        SourceError: there is no such config.
        CaptureError: transformers cannot build the model, or nothing of it can be run or captured.
    """
    reporter = reporter or LogReporter()
    started = time.monotonic()
    ref = SourceRef.of(source)
    trust_remote_code = ref.trust_remote_code
    reporter.stage(f"Reading {ref.name}")
    config = open_config(ref).config
    cut = cut_layers(config, trust_remote_code=trust_remote_code)
    if every_layer:
        cut = LayerCut(config, tuple(range(cut.depth)), (1,) * cut.depth)
    reporter.stage(f"Capturing {len(cut.picks)} of {cut.depth} layers")
    uncaptured: tuple[UncapturedModule, ...] = ()
    try:
        found = _decoder_coverage(cut, trust_remote_code)
        how, problems = DECODER, found.problems
    except T2NError as error:
        reporter.stage("The whole model cannot be captured; capturing its modules one by one")
        how, problems = MODULES, (error.message,)
        found, uncaptured = _modules_coverage(config, trust_remote_code, error)
        problems += found.problems
    return CoverageReport(
        model=ref.name,
        architecture=type(meta_model(cut.config, trust_remote_code=trust_remote_code)).__name__,
        model_type=str(config.model_type),
        how=how,
        layers=cut.picks,
        depth=cut.depth,
        operators=found.operators,
        problems=problems,
        uncaptured=uncaptured,
        seconds=time.monotonic() - started,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch_version(), "transformers": str(transformers.__version__), "t2n-llm": producer_version()}


# --- the whole, as an export captures it ----------------------------------------------------------


def _decoder_coverage(cut: LayerCut, trust_remote_code: bool) -> ModuleCoverage:
    with causal_lm(cut.config, GraphOptions(), name="", trust_remote_code=trust_remote_code) as graph:
        layers = layers_path(graph.network, graph.config)
        call = ModuleCall(
            graph.module,
            tuple(graph.inputs.values()),
            input_names=tuple(graph.inputs),
            output_names=graph.output_names,
            strip_prefix=f"{WRAPPER_ATTRIBUTE}.",
        )
        return _covered(call, lambda path: cut.weight(_layer_of(path, layers)), graph.dynamic_axes)


def _covered(call: ModuleCall, weigh: Weigh, dynamic_axes: DynamicAxes | None = None) -> ModuleCoverage:
    """Capture as an export does."""
    target = TractNNEF(dynamic_axes=dynamic_axes or {}, check_io=False)
    return covered(call, target, FUSIONS, weigh, torchscript=TORCHSCRIPT)


def _layer_of(path: str, layers: str) -> int | None:
    """Return the number of the layer that a module is in, or None."""
    match = re.match(rf"{re.escape(layers)}\.(\d+)(?:\.|$)", path) if layers else None
    return int(match[1]) if match else None


# --- module by module -----------------------------------------------------------------------------


def _modules_coverage(
    config: Any, trust_remote_code: bool, cause: T2NError
) -> tuple[ModuleCoverage, tuple[UncapturedModule, ...]]:
    """Run the tiny twin, then capture its modules from the outside in, each with what it received."""
    try:
        twin = tiny_model(config, trust_remote_code=trust_remote_code)
        with explicit_operators() as operators:
            model = _twin_model(twin.model, operators, trust_remote_code)
            record = record_forward(model)
            layers = layers_path(model, twin.config)
            search = _ModuleSearch(record, lambda path: twin.cut.weight(_layer_of(path, layers)))
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
            return _covered(ModuleCall(recorded.module, args, kwargs), weigh)
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


__all__ = ["DECODER", "MODULES", "CoverageReport", "OperatorUse", "UncapturedModule", "cover_model", "record_forward"]
