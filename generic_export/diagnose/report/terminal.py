"""A diagnosis for a terminal: the pieces as an indented table, then the faults with what to do about each.

In: a `Diagnosis`. Out: text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from generic_export.diagnose.diagnosis import Culprit, Diagnosis
from generic_export.diagnose.records import Piece, Verdict

_HEADINGS = ("piece", "where", "verdict", "seconds")


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
        f"{diagnosis.model} for {diagnosis.target}: {found} in {len(diagnosis.pieces)} modules (strategy "
        f"{diagnosis.strategy}, {diagnosis.seconds:.1f} s{stopped})"
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


__all__ = ["diagnosis_text"]
