"""`diagnose`: which pieces of a model do not export, or are wrong, and why.

In: a model with input sets, or a recording. Out: a `Diagnosis`. Tries the whole, descends where it fails, tells a module's own
code from its children's, and leaves a reproduction of each fault.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from generic_export.capture import capture
from generic_export.compare.comparison import MeasuredTolerance
from generic_export.debug.attempt.attempt import Attempt, AttemptOptions
from generic_export.debug.attempt.verdict_cache import VerdictCache, fingerprint
from generic_export.debug.attempt.worker import Limits, Worker, wait_for_news
from generic_export.debug.diagnosis import Diagnosis
from generic_export.debug.record.axes import Overrides, Symbols, infer_axes
from generic_export.debug.record.observe import InputSet, completed, record
from generic_export.debug.record.pieces import Case, cases_of, class_lines
from generic_export.debug.record.recording import Recording
from generic_export.debug.records import AxisReport, ErrorRecord, Outcome, Piece, Stage, Verdict, reached
from generic_export.debug.reproduction.piece import Context, write_reproductions
from generic_export.documents import producer_version, torch_version
from generic_export.errors import OptionError
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.interrupts import kept_interrupts
from generic_export.torch_graph.fusion import Fusion

logger = logging.getLogger(__name__)

STRATEGIES = ("whole", "failing", "leaves", "isolate", "numerics")


@dataclass(frozen=True)
class Progress:
    """What is going on.

    Attributes:
        done: attempts that are over.
        known: attempts known to be made, done ones included; it grows while the search descends.
        piece: the piece whose attempt begins or ends.
        isolated: its children are left out.
        verdict: what came of it; None when it begins.
    """

    done: int
    known: int
    piece: Piece
    isolated: bool
    verdict: Verdict | None


@dataclass(frozen=True)
class _Plan:
    """The options of a search, parsed."""

    options: AttemptOptions  # of each attempt, but for its folder
    strategy: str
    depth: int | None
    limits: Limits
    jobs: int
    progress: Callable[[Progress], None]


def diagnose(
    subject: nn.Module | Recording,
    target: TractNNEF,
    input_sets: Sequence[InputSet] | None = None,
    *,
    strategy: str = "failing",
    depth: int | None = None,
    only: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    jobs: int = 1,
    out: str | Path | None = None,
    resume: bool = True,
    fusions: Sequence[Fusion] = (),
    torchscript: bool = True,
    axes: Overrides | None = None,
    limits: Limits | None = None,
    every_member: bool = False,
    functions: bool = False,
    private: bool = True,
    context: Context | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
    """Find the parts of a model that do not export, or export and are wrong.

    Args:
        subject: a model, which is run here on `input_sets`, or a recording made with `observe`.
        target: tract as the archive is for; its dynamic axes are replaced by those inferred from the input sets.
        input_sets: arguments of calls of different sizes, primes by preference; None with a recording.
        strategy: `whole` tries the root only; `failing` descends where something fails; `leaves` tries every piece, the
            innermost first; `isolate` tries every piece without its children; `numerics` tries every piece on what it was fed
            inside the model, so that errors do not add up.
        depth: how far to descend; 0 is the root.
        only: path of a module: the search begins there.
        atol, rtol: limits of a comparison; None measures them (see `judging.py`).
        jobs: attempts at a time.
        out: folder for verdicts, reproductions and `diagnosis.json`; None writes nothing.
        resume: take over what passed in an earlier run with the same `out`.
        fusions: recognisers beside the standard ones, as the export of this model uses.
        torchscript: what torch.export refuses is captured through its script or trace, as `export_model_to_nnef` does; False
            for a model whose export has no values to compare a trace with, as that of a language model.
        axes: symbols of axes of the root's inputs, `{"input_ids": {1: "S"}}`; the others are inferred.
        limits: time and memory of an attempt.
        every_member: try each of several equal modules, not one for all.
        functions: also look into functions that a forward calls, see `observe`.
        private: reproductions hold random weights and inputs of the same shapes; False puts the real ones in.
        context: called with the module that is run, the model or a piece of it, gives what that needs around it to run as it
            is exported: functions that an export replaces. Entered here, and when a reproduction runs, so that it has to be
            something that can be pickled; who records the model enters it for that too.
        progress: called when an attempt begins and ends.

    Returns:
        The diagnosis. Ctrl-C ends the search, not the call: `interrupted` is set and what is known is there.

    Raises:
        OptionError: an option makes no sense, or `only` names no module.
        UnknownStateError, ObservationError: the model cannot be recorded.
    """
    began = time.perf_counter()
    _check_options(target, strategy, depth, jobs)
    folder = None if out is None else Path(out)
    model = subject.model if isinstance(subject, Recording) else subject
    around = nullcontext() if context is None else context(model)
    with around, tempfile.TemporaryDirectory(prefix="diagnose-") as scratch:
        recording = subject if isinstance(subject, Recording) else record(model, input_sets, functions=functions)
        symbols, _ = infer_axes(recording, axes)
        cases = cases_of(recording, symbols, axes, every_member=every_member)
        if not cases:
            raise OptionError("no call of the model was recorded.", "Run the model inside the observe() block.")
        limits = limits or Limits()
        options = AttemptOptions(
            target=target,
            folder=Path(scratch),
            fusions=tuple(fusions),
            torchscript=torchscript,
            tolerance=MeasuredTolerance(atol, rtol),
            engine_seconds=limits.seconds,
            materialise_bytes=limits.memory_bytes // 8,
        )
        plan = _Plan(options, strategy, depth, limits, jobs, progress or (lambda _: None))
        search = _Search(cases, plan, VerdictCache(folder, resume=resume), recording, symbols, axes)
        search.run(only)
    _, report = infer_axes(recording, axes)
    diagnosis = search.diagnosis(report, time.perf_counter() - began)
    if folder is not None:
        diagnosis = write_reproductions(
            diagnosis, search.cases, options, folder / "repro", private=private, context=context
        )
        diagnosis.write_json(folder / "diagnosis.json")
    return diagnosis


def _check_options(target: object, strategy: str, depth: int | None, jobs: int) -> None:
    if not isinstance(target, TractNNEF):
        raise OptionError(
            f"a diagnosis needs a target that tract runs; the target is a {type(target).__name__}.", "Use TractNNEF."
        )
    if strategy not in STRATEGIES:
        raise OptionError(f"unknown strategy {strategy!r}.", f"Use one of {', '.join(STRATEGIES)}.")
    if depth is not None and depth < 0:
        raise OptionError(f"depth is {depth}.", "Use 0 for the root only.")
    if jobs < 1:
        raise OptionError(f"jobs is {jobs}.", "Use 1 or more.")


@dataclass
class _Search:
    """The state of one search; used once."""

    cases: list[Case]
    plan: _Plan
    journal: VerdictCache
    recording: Recording
    symbols: Symbols
    axes: Overrides | None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    isolated: dict[str, Verdict] = field(default_factory=dict)
    interrupted: bool = False
    done: int = 0
    known: int = 0
    raise_interrupt: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.by_key = {case.piece.key: case for case in self.cases}

    def run(self, only: str | None) -> None:
        """Try what the strategy asks for; returns at Ctrl-C, too."""
        roots = self._roots(only)
        strategies = {
            "whole": self._whole,
            "failing": self._failing,
            "leaves": self._leaves,
            "isolate": self._isolate,
            "numerics": self._numerics,
        }
        self.plan.options.target.pre_trace(self.recording.model, None, None)
        warm_up()
        try:
            with kept_interrupts() as self.raise_interrupt:
                strategies[self.plan.strategy](roots)
                self.raise_interrupt()
        except KeyboardInterrupt:
            self.interrupted = True

    # --- strategies ---------------------------------------------------------------------------------

    def _whole(self, roots: Sequence[Case]) -> None:
        self._try(roots)

    def _failing(self, roots: Sequence[Case]) -> None:
        frontier = list(roots)
        allowed = {case.piece.key for case in self._inside(roots)}
        while frontier:
            self._try(frontier)
            for case in frontier:
                if self.verdicts[case.piece.key].failed:
                    self._jump(case, allowed)
            failing = [case for case in self.cases if self._has_failed(case.piece.key)]
            children = dict.fromkeys(key for case in failing for key in case.piece.children)
            frontier = [self.by_key[key] for key in children if key in allowed and key not in self.verdicts]
        self._confirm()

    def _jump(self, case: Case, allowed: Collection[str]) -> None:
        """Try the piece that the error points at at once; when it fails there, what lies between needs no attempt."""
        verdict = self.verdicts[case.piece.key]
        inside = [c for c in self._below(case) if c.piece.key in allowed and c.piece.key not in self.verdicts]
        suspects = [c for c in inside if _is_pointed_at(c, verdict)]
        if not suspects:
            return
        suspect = max(suspects, key=lambda c: c.piece.depth)
        self._try([suspect])
        found = self.verdicts[suspect.piece.key]
        same_place = found.source == verdict.source or bool(verdict.module_path)
        if not found.failed or found.stage is not verdict.stage or not same_place:
            return
        error = ErrorRecord("InnerFaultError", f"{suspect.piece.path}, inside, fails")
        for between in inside:
            if between is not suspect and suspect in self._below(between):
                piece = between.piece
                self.verdicts[piece.key] = Verdict(
                    piece.key, piece.path, Outcome.FAILED, found.stage, error=error, source=found.source
                )

    def _leaves(self, roots: Sequence[Case]) -> None:
        inside = self._inside(roots)
        for depth in sorted({case.piece.depth for case in inside}, reverse=True):
            level = [case for case in inside if case.piece.depth == depth and case.piece.key not in self.verdicts]
            self._try([case for case in level if not self._fails_below(case)])
        self._confirm()

    def _isolate(self, roots: Sequence[Case]) -> None:
        inside = self._inside(roots)
        self._try([case for case in inside if not case.piece.children])
        parents = [case for case in inside if case.piece.children]
        self._try(parents, isolated=True)
        self.verdicts |= {
            case.piece.key: self.isolated[case.piece.key] for case in parents if case.piece.key in self.isolated
        }

    def _numerics(self, roots: Sequence[Case]) -> None:
        self._try(self._inside(roots))
        self._confirm()

    def _confirm(self) -> None:
        """Try the failing pieces with nothing failing inside again, without their children: is it their own code?"""
        suspects = [
            case
            for case in self.cases
            if self._has_failed(case.piece.key) and case.piece.children and not self._fails_below(case)
            and all(key in self.verdicts for key in case.piece.children)
        ]  # fmt: skip
        for case in suspects:
            if self.verdicts[case.piece.key].stage is Stage.COMPARE and self._blame_member(case):
                continue
            self._try([case], isolated=True)
            self._note_accumulation(case)

    def _blame_member(self, case: Case) -> bool:
        """A parent is wrong, the pieces that stand for its children are right: maybe another of several equal children is not."""
        guilty = self.verdicts[case.piece.key].module_path
        members = [c for c in self.cases if guilty in c.piece.paths and guilty != c.piece.path]
        if not members:
            return False
        every = cases_of(self.recording, self.symbols, self.axes, every_member=True)
        member = next((other for other in every if other.piece.path == guilty), None)
        if member is None:
            return False
        grouped = members[0].piece
        alone = replace(member, piece=replace(grouped, path=guilty))
        verdict = self._outcomes([alone], isolated=False)[0]
        if not verdict.failed:
            return False
        self.verdicts[grouped.key] = verdict
        return True

    def _note_accumulation(self, case: Case) -> None:
        verdict, alone = self.verdicts[case.piece.key], self.isolated.get(case.piece.key)
        if alone is None or alone.failed:
            return
        if verdict.stage is Stage.COMPARE:
            words = "every module is within its limits separately, so small errors add up; compute more of it in f32"
        else:
            words = "every module passes separately, and so does its own code: only the whole fails"
        self.verdicts[case.piece.key] = replace(verdict, suggestions=(*verdict.suggestions, words))

    # --- the tree -----------------------------------------------------------------------------------

    def _roots(self, only: str | None) -> list[Case]:
        if only is None:
            return [case for case in self.cases if not case.piece.parents]
        found = [case for case in self.cases if only in case.piece.paths]
        if not found:
            paths = ", ".join(case.piece.path for case in self.cases if case.piece.path)
            raise OptionError(f"no module {only!r} was called.", f"Recorded: {paths}.")
        return found

    def _inside(self, roots: Sequence[Case]) -> list[Case]:
        top = min(case.piece.depth for case in roots)
        limit = None if self.plan.depth is None else top + self.plan.depth
        shallow = {case.piece.key for case in self.cases if limit is None or case.piece.depth <= limit}
        starts = [case.piece.key for case in roots if case.piece.key in shallow]
        found = reached(starts, lambda key: [inner for inner in self.by_key[key].piece.children if inner in shallow])
        return sorted((self.by_key[key] for key in found), key=lambda case: case.piece.order)

    def _has_failed(self, key: str) -> bool:
        return key in self.verdicts and self.verdicts[key].failed

    def _fails_below(self, case: Case) -> bool:
        return any(self._has_failed(inner.piece.key) for inner in self._below(case))

    def _below(self, case: Case) -> list[Case]:
        """Return the pieces inside one, itself left out."""
        inside = reached(case.piece.children, lambda key: self.by_key[key].piece.children)
        return [self.by_key[key] for key in inside if key != case.piece.key]

    # --- attempts -----------------------------------------------------------------------------------

    def _try(self, cases: Iterable[Case], *, isolated: bool = False) -> None:
        table = self.isolated if isolated else self.verdicts
        self._outcomes(list(cases), isolated=isolated, table=table)

    def _outcomes(
        self, cases: Sequence[Case], *, isolated: bool, table: dict[str, Verdict] | None = None
    ) -> list[Verdict]:
        """Try pieces, several at a time; verdicts are in `table` as soon as they are known."""
        found: dict[str, Verdict] = {} if table is None else table
        self.known += len(cases)
        waiting = list(cases)
        running: dict[Worker, tuple[Case, str]] = {}
        try:
            while waiting or running:
                self.raise_interrupt()
                while waiting and len(running) < self.plan.jobs:
                    case = waiting.pop(0)
                    mark = self._fingerprint(case, isolated=isolated)
                    known = self.journal.passed(mark)
                    if known is not None:
                        self._conclude(case, known, found, isolated=isolated)
                        continue
                    self.plan.progress(Progress(self.done, self.known, case.piece, isolated, None))
                    running[self._start(case, isolated=isolated)] = case, mark
                if running:
                    wait_for_news(list(running))
                for worker in list(running):
                    verdict = worker.look()
                    if verdict is not None:
                        case, mark = running.pop(worker)
                        self.journal.add(mark, verdict)
                        self._conclude(case, verdict, found, isolated=isolated)
        finally:
            for worker in running:
                worker.kill()
        return [found[case.piece.key] for case in cases]

    def _conclude(self, case: Case, verdict: Verdict, table: dict[str, Verdict], *, isolated: bool) -> None:
        table[case.piece.key] = verdict
        self.done += 1
        self.plan.progress(Progress(self.done, self.known, case.piece, isolated, verdict))

    def _fingerprint(self, case: Case, *, isolated: bool) -> str:
        options = self.plan.options
        names = [fusion.__qualname__ for fusion in options.fusions]
        return fingerprint(case, options.target, options.tolerance, names, options.torchscript, isolated=isolated)

    def _start(self, case: Case, *, isolated: bool) -> Worker:
        folder = Path(tempfile.mkdtemp(dir=self.plan.options.folder))
        options = replace(self.plan.options, folder=folder, isolated=isolated)
        task = partial(_attempt, case, options, self.recording)
        return Worker(case.piece.key, case.piece.path, task, self.plan.limits, isolated=isolated)

    # --- the result ---------------------------------------------------------------------------------

    def diagnosis(self, report: AxisReport, seconds: float) -> Diagnosis:
        """Return all that was found out."""
        pieces = tuple(case.piece for case in self.cases)
        return Diagnosis(
            model=type(self.recording.model).__name__,
            target=f"tract {self.plan.options.target.release}",
            strategy=self.plan.strategy,
            pieces=pieces,
            verdicts=tuple(self._verdict_of(piece) for piece in pieces),
            isolated=tuple(self.isolated[piece.key] for piece in pieces if piece.key in self.isolated),
            axes=report,
            unexercised=self.recording.unexercised(),
            warnings=tuple(self.recording.warnings),
            seconds=seconds,
            interrupted=self.interrupted,
            versions=_versions(),
        )

    def _verdict_of(self, piece: Piece) -> Verdict:
        known = self.verdicts.get(piece.key)
        if known is not None:
            return known
        covered = self._is_covered(piece.key)
        return Verdict(piece.key, piece.path, Outcome.COVERED if covered else Outcome.NOT_TRIED)

    def _is_covered(self, key: str) -> bool:
        """Say whether a piece is part of something that passed as a whole."""
        around = reached(self.by_key[key].piece.parents, lambda parent: self.by_key[parent].piece.parents)
        known = (self.verdicts.get(parent) for parent in around)
        return any(verdict is not None and verdict.outcome is Outcome.OK and not verdict.isolated for verdict in known)


def _is_pointed_at(case: Case, verdict: Verdict) -> bool:
    """Say whether a verdict names a piece: by its path, or by a line of its class."""
    if verdict.module_path:
        return verdict.module_path in case.piece.paths
    name, _, line = verdict.source.rpartition(":")
    found = class_lines(case.module)
    return bool(name) and found is not None and found[0] == name and found[1] <= int(line) < found[2]


def _attempt(case: Case, options: AttemptOptions, recording: Recording, reached: Callable[[Stage], None]) -> Verdict:
    """Run in the worker: tensors beyond the recording's budget are computed again first."""
    reached(Stage.CAPTURE)
    whole = tuple(completed(recording, recorded) for recorded in case.calls)
    inner = (
        {index: tuple(completed(recording, recorded) for recorded in calls) for index, calls in case.inner.items()}
        if options.isolated
        else {}
    )
    return Attempt(replace(case, calls=whole, inner=inner), options, reached).run()


@cache
def warm_up() -> None:
    """Capture something small here, so that no fork has to import and prepare what all need."""
    capture(nn.Linear(2, 2).eval(), (torch.zeros(1, 2),), TractNNEF(check_io=False))


def _versions() -> dict[str, str]:
    found = {"t2n-llm": producer_version(), "torch": torch_version()}
    for name in ("tract", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


__all__ = ["STRATEGIES", "Progress", "diagnose", "warm_up"]
