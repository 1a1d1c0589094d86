"""Expected failures: a row with a reason for every cell that is not right, and nothing else.

In: the verdicts of a run and `expected.toml`. Out: what is not as expected; both ways count, so that the list shrinks.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError
from t2n_llm.zoo.full_size import is_near_the_bar
from t2n_llm.zoo.verdict import OUTCOMES, OVER, RIGHT, CellVerdict

EXPECTED_FILE = Path(__file__).with_name("expected.toml")
_TYPES_LIKE_F32 = ("f16", "q4_0")
_LONGEST_REASON = 240
_HEADER = """\
# Zoo cases that do not pass, one per line, with the reason. All other cases must pass.
# A run fails if a failing case is missing here, or if a case listed here passes.
# Rewrite the rows of a run's cases: t2n-llm zoo expect RESULTS.jsonl --update
# Reasons written by hand are kept while outcome and stage stay the same.
"""


@dataclass(frozen=True)
class Expected:
    """How a cell fails, and why.

    Attributes:
        outcome: one of `OUTCOMES`, never `right`.
        stage: where; information for the reader, not compared.
        reason: the fact behind it.
    """

    outcome: str
    stage: str
    reason: str


@dataclass(frozen=True)
class Surprise:
    """A cell that did not end as expected.

    Attributes:
        key: `architecture:dtype`, or `task:architecture:dtype`.
        kind: `unexpected pass`, `unexpected failure`, `another failure` or `no such cell`.
        text: what was expected, and what came.
    """

    key: str
    kind: str
    text: str


def read_expected(path: Path = EXPECTED_FILE) -> dict[str, Expected]:
    """Read the rows of an expected-failures file; a file that does not exist has none.

    Raises:
        OptionError: it is malformed.
    """
    if not path.exists():
        return {}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
        return {key: _row(key, row) for key, row in rows.items()}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise OptionError(
            f"{path}: {error}", 'Rows are: "mamba:f32" = { outcome = "failed", stage = "capture", reason = "..." }'
        ) from error


def _row(key: str, row: Mapping[str, Any]) -> Expected:
    expected = Expected(row.get("outcome", ""), row.get("stage", ""), row.get("reason", ""))
    if expected.outcome not in OUTCOMES or expected.outcome == RIGHT:
        raise ValueError(f"{key}: the outcome {expected.outcome!r} is not a failure")
    if not expected.reason.strip():
        raise ValueError(f"{key}: the reason is missing")
    return expected


def surprises(
    verdicts: Iterable[CellVerdict], expected: Mapping[str, Expected], known: Collection[str] | None = None
) -> list[Surprise]:
    """Return what is not as expected.

    Args:
        verdicts: of a run, whole or in part; rows of cells that it did not run are not judged.
        expected: the rows.
        known: what every architecture of every task is called (`rows_of_all`); rows of others are reported. None to leave that out.
    """
    found = [surprise for verdict in verdicts if (surprise := _surprise(verdict, row_for(verdict, expected)))]
    if known is not None:
        gone = [key for key in expected if key.rpartition(":")[0] not in known]
        found += [
            Surprise(key, "no such case", "transformers has no such architecture: remove the row") for key in gone
        ]
    return found


def row_for(verdict: CellVerdict, expected: Mapping[str, Expected]) -> Expected | None:
    """Return the row of a cell; for what is not right in f16 or Q4_0 and has none, the one of f32, whose graph it has."""
    row = expected.get(verdict.key)
    if row is None and verdict.outcome != RIGHT and verdict.dtype in _TYPES_LIKE_F32:
        return expected.get(f"{verdict.key.rpartition(':')[0]}:f32")
    return row


def _surprise(verdict: CellVerdict, row: Expected | None) -> Surprise | None:
    if {verdict.outcome, row.outcome if row else RIGHT} == {RIGHT, OVER} and is_near_the_bar(verdict):
        return None  # as fast as the machine was
    if verdict.outcome == RIGHT:
        return Surprise(verdict.key, "unexpected pass", f"expected {row.outcome}: {row.reason}") if row else None
    if row is None:
        return Surprise(verdict.key, "unexpected failure", f"{verdict.outcome}: {reason_of(verdict)}")
    if row.outcome != verdict.outcome:
        text = f"expected {row.outcome}, got {verdict.outcome}: {reason_of(verdict)}"
        return Surprise(verdict.key, "another failure", text)
    return None


def reason_of(verdict: CellVerdict, row: Expected | None = None) -> str:
    """Return why a cell is not right: the row's reason where it expects that outcome, else the verdict's own words."""
    if row is not None and row.outcome == verdict.outcome:
        return row.reason
    text = verdict.message or (verdict.log.splitlines() or [""])[-1]
    text = " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split()) or "no message"
    named = f"{verdict.error}: {text}" if verdict.error else text
    return named if len(named) <= _LONGEST_REASON else named[: _LONGEST_REASON - 4] + " ..."


def updated(verdicts: Iterable[CellVerdict], expected: Mapping[str, Expected]) -> dict[str, Expected]:
    """Return the rows as a run has them; rows of cells that it did not run stay."""
    rows = dict(expected)
    for verdict in verdicts:
        old = rows.pop(verdict.key, None)
        if verdict.outcome == RIGHT:
            continue
        same = old is not None and (old.outcome, old.stage) == (verdict.outcome, verdict.stage)
        reason = old.reason if same and old is not None else reason_of(verdict)
        rows[verdict.key] = Expected(verdict.outcome, verdict.stage, reason)
    return rows


def write_expected(rows: Mapping[str, Expected], path: Path = EXPECTED_FILE) -> None:
    """Write rows, sorted, one a line."""
    # A JSON string is a TOML basic string as well, as long as it is printable.
    lines = [
        f"{_quoted(key)} = {{ outcome = {_quoted(row.outcome)}, stage = {_quoted(row.stage)}, "
        f"reason = {_quoted(row.reason)} }}"
        for key, row in sorted(rows.items())
    ]
    path.write_text("\n".join([_HEADER, *lines, ""]), encoding="utf-8")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
