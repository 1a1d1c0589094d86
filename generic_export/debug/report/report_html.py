"""A diagnosis as one self-contained HTML file: the faults, then the tree of pieces with errors, source lines and timings.

In: a `Diagnosis`. Out: text of a page that needs no other file, no network and no script to be read.
"""

from __future__ import annotations

import math

from generic_export.compare.comparison import Comparison
from generic_export.debug.diagnosis import Diagnosis
from generic_export.debug.records import Outcome, Piece, Stage, Verdict
from generic_export.pages import render
from generic_export.sizes import seconds_text

# outcome -> (its look, sign for those who do not see colours)
_LOOKS = {
    Outcome.OK: ("good", "✓"),
    Outcome.FAILED: ("bad", "✗"),
    Outcome.COVERED: ("info", "⊂"),
    Outcome.NOT_EXERCISED: ("none", "–"),
    Outcome.NOT_TRIED: ("none", "…"),
}
_FAILS = {
    Stage.CAPTURE: "cannot be captured",
    Stage.TRANSLATE: "cannot be translated",
    Stage.WRITE: "cannot be written",
    Stage.LOAD: "is refused by the engine",
    Stage.RUN: "fails in the engine",
    Stage.COMPARE: "computes something else than PyTorch",
    None: "fails",
}
_MOST_PATHS = 12


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as a web page."""
    counts = [(outcome, sum(verdict.outcome is outcome for verdict in diagnosis.verdicts)) for outcome in Outcome]
    counts = [(outcome, count) for outcome, count in counts if count]
    culprits = diagnosis.culprits()
    modules = sum(len(piece.paths) for piece in diagnosis.pieces)
    return render(
        __package__,
        "diagnosis.html.j2",
        title=f"Diagnosis of {diagnosis.model}",
        diagnosis=diagnosis,
        culprits=culprits,
        ended=_ended(diagnosis, len(culprits)),
        figures=[("pieces", len(diagnosis.pieces)), ("modules", modules), ("faults", len(culprits)), *counts],
        shares=[(_LOOKS[outcome][0], count, f"{outcome}: {count}") for outcome, count in counts],
        anchors={piece.key: f"p{number}" for number, piece in enumerate(diagnosis.pieces, 1)},
        isolated={verdict.key: verdict for verdict in diagnosis.isolated},
        longest=max((verdict.seconds for verdict in diagnosis.verdicts), default=0.0),
        looks=_LOOKS,
        fails=_FAILS,
        most=_MOST_PATHS,
        words=_words,
        decibel=_decibel,
        stage_times=_stage_times,
        used_by=lambda symbol: [f"{axis.leaf}[{axis.axis}]" for axis in diagnosis.axes.axes if axis.size == symbol],
    )


def _ended(diagnosis: Diagnosis, faults: int) -> tuple[str, str]:
    """Return how it ended: a look, and words."""
    if diagnosis.interrupted:
        return "bad" if faults else "none", "interrupted: not everything was tried"
    if faults:
        return "bad", f"✗ {faults} fault{'s' if faults > 1 else ''}"
    return ("good", "✓ everything that was tried passes") if diagnosis.ok else ("none", "nothing was tried")


def _words(piece: Piece, verdict: Verdict) -> str:
    """Return what a row is found by."""
    line = verdict.source or piece.source
    words = (piece.class_name, *piece.paths, verdict.operator, line, verdict.outcome, verdict.stage)
    return " ".join(map(str, words)).lower()


def _stage_times(verdict: Verdict) -> list[tuple[str, float, str]]:
    """Return the parts of a bar."""
    return [
        (f"s{index}", 1000 * seconds, f"{stage} {seconds_text(seconds)}")
        for index, stage in enumerate(Stage)
        if (seconds := verdict.stage_seconds.get(str(stage))) is not None
    ]


def _decibel(found: Comparison) -> str:
    if found.reason or math.isnan(found.snr_db):
        return "?"
    return "exact" if math.isinf(found.snr_db) and found.snr_db > 0 else f"{found.snr_db:.0f} dB"


__all__ = ["diagnosis_html"]
