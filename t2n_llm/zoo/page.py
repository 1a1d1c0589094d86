"""The zoo as one HTML page: the last run, what changed since the one before, and how all of them went.

In: the runs of a history folder. Out: text of a page that needs no server, no network and no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from t2n_llm.zoo.compare import KINDS, Change, compare_runs
from t2n_llm.zoo.expectations import Expected, reason_of
from t2n_llm.zoo.history import Run
from t2n_llm.zoo.page_style import SCRIPT, STYLE
from t2n_llm.zoo.tables import by_architecture, dtypes_of
from t2n_llm.zoo.verdict import NOT_RUNNABLE, OUTCOMES, RIGHT, CellVerdict

_WIDTH, _HEIGHT = 640, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 60, 12, 24
_LONGEST_DIFF = 200
_OPEN_DIFF = 30
_LONGEST_TREND = 60


def page(runs: Sequence[Run], expected: Mapping[str, Expected]) -> str:
    """Return the page.

    Args:
        runs: oldest first; the last one is shown, the one before is what it is compared with.
        expected: reasons of failures, shown beside the run's own messages.
    """
    return "\n".join(_page(list(runs), expected)) + "\n"


def _page(runs: list[Run], expected: Mapping[str, Expected]) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"><title>t2n-llm zoo</title>'
    yield f"<style>{STYLE}</style></head><body><main>"
    if not runs:
        yield "<h1>t2n-llm zoo</h1><p>No run yet.</p></main></body></html>"
        return
    last = runs[-1]
    versions = " · ".join(f"{escape(name)} {escape(text)}" for name, text in last.versions.items() if text)
    yield f"<header><h1>t2n-llm zoo</h1><p>{escape(last.name.replace('T', ' '))} · {versions}</p></header>"
    yield from _cards(last)
    yield from _trend(runs[-_LONGEST_TREND:])
    if len(runs) > 1:
        yield from _difference(runs[-2], last)
    yield from _grid(last, expected)
    yield f"</main><script>{SCRIPT}</script></body></html>"


# --- totals -------------------------------------------------------------------------------------


def _cards(run: Run) -> Iterator[str]:
    yield '<section class="cards">'
    for dtype in dtypes_of(run.verdicts):
        tally = run.tally(dtype)
        share = tally.right / max(1, tally.runnable)
        yield (
            f'<div class="card"><h2>{dtype}</h2><p><b>{tally.right}</b> right of {tally.runnable} '
            f"<small>({share:.0%})</small></p>"
        )
        yield _bar([verdict.outcome for verdict in run.verdicts if verdict.dtype == dtype])
        yield "</div>"
    yield "</section>"


def _bar(outcomes: Sequence[str]) -> str:
    parts = [
        f'<i class="{_css(outcome)}" style="flex:{count}" title="{count} {outcome}"></i>'
        for outcome in OUTCOMES
        if (count := outcomes.count(outcome))
    ]
    legend = ", ".join(f"{count} {outcome}" for outcome in OUTCOMES if (count := outcomes.count(outcome)))
    return f'<div class="bar" role="img" aria-label="{legend}">{"".join(parts)}</div><p class="legend">{legend}</p>'


def _css(outcome: str) -> str:
    return outcome.replace(" ", "-")


# --- history ------------------------------------------------------------------------------------


def _trend(runs: Sequence[Run]) -> Iterator[str]:
    """Draw how many cells were right, run after run, a line per element type."""
    dtypes = dtypes_of(verdict for run in runs for verdict in run.verdicts)
    top = max((run.tally(dtype).runnable for run in runs for dtype in dtypes), default=0) or 1
    yield f"<section><h2>Right, over {len(runs)} runs</h2>"
    yield f'<svg class="trend" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="right cells over the runs">'
    for part in (0, 0.5, 1):
        y = _y(part * top, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{part * top:.0f}</text>'
    for dtype, label_y in zip(
        dtypes, _label_heights([runs[-1].tally(dtype).right for dtype in dtypes], top), strict=True
    ):
        yield from _line(runs, dtype, top, label_y)
    yield f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{escape(runs[0].name[:10])}</text>'
    if len(runs) > 1:
        yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(runs[-1].name[:10])}</text>'
    yield "</svg></section>"


def _line(runs: Sequence[Run], dtype: str, top: int, label_y: float) -> Iterator[str]:
    points = [(_x(i, len(runs)), run) for i, run in enumerate(runs) if run.tally(dtype).total]
    heights = [_y(run.tally(dtype).right, top) for _, run in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for (x, _), y in zip(points, heights, strict=True))
    yield f'<g class="line {dtype}"><polyline points="{path}"/>'
    for (x, run), y in zip(points, heights, strict=True):
        tally = run.tally(dtype)
        text = f"{run.name}: {tally.right} of {tally.runnable}, {dtype}"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>'
    yield f'<text x="{_WIDTH - _RIGHT + 8}" y="{label_y + 4:.1f}">{dtype}</text></g>'


def _x(position: int, count: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (position / (count - 1) if count > 1 else 1.0)


def _y(value: float, top: int) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _label_heights(values: Sequence[int], top: int) -> list[float]:
    """Return where the labels of lines stand: at their ends, 13 apart at least."""
    order = sorted(range(len(values)), key=lambda index: -values[index])
    heights = [0.0] * len(values)
    above = float("-inf")
    for index in order:
        above = heights[index] = max(_y(values[index], top), above + 13)
    return heights


# --- difference ---------------------------------------------------------------------------------


def _difference(before: Run, after: Run) -> Iterator[str]:
    changes = compare_runs(before.verdicts, after.verdicts)
    counts = ", ".join(f"{count} {kind}" for kind in KINDS if (count := sum(c.kind == kind for c in changes)))
    yield f"<section><h2>Since {escape(before.name.replace('T', ' '))}</h2><p>{counts or 'Nothing changed.'}</p>"
    if changes:
        yield f'<details class="changes"{" open" if len(changes) <= _OPEN_DIFF else ""}><summary>cells</summary>'
        yield "<table><thead><tr><th>cell</th><th></th><th>before</th><th>now</th><th></th></tr></thead><tbody>"
        for change in changes[:_LONGEST_DIFF]:
            yield _change(change)
        yield "</tbody></table></details>"
    yield "</section>"


def _change(change: Change) -> str:
    return (
        f'<tr><td><code>{escape(change.key)}</code></td><td><span class="kind {change.kind}">{change.kind}</span></td>'
        f'<td class="ended">{escape(change.before)}</td><td class="ended">{escape(change.after)}</td>'
        f'<td class="message">{escape(change.message)}</td></tr>'
    )


# --- the run ------------------------------------------------------------------------------------


def _grid(run: Run, expected: Mapping[str, Expected]) -> Iterator[str]:
    dtypes = dtypes_of(run.verdicts)
    yield '<section><h2>Architectures</h2><p class="filter"><input id="find" type="search" placeholder="filter by name, '
    yield 'class or reason"> <label><input id="failing" type="checkbox"> only what is not right</label></p>'
    heads = "".join(f"<th>{dtype}</th>" for dtype in dtypes)
    yield f'<table id="zoo"><thead><tr><th>architecture</th>{heads}<th>why</th></tr></thead><tbody>'
    for name, cells in by_architecture(run.verdicts).items():
        yield from _row(name, cells, dtypes, expected)
    yield "</tbody></table></section>"


def _row(
    name: str, cells: Mapping[str, CellVerdict], dtypes: Sequence[str], expected: Mapping[str, Expected]
) -> Iterator[str]:
    class_name = next((cell.class_name for cell in cells.values() if cell.class_name), "")
    right = all(cell.outcome == RIGHT for cell in cells.values())
    yield f'<tr class="{"all-right" if right else ""}"><th><code>{escape(name)}</code><small>{escape(class_name)}</small></th>'
    for dtype in dtypes:
        yield _cell(cells.get(dtype))
    yield '<td class="message">'
    reasons = list(dict.fromkeys(_reason(cell, expected) for cell in cells.values() if cell.outcome != RIGHT))
    yield "".join(f"<p>{escape(reason)}</p>" for reason in reasons)
    yield _details(cells)
    yield "</td></tr>"


def _cell(cell: CellVerdict | None) -> str:
    if cell is None:
        return "<td></td>"
    error = cell.max_abs_error
    figure = f"{error:.1e}" if error is not None else ""
    text = figure if cell.outcome == RIGHT else cell.outcome
    small = "" if cell.outcome in (RIGHT, NOT_RUNNABLE) else f"<small>{escape(cell.stage)}</small>"
    title = f"{cell.outcome}, {cell.seconds:.0f} s, {cell.peak_rss_bytes / 1e6:.0f} MB {figure}"
    return f'<td class="cell {_css(cell.outcome)}" title="{escape(title)}">{escape(text)}{small}</td>'


def _reason(cell: CellVerdict, expected: Mapping[str, Expected]) -> str:
    row = expected.get(cell.key)
    return row.reason if row is not None and row.outcome == cell.outcome else reason_of(cell)


def _details(cells: Mapping[str, CellVerdict]) -> str:
    rows = "".join(
        f"<tr><td>{dtype}</td><td>{escape(name)}</td><td>{check.max_abs_error:.2e}</td><td>{check.scale:.2f}</td>"
        f"<td>{check.same_tokens}/{check.tokens}</td></tr>"
        for dtype, cell in cells.items()
        for name, check in cell.checks.items()
    )
    logs = "".join(f"<pre>{escape(cell.log)}</pre>" for cell in cells.values() if cell.log)
    if not rows and not logs:
        return ""
    head = "<tr><th></th><th>check</th><th>max abs error</th><th>largest logit</th><th>same token</th></tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    return f"<details><summary>checks</summary>{table}{logs}</details>"
