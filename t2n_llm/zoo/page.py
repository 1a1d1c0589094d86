"""The zoo as one HTML page: the last run, what changed since the one before, and how all of them went.

In: the runs of a history folder. Out: text of a page that needs no server, no network and no other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from generic_export.pages import render
from generic_export.pages.chart import Chart, Line, line_chart
from t2n_llm.zoo.expectations import Expected, reason_of, row_for
from t2n_llm.zoo.history import KINDS, Run, Tally, compare_runs
from t2n_llm.zoo.tables import by_architecture, column_title, dtypes_of
from t2n_llm.zoo.verdict import (
    CRASHED,
    FAILED,
    MEMORY,
    NOT_RUNNABLE,
    OUTCOMES,
    OVER,
    RIGHT,
    TIMEOUT,
    WRONG,
    CellVerdict,
)

_LOOKS = {
    RIGHT: "good",
    WRONG: "bad",
    FAILED: "warn",
    OVER: "warn",
    TIMEOUT: "odd",
    MEMORY: "odd",
    CRASHED: "odd",
    NOT_RUNNABLE: "none",
}
_CHANGE_LOOKS = {"fixed": "good", "broken": "bad", "moved": "warn"}
_LONGEST_DIFF = 200
_LONGEST_TREND = 60


def page(runs: Sequence[Run], expected: Mapping[str, Expected]) -> str:
    """Return the page.

    Args:
        runs: oldest first; the last one is shown, the one before is what it is compared with.
        expected: reasons of failures, shown beside the run's own messages.
    """
    last = runs[-1] if runs else Run("", ())
    before = runs[-2] if len(runs) > 1 else None
    changes = compare_runs(before.verdicts, last.verdicts) if before else []
    kinds = [change.kind for change in changes]
    shown = runs[-_LONGEST_TREND:]
    architectures = by_architecture(last.verdicts)
    return render(
        __package__,
        "zoo.html.j2",
        title="t2n-llm zoo",
        last=last if runs else None,
        before=before,
        dtypes=dtypes_of(last.verdicts),
        cards=_cards(last),
        runs=len(shown),
        trend=_trend(shown),
        kinds=", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds),
        changes=changes[:_LONGEST_DIFF],
        architectures=architectures,
        reasons={name: _reasons(cells.values(), expected) for name, cells in architectures.items()},
        looks=_LOOKS,
        change_looks=_CHANGE_LOOKS,
    )


def _cards(run: Run) -> list[tuple[str, Tally, list[tuple[str, int, str]]]]:
    """Return title, count and bar of each task and element type."""
    return [
        (column_title(task, dtype), part.tally(dtype), _shares(part, dtype))
        for task in run.tasks
        for part in [run.of_task(task)]
        for dtype in dtypes_of(part.verdicts)
    ]


def _shares(run: Run, dtype: str) -> list[tuple[str, int, str]]:
    """Return the outcomes of an element type as parts of a bar."""
    outcomes = [verdict.outcome for verdict in run.verdicts if verdict.dtype == dtype]
    return [
        (_LOOKS[outcome], count, f"{count} {outcome}") for outcome in OUTCOMES if (count := outcomes.count(outcome))
    ]


def _reasons(cells: Iterable[CellVerdict], expected: Mapping[str, Expected]) -> list[str]:
    """Return why cells are not right, the same reason once."""
    told = [reason_of(cell, row_for(cell, expected)) for cell in cells if cell.outcome != RIGHT]
    return list(dict.fromkeys(told))


def _trend(runs: Sequence[Run]) -> Chart:
    """Draw how many cells were right, run after run, a line per task and element type."""
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    parts = {task: [run.of_task(task) for run in runs] for task in tasks}
    tallies = {
        column_title(task, dtype): [run.tally(dtype) for run in parts[task]]
        for task in tasks
        for dtype in dtypes_of(verdict for run in parts[task] for verdict in run.verdicts)
    }
    lines = [
        Line(
            title,
            tuple(
                (index, tally.right, f"{runs[index].name}: {tally.right} of {tally.runnable}, {title}")
                for index, tally in enumerate(row)
                if tally.total
            ),
        )
        for title, row in tallies.items()
    ]
    top = max((tally.runnable for row in tallies.values() for tally in row), default=0) or 1
    grid = [(part * top, f"{part * top:.0f}") for part in (0, 0.5, 1)]
    ends = {index: runs[index].name[:10] for index in (0, len(runs) - 1)} if runs else {}
    return line_chart("right cells over the runs", lines, grid, list(ends.items()))
