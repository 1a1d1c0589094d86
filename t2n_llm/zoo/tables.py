"""A run as text: one row per architecture, in Markdown (docs/measurements/models.md) or for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.expectations import Expected, reason_of, row_for
from t2n_llm.zoo.full_size import table as full_size_table
from t2n_llm.zoo.history import Run
from t2n_llm.zoo.verdict import COLUMNS, FULL_SIZE, NOT_RUNNABLE, RIGHT, SUITE_COLUMNS, CellVerdict

ZOO_TABLE, FULL_SIZE_TABLE = "zoo table", "full-size table"


def dtypes_of(verdicts: Iterable[CellVerdict]) -> list[str]:
    """Return the columns of a run, element types first, in the usual order."""
    present = {verdict.dtype for verdict in verdicts}
    return [dtype for dtype in COLUMNS if dtype in present]


def by_architecture(verdicts: Iterable[CellVerdict]) -> dict[str, dict[str, CellVerdict]]:
    """Return the verdicts by what the architecture is called among all tasks and element type, sorted."""
    rows: dict[str, dict[str, CellVerdict]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.row, {})[verdict.dtype] = verdict
    return dict(sorted(rows.items()))


def full_size_markdown(run: Run, expected: Mapping[str, Expected]) -> str:
    """Return the table of default configs in Markdown, "" when the run has none."""
    rows = [verdict for verdict in run.verdicts if verdict.dtype == FULL_SIZE]
    if not rows:
        return ""
    reasons = (
        *_reasons("Cases that exceed the limit or fail", rows, expected, runnable=True),
        *_reasons("Configs that transformers does not build", rows, expected, runnable=False),
    )
    return "\n".join([*_versions(run), *full_size_table(rows), *reasons]) + "\n"


def column_title(task: str, dtype: str) -> str:
    """Return what an element type of a task is called: by its own name where text is generated."""
    return dtype if task == TEXT_GENERATION else f"{task}, {dtype}"


def summary(run: Run) -> list[str]:
    """Return one line per task and element type: how many are right, and what became of the others."""
    return [line for task in run.tasks for line in _summary(run.of_task(task), task)]


def _summary(run: Run, task: str) -> list[str]:
    lines = []
    for dtype in dtypes_of(run.verdicts):
        tally = run.tally(dtype)
        others = Counter(
            f"{verdict.outcome} [{verdict.stage}]"
            for verdict in run.verdicts
            if verdict.dtype == dtype and verdict.outcome not in (RIGHT, NOT_RUNNABLE)
        )
        rest = "".join(f", {count} {outcome}" for outcome, count in others.most_common())
        right = "within the bar" if dtype == FULL_SIZE else "right"
        host, rows = ("PyTorch", "modules") if dtype in SUITE_COLUMNS else ("transformers", "architectures")
        lines.append(
            f"{column_title(task, dtype)}: {tally.right} {right} of {tally.runnable} that run in {host} "
            f"(of {tally.total} {rows}){rest}"
        )
    return lines


def table_name(task: str) -> str:
    """Return what the table of a task is called in a document."""
    return ZOO_TABLE if task == TEXT_GENERATION else f"{ZOO_TABLE}, {task}"


def markdown(run: Run, expected: Mapping[str, Expected]) -> str:
    """Return the tables of a run in Markdown, "" when it has full sizes alone.

    Args:
        run: what was found, of one task.
        expected: rows with reasons, used instead of the run's own messages.
    """
    tiny = Run(run.name, tuple(verdict for verdict in run.verdicts if verdict.dtype != FULL_SIZE))
    return "\n".join(_markdown_lines(tiny, expected)) + "\n" if tiny.verdicts or not run.verdicts else ""


def replace_table(document: str, table: str, name: str = ZOO_TABLE) -> str:
    """Put a table between the marks of its name in a document; at its end where it has none."""
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = document.partition(start)
    after = rest.partition(end)[2] if found else ""
    lead = before if found or not before else before.rstrip() + "\n\n"
    return f"{lead}{start}\n\n{table}\n{end}{after or chr(10)}"


def _versions(run: Run) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    yield f"Measured with {versions}." if versions else "Measured with unknown versions."
    yield ""


def _markdown_lines(run: Run, expected: Mapping[str, Expected]) -> Iterator[str]:
    yield from _versions(run)
    for line in summary(run):
        yield f"* {line}"
    columns = dtypes_of(run.verdicts)
    rows = by_architecture(run.verdicts)
    yield ""
    if run.tasks in ((), (TEXT_GENERATION,)):
        yield "✓: right in all four checks, with the largest error of a logit. The checks that an engine or torch fact"
    else:
        yield "✓: right in all checks, with the largest error of a value. The checks that an engine or torch fact"
    yield "prevents are named with it below."
    yield ""
    yield "| architecture | class | " + " | ".join(columns) + " |"
    yield "|---|---|" + "---|" * len(columns)
    for cells in rows.values():
        name = next(iter(cells.values())).architecture
        class_name = next((cell.class_name for cell in cells.values() if cell.class_name), "")
        yield f"| `{name}` | {class_name} | " + " | ".join(_mark(cells.get(dtype)) for dtype in columns) + " |"
    yield from _reasons("Cases that fail", run.verdicts, expected, runnable=True)
    yield from _reasons("Architectures that transformers does not run", run.verdicts, expected, runnable=False)


def _mark(verdict: CellVerdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.outcome == RIGHT:
        return f"✓ {verdict.max_abs_error:.0e}" if verdict.max_abs_error is not None else "✓"
    return "–" if verdict.outcome == NOT_RUNNABLE else f"**{verdict.outcome}** ({verdict.stage})"


def _reasons(
    title: str, verdicts: Sequence[CellVerdict], expected: Mapping[str, Expected], *, runnable: bool
) -> Iterator[str]:
    rows = [
        verdict
        for verdict in sorted(verdicts, key=lambda verdict: (verdict.architecture, COLUMNS.index(verdict.dtype)))
        if verdict.outcome != RIGHT and (verdict.outcome != NOT_RUNNABLE) == runnable
    ]
    # One line for the same reason in several element types.
    merged: dict[tuple[str, str, str], list[str]] = {}
    for verdict in rows:
        reason = reason_of(verdict, row_for(verdict, expected))
        merged.setdefault((verdict.architecture, verdict.stage, reason), []).append(verdict.dtype)
    if not merged:
        return
    yield ""
    yield f"### {title}"
    yield ""
    yield "| architecture | | stage | reason |"
    yield "|---|---|---|---|"
    for (name, stage, reason), dtypes in merged.items():
        yield f"| `{name}` | {', '.join(dtypes)} | {stage} | {_escaped(reason)} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
