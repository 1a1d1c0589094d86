"""What a diagnosis says: plain frozen records, written by the search and read by reports.

In: nothing; the other files of this folder fill them. Out: `Diagnosis`, which goes to JSON and back.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from generic_export.diagnose.plain_data import built, plain
from generic_export.errors import ArchiveError, T2NError
from generic_export.files import write_whole

SCHEMA_VERSION = 1


class DiagnosisError(T2NError):
    """A diagnosis found parts of the model that do not export, or export and are wrong."""


class Outcome(enum.Enum):
    """How it went with a piece."""

    OK = "ok"
    FAILED = "failed"
    COVERED = "covered"  # not tried: part of something that passed
    NOT_EXERCISED = "not exercised"  # no input set reaches it
    NOT_TRIED = "not tried"  # left out by depth, `only`, or an interruption

    def __str__(self) -> str:
        return self.value


class Stage(enum.Enum):
    """The room in which an attempt ended, in their order."""

    CAPTURE = "capture"
    TRANSLATE = "translate"
    WRITE = "write"
    LOAD = "load"
    RUN = "run"
    COMPARE = "compare"

    def __str__(self) -> str:
        return self.value


class LeafKind(enum.Enum):
    """What one value of a call is."""

    TENSOR = "tensor"
    CONSTANT = "constant"  # int, float, bool, str, dtype: part of the signature
    NONE = "none"
    OPAQUE = "opaque"  # an object that is handed on as it is

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Leaf:
    """One value that goes into a call or comes out of it.

    Attributes:
        name: dotted path: `hidden_states`, `position_embeddings.0`, `past_key_values.key_3`.
        kind: what it is.
        dtype: element type of a tensor, such as `float32`; "" otherwise.
        sizes: of a tensor, in this call.
        axes: the same sizes as text in named symbols (`B`, `S+P`, `64`); empty until axes are inferred.
        value: a constant as text.
        written: the call writes to it (an input tensor changed in place, a state that grew).
        alias_of: for an output that is an input handed back unchanged, the name of that input.
    """

    name: str
    kind: LeafKind
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    value: str = ""
    written: bool = False
    alias_of: str = ""

    def __str__(self) -> str:
        if self.kind is LeafKind.TENSOR:
            sizes = ", ".join(self.axes or map(str, self.sizes))
            return f"{self.name}: {self.dtype}[{sizes}]"
        return f"{self.name}={self.value or 'None'}"


@dataclass(frozen=True)
class Piece:
    """All calls that look alike: same class, configuration, parameter shapes, inputs and outputs.

    Attributes:
        key: identifies it in this recording and in later ones of the same model.
        class_name: class of the module, or name of the function.
        qualified_name: with its Python module.
        path: the member that stands for all, "" for the root.
        paths: all members, in execution order; the same module under further names included.
        depth: 0 for the root.
        source: `file.py:line` where the forward is defined.
        inputs, outputs: values of the call that stands for all, with named axes.
        attributes: configuration that tells it from other pieces of its class.
        parameters: name, element type and shape of each parameter, `weight: float32[64, 64]`.
        tied: groups of parameter names that are one tensor.
        parameter_count: numbers in its parameters and buffers.
        sets: the input sets that reach the member that stands for all.
        calls: calls of all members.
        parents, children: keys of pieces.
        order: place in the execution order.
        notes: what was noticed while recording (train mode, in-place writes, random results).
    """

    key: str
    class_name: str
    qualified_name: str
    path: str
    paths: tuple[str, ...]
    depth: int
    source: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    parameters: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    parameter_count: int = 0
    sets: tuple[int, ...] = ()
    calls: int = 1
    parents: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    order: int = 0
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`32 x LlamaAttention`, or the class alone when there is one."""
        return f"{len(self.paths)} x {self.class_name}" if len(self.paths) > 1 else self.class_name


@dataclass(frozen=True)
class ErrorRecord:
    """Why an attempt failed.

    Attributes:
        kind: class of the exception.
        message: one line.
        hint: what to do next, or "".
        detail: the whole account (traceback without machine paths), for whoever wants it.
    """

    kind: str
    message: str
    hint: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Metrics:
    """How far one output of one input set is from PyTorch's.

    Attributes:
        name: the output.
        set_index: the input set.
        passed: within `allowed`.
        max_abs: largest absolute error.
        relative: `max_abs` over the root mean square of the reference.
        snr_db: 10 log10 of signal power over error power; infinite when equal.
        cosine: cosine of the angle between the two.
        allowed: the largest absolute error that passes.
        own_error: largest absolute error of PyTorch itself in this element type, against float64; None when unknown.
        top1_agreement, kl: for logits, share of rows with the same arg max, mean Kullback-Leibler divergence (nats).
        reason: why it cannot pass whatever the values (shape, element type), or "".
    """

    name: str
    set_index: int
    passed: bool
    max_abs: float
    relative: float
    snr_db: float
    cosine: float
    allowed: float
    own_error: float | None = None
    top1_agreement: float | None = None
    kl: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} (set {self.set_index}): {self.reason}"
        return (
            f"{self.name} (set {self.set_index}): max abs {self.max_abs:.3g}, max abs / rms {self.relative:.3g}, "
            f"SNR {self.snr_db:.1f} dB, allowed {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class Verdict:
    """What came of one piece.

    Attributes:
        key: the piece.
        path: the member that was tried.
        outcome: how it went.
        stage: where it failed; the last stage reached when it did not; None when it was not tried.
        isolated: its children were replaced by what they returned when recorded: only its own code was tried.
        error: why it failed.
        operator: the guilty operator (`aten.foo.default`), or "".
        module_path: the module whose forward calls it, relative to the root.
        source: `file.py:line` of the guilty line in the model's code, or "".
        unsupported: every operator of the piece that has no translation, with its source line.
        metrics: a record per output and input set, once the comparison is reached.
        seconds: of the attempt.
        peak_rss: bytes that the attempt's processes held at most, beyond what the caller held already.
        stage_seconds: seconds per stage, by the stage's name.
        engine_nodes: nodes of the engine's optimised graph, or None.
        suggestions: options that make it pass, or hints.
        notes: what else was noticed.
        repro_path: folder of the stand-alone reproduction, or "".
        cached: taken over from an earlier run.
    """

    key: str
    path: str
    outcome: Outcome
    stage: Stage | None = None
    isolated: bool = False
    error: ErrorRecord | None = None
    operator: str = ""
    module_path: str = ""
    source: str = ""
    unsupported: tuple[str, ...] = ()
    metrics: tuple[Metrics, ...] = ()
    seconds: float = 0.0
    peak_rss: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    engine_nodes: int | None = None
    suggestions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    repro_path: str = ""
    cached: bool = False

    @property
    def failed(self) -> bool:
        """Whether it was tried and failed."""
        return self.outcome is Outcome.FAILED

    @property
    def worst(self) -> Metrics | None:
        """The comparison furthest beyond (or nearest to) what is allowed."""
        return max(self.metrics, key=_badness, default=None)


def reached(start: Iterable[str], beyond: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield some keys and all that can be reached from them, each once."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            yield key
            waiting.extend(beyond(key))


def _badness(metrics: Metrics) -> float:
    if metrics.reason or math.isnan(metrics.max_abs):
        return math.inf
    return metrics.max_abs / metrics.allowed if metrics.allowed > 0 else (math.inf if metrics.max_abs else 0.0)


@dataclass(frozen=True)
class Axis:
    """One dynamic axis.

    Attributes:
        leaf: input of the root, such as `input_ids`.
        axis: its number.
        size: as text in named symbols: `S`, `S+P`.
        sizes: what it was in each input set.
    """

    leaf: str
    axis: int
    size: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class AxisReport:
    """The symbolic sizes of a recording.

    Attributes:
        symbols: each symbol and its size in each input set (None where the set does not tell).
        axes: every dynamic axis of the root's inputs.
        warnings: axes that are 0 or 1 everywhere, matches by accident, sets of equal shapes.
    """

    symbols: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    axes: tuple[Axis, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Culprit:
    """One fault: failing pieces that have nothing failing inside, with the same stage, operator and message.

    Attributes:
        pieces: the pieces, in execution order.
        verdicts: their verdicts, in the same order.
        own_code: the children all pass: the fault is in the code of the module itself.
    """

    pieces: tuple[Piece, ...]
    verdicts: tuple[Verdict, ...]
    own_code: bool = False

    @property
    def piece(self) -> Piece:
        """The first of the pieces."""
        return self.pieces[0]

    @property
    def verdict(self) -> Verdict:
        """Its verdict."""
        return self.verdicts[0]

    @property
    def source(self) -> str:
        """The guilty line, or where the guilty module's forward is defined."""
        return self.verdict.source or self.piece.source

    @property
    def sentence(self) -> str:
        """The fault in one line: what, which stage, which operator, where."""
        verdict, piece = self.verdict, self.piece
        operator = f" at {verdict.operator}" if verdict.operator else ""
        own = ", in its own code" if self.own_code else ""
        where = piece.path or "(root)"
        more = f" and {len(piece.paths) - 1} more" if len(piece.paths) > 1 else ""
        return f"{piece.class_name} ({where}{more}) fails to {verdict.stage}{operator}{own}: {self.source}"


Keyed = TypeVar("Keyed", Piece, Verdict)


@dataclass(frozen=True)
class Diagnosis:
    """All that was found out.

    Attributes:
        model: class of the root.
        target: the target, as text.
        strategy: `whole`, `failing`, `leaves`, `isolate` or `numerics`.
        pieces: in execution order of their first call, parents before children.
        verdicts: one per piece, in the same order.
        isolated: verdicts of pieces that were tried again with their children replaced by recorded results.
        axes: the symbolic sizes.
        unexercised: paths of modules that no input set reaches.
        warnings: what was noticed while recording.
        seconds: of the whole diagnosis.
        interrupted: it was stopped; pieces without a verdict are `not tried`.
        versions: of PyTorch, the engine and this package.
    """

    model: str
    target: str
    strategy: str
    pieces: tuple[Piece, ...]
    verdicts: tuple[Verdict, ...]
    isolated: tuple[Verdict, ...] = ()
    axes: AxisReport = field(default_factory=AxisReport)
    unexercised: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something was tried and nothing failed."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        return Outcome.OK in outcomes and Outcome.FAILED not in outcomes and not self.interrupted

    def piece(self, key: str) -> Piece:
        """Return the piece of a key.

        Raises:
            DiagnosisError: there is none.
        """
        return self._keyed(self.pieces, key)

    def verdict(self, key: str) -> Verdict:
        """Return the verdict of a piece.

        Raises:
            DiagnosisError: there is none.
        """
        return self._keyed(self.verdicts, key)

    def _keyed(self, records: Iterable[Keyed], key: str) -> Keyed:
        found = next((record for record in records if record.key == key), None)
        if found is None:
            raise DiagnosisError(f"the diagnosis of {self.model} has nothing with the key {key!r}.")
        return found

    def children(self, key: str | None = None) -> tuple[Piece, ...]:
        """Return the pieces directly inside one, or the roots for None; for printing a tree."""
        if key is None:
            return tuple(piece for piece in self.pieces if not piece.parents)
        return tuple(piece for piece in self.pieces if piece.key in self.piece(key).children)

    def tree(self) -> Iterator[tuple[int, Piece, Verdict]]:
        """Yield (level, piece, verdict), each piece once, under the first parent that leads to it."""
        seen: set[str] = set()
        verdicts = {verdict.key: verdict for verdict in self.verdicts}

        def walk(pieces: Sequence[Piece], level: int) -> Iterator[tuple[int, Piece, Verdict]]:
            for piece in pieces:
                if piece.key not in seen:
                    seen.add(piece.key)
                    yield level, piece, verdicts[piece.key]
                    yield from walk(self.children(piece.key), level + 1)

        yield from walk(self.children(), 0)

    def culprits(self) -> tuple[Culprit, ...]:
        """Return the faults, in execution order: failing pieces with nothing failing inside, equal failures together."""
        verdicts = {verdict.key: verdict for verdict in self.verdicts}
        isolated = {verdict.key: verdict for verdict in self.isolated}
        groups: dict[tuple[object, ...], list[tuple[Piece, Verdict, bool]]] = {}
        for piece in self.pieces:
            verdict = verdicts[piece.key]
            if not verdict.failed or any(verdicts[key].failed for key in self._below(piece.key)):
                continue
            alone = isolated.get(piece.key)
            own_code = alone is not None and alone.failed
            told = alone if alone is not None and alone.failed else verdict
            group = groups.setdefault(_fault_of(told), [])
            group.append((piece, told, own_code))
        return tuple(
            Culprit(tuple(item[0] for item in group), tuple(item[1] for item in group), all(item[2] for item in group))
            for group in groups.values()
        )

    def _below(self, key: str) -> set[str]:
        children = {piece.key: piece.children for piece in self.pieces}
        return set(reached(children[key], children.__getitem__)) - {key}

    def ranking(self) -> tuple[tuple[Piece, Verdict], ...]:
        """Return the pieces that were compared, the largest local error for what is allowed first.

        A piece in which another one fails comes after those that have nothing failing inside: its error is the other's.
        """
        verdicts = {verdict.key: verdict for verdict in self.verdicts}
        compared = [(piece, verdicts[piece.key]) for piece in self.pieces if verdicts[piece.key].metrics]
        explained = {piece.key for piece, _ in compared if any(verdicts[key].failed for key in self._below(piece.key))}
        return tuple(sorted(compared, key=lambda item: (item[0].key in explained, -_worst(item[1]))))

    def with_repro_paths(self, paths: Mapping[str, str]) -> Diagnosis:
        """Return the same diagnosis with the folders of reproductions, by key of the piece."""

        def told(verdict: Verdict) -> Verdict:
            return replace(verdict, repro_path=paths.get(verdict.key, verdict.repro_path))

        verdicts = tuple(told(verdict) if verdict.failed else verdict for verdict in self.verdicts)
        return replace(self, verdicts=verdicts, isolated=tuple(map(told, self.isolated)))

    def raise_if_failed(self) -> None:
        """Do nothing when all is well.

        Raises:
            DiagnosisError: something failed; the message has a line per fault.
        """
        culprits = self.culprits()
        if culprits:
            faults = "; ".join(culprit.sentence for culprit in culprits)
            hint = culprits[0].verdict.error.hint if culprits[0].verdict.error else ""
            raise DiagnosisError(f"{self.model}: {faults}.", hint or None)

    def to_json(self) -> str:
        """Return all of it as JSON (`schema_version` 1); infinities are null."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **plain(self)}, indent=2) + "\n"

    def write_json(self, path: Path) -> Path:
        """Write `to_json()` to a file, whole or not at all."""
        return write_whole(path, self.to_json())

    @staticmethod
    def from_json(text: str) -> Diagnosis:
        """Read what `to_json` wrote.

        Raises:
            ArchiveError: it is something else.
        """
        try:
            content = json.loads(text)
            version = content.pop("schema_version")
            if version != SCHEMA_VERSION:
                raise ArchiveError(f"the diagnosis has schema version {version}, this release reads {SCHEMA_VERSION}.")
            diagnosis: Diagnosis = built(Diagnosis, content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArchiveError(f"the text is no diagnosis: {type(error).__name__}: {error}.") from None
        return diagnosis


def _worst(verdict: Verdict) -> float:
    worst = verdict.worst
    return 0.0 if worst is None else _badness(worst)


def _fault_of(verdict: Verdict) -> tuple[object, ...]:
    """Return what two equal faults have in common."""
    if verdict.stage is Stage.COMPARE or verdict.error is None:
        return verdict.stage, verdict.operator, verdict.source or verdict.key
    if verdict.source:
        return verdict.stage, verdict.operator, verdict.source, verdict.error.kind
    return verdict.stage, verdict.operator, verdict.error.kind, verdict.error.message


__all__ = [
    "Axis",
    "AxisReport",
    "Culprit",
    "Diagnosis",
    "DiagnosisError",
    "ErrorRecord",
    "Leaf",
    "LeafKind",
    "Metrics",
    "Outcome",
    "Piece",
    "Stage",
    "Verdict",
    "reached",
]
