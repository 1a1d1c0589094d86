"""`Diagnosis`: all that was found out about a model, its faults, and the way to JSON and back.

In: records of pieces and verdicts. Out: what reports read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from generic_export.debug.records import AxisReport, Outcome, Piece, Stage, Verdict, built, plain, reached
from generic_export.errors import ArchiveError, T2NError
from generic_export.files import write_whole

SCHEMA_VERSION = 1

_HEADINGS = ("piece", "where", "verdict", "seconds")


class DiagnosisError(T2NError):
    """A diagnosis found parts of the model that do not export, or export and are wrong."""


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
    return 0.0 if worst is None else worst.share_of_allowed


def _fault_of(verdict: Verdict) -> tuple[object, ...]:
    """Return what two equal faults have in common."""
    if verdict.stage is Stage.COMPARE or verdict.error is None:
        return verdict.stage, verdict.operator, verdict.source or verdict.key
    if verdict.source:
        return verdict.stage, verdict.operator, verdict.source, verdict.error.kind
    return verdict.stage, verdict.operator, verdict.error.kind, verdict.error.message


# A diagnosis for a terminal: the pieces as an indented table, then the faults with what to do about each.
# In: a `Diagnosis`. Out: text.
def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return the report: a line per piece, the faults, what was noticed."""
    sections = [
        _table(diagnosis),
        _faults(diagnosis.culprits()),
        _listed("axes", _axis_lines(diagnosis)),
        _listed("not exercised", diagnosis.unexercised),
        _listed("warnings", (*diagnosis.axes.warnings, *diagnosis.warnings)),
    ]
    return "\n\n".join([_summary(diagnosis), *(section for section in sections if section)]) + "\n"


def _summary(diagnosis: Diagnosis) -> str:
    count = len(diagnosis.culprits())
    found = f"{count} fault{'s' if count != 1 else ''}" if count else "no fault"
    stopped = ", interrupted" if diagnosis.interrupted else ""
    return (
        f"{diagnosis.model} for {diagnosis.target}: {found} in {len(diagnosis.pieces)} pieces "
        f"(strategy {diagnosis.strategy}, {diagnosis.seconds:.1f} s{stopped})"
    )


def _table(diagnosis: Diagnosis) -> str:
    rows = [_row(level, piece, verdict) for level, piece, verdict in diagnosis.tree()]
    widths = [max(len(row[column]) for row in [_HEADINGS, *rows]) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [_HEADINGS, *rows]
    )


def _row(level: int, piece: Piece, verdict: Verdict) -> tuple[str, ...]:
    more = f" (+{len(piece.paths) - 1})" if len(piece.paths) > 1 else ""
    seconds = f"{verdict.seconds:.1f}" if verdict.seconds else ""
    return "  " * level + piece.label, (piece.path or "(root)") + more, _outcome(verdict), seconds


def _outcome(verdict: Verdict) -> str:
    text = str(verdict.outcome)
    if verdict.failed:
        text = f"{text}: {verdict.stage}"
    worst = verdict.worst
    if worst is not None and not worst.reason:
        text = f"{text} (SNR {worst.snr_db:.0f} dB)"
    return f"{text} (from an earlier run)" if verdict.cached else text


def _faults(culprits: Sequence[Culprit]) -> str:
    return "\n\n".join(f"{number}. " + "\n   ".join(_fault(fault)) for number, fault in enumerate(culprits, 1))


def _fault(culprit: Culprit) -> Iterator[str]:
    verdict = culprit.verdict
    yield culprit.sentence
    if len(culprit.pieces) > 1:
        yield "the same in " + ", ".join(piece.path or "(root)" for piece in culprit.pieces[1:])
    if verdict.error is not None:
        yield str(verdict.error)
        if verdict.error.hint:
            yield verdict.error.hint
    if verdict.unsupported:
        yield "operators without a translation: " + ", ".join(verdict.unsupported)
    for suggestion in verdict.suggestions:
        yield f"try: {suggestion}"
    if verdict.repro_path:
        yield f"reproduction: {verdict.repro_path}"


def _axis_lines(diagnosis: Diagnosis) -> list[str]:
    lines: dict[str, list[str]] = {}
    for axis in diagnosis.axes.axes:
        lines.setdefault(axis.size, []).append(f"{axis.leaf}[{axis.axis}]")
    return [f"{size}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" for size, places in lines.items()]


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)]) if lines else ""


__all__ = ["SCHEMA_VERSION", "Culprit", "Diagnosis", "DiagnosisError", "diagnosis_text"]
