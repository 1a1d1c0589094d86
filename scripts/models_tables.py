#!/usr/bin/env python3
"""Write docs/measurements/models.md from results of the zoo: figures and exceptions there, all architectures in CSV files.

usage: scripts/models_tables.py [RESULTS.jsonl ...] [--document docs/measurements/models.md]

The results are files of `t2n-llm zoo run --results FILE`. The CSV files lie beside the document, named after their table, and
docs/reference/supported-models.md lists what passes. Without results, tables with a row per architecture that the document has are
moved to CSV files. Cases of suites, and tasks of one pass, go to modules.csv, and are counted in the document.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from t2n_llm.zoo.expectations import Expected, read_expected, reason_of, row_for  # noqa: E402
from t2n_llm.zoo.history import Run, read_results  # noqa: E402
from t2n_llm.zoo.suites.case import STATIC  # noqa: E402
from t2n_llm.zoo.suites.registry import LIBRARIES, cases_of, encoder_tasks  # noqa: E402
from t2n_llm.zoo.tables import FULL_SIZE_TABLE, ZOO_TABLE, full_size_markdown, markdown, replace_table  # noqa: E402
from t2n_llm.zoo.verdict import NOT_RUNNABLE, RIGHT, CellVerdict  # noqa: E402

SUPPORTED = ROOT / "docs" / "reference" / "supported-models.md"
SUPPORTED_TABLE = "supported models"
MODULES_TABLE, MODULES = "modules table", "modules.csv"
DOCUMENT = ROOT / "docs" / "measurements" / "models.md"
FILES = {ZOO_TABLE: "models.csv", FULL_SIZE_TABLE: "models-full-size.csv"}

# A table whose rows are architectures and whose second column is no list of element types: the reasons keep their place.
_ROWS = re.compile(r"^\| architecture \| (?:class|layers) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_LEGEND = re.compile(r"^✓: .*\n(?:prevents .*\n)?\n", re.MULTILINE)


def modules_csv(verdicts: Iterable[CellVerdict], expected: Mapping[str, Expected]) -> str:
    """Return a row for each module of a library: its axes, the sizes compared, what became of it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "suite",
            "module",
            "class",
            "axes",
            "compared at",
            "outcome",
            "error, of the largest value",
            "export (CPU s)",
            "reason",
        ]
    )
    for each in sorted(verdicts, key=lambda each: (each.task, each.architecture, each.dtype)):
        error = f"{max(check.max_abs_error / check.scale for check in each.checks.values()):.1e}" if each.checks else ""
        seconds = f"{each.processor_seconds:.1f}" if each.processor_seconds else ""
        reason = "" if each.outcome == RIGHT else reason_of(each, row_for(each, expected))
        compared = "; ".join(each.checks)
        writer.writerow(
            [each.task, each.architecture, each.class_name, _axes(each), compared, each.outcome, error, seconds, reason]
        )
    return out.getvalue()


def _axes(verdict: CellVerdict) -> str:
    """Return the axes that are dynamic; those of a task's inputs are in docs/how-to/tasks.md."""
    if verdict.task not in LIBRARIES:
        return "of the task"
    if verdict.dtype == STATIC:
        return STATIC
    case = cases_of(verdict.task)[verdict.architecture]
    symbols = dict.fromkeys(size for given in case.inputs.values() for size in given.shape if isinstance(size, str))
    factors = {symbol: case.multiples.get(symbol, 1) for symbol in symbols}
    return " ".join(symbol if factor == 1 else f"{symbol} ({factor}n)" for symbol, factor in factors.items())


def modules_table(verdicts: Sequence[CellVerdict], expected: Mapping[str, Expected]) -> str:
    """Return a row for each suite: how many modules, and how many are right with static and with dynamic axes."""
    lines = ["| Suite | Modules | Static axes | Dynamic axes | Not right |", "|---|---|---|---|---|"]
    tried = [each for each in verdicts if each.outcome != NOT_RUNNABLE]
    for suite in dict.fromkeys(_suite(each) for each in tried):
        rows = [each for each in tried if _suite(each) == suite]
        columns = [
            [each for each in rows if (each.dtype == STATIC) is static] for static in (True, False)
        ]  # a task's archives have dynamic axes
        right = [
            f"{sum(each.outcome == RIGHT for each in column)} of {len(column)}" if column else "" for column in columns
        ]
        wrong = dict.fromkeys(f"`{each.architecture}`" for each in rows if each.outcome != RIGHT)
        library = next((f" {each.versions[suite]}" for each in rows if suite in each.versions), "")
        count = len({each.row for each in rows})
        lines.append(f"| {suite}{library} | {count} | {right[0]} | {right[1]} | {', '.join(wrong)} |")
    return "\n".join([*lines, "", f"[{MODULES}]({MODULES}) has the sizes, errors, times and reasons."]) + "\n"


def _suite(verdict: CellVerdict) -> str:
    return verdict.task if verdict.task in LIBRARIES else f"encoders, {len(encoder_tasks())} tasks"


def split_table(text: str, file: str) -> tuple[str, str]:
    """Return a table of the zoo with a link in the place of its rows, and the rows as CSV; "" where it has none."""
    found = _ROWS.search(text)
    if found is None:
        return text, ""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in found[0].splitlines():
        if not line.startswith("|--"):
            writer.writerow([re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|")])
    short = f"[{file}]({file}) has every architecture.\n"
    return _LEGEND.sub("", text[: found.start()]) + short + text[found.end() :], out.getvalue()


def split_document(document: Path) -> None:
    """Move the rows of the tables of a document to CSV files beside it."""
    text = document.read_text(encoding="utf-8")
    for name, file in FILES.items():
        found = re.search(rf"<!-- {name}: begin -->\n\n(.*?)\n<!-- {name}: end -->", text, re.DOTALL)
        if found is None:
            continue
        short, rows = split_table(found[1], file)
        if rows:
            (document.parent / file).write_text(rows, encoding="utf-8")
            text = replace_table(text, short, name)
    document.write_text(text, encoding="utf-8")


def supported(rows: str) -> list[str]:
    """Return the architectures of models.csv that pass in every column."""
    _, *found = csv.reader(io.StringIO(rows))
    return [name for name, _, *marks in found if all(mark.startswith("✓") for mark in marks)]


def list_supported(rows: str, page: Path = SUPPORTED) -> None:
    """Write the architectures that pass into the page of supported models."""
    names = ", ".join(f"`{name}`" for name in supported(rows))
    page.write_text(replace_table(page.read_text(encoding="utf-8"), f"{names}.\n", SUPPORTED_TABLE), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/measurements/models.md.")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    if options.results:
        run, expected = Run("results", tuple(read_results(options.results))), read_expected()
        text = options.document.read_text(encoding="utf-8")
        of_modules = {*LIBRARIES, *encoder_tasks()}
        modules = [verdict for verdict in run.verdicts if verdict.task in of_modules]
        others = Run(run.name, tuple(verdict for verdict in run.verdicts if verdict.task not in of_modules))
        tables = {
            ZOO_TABLE: markdown(others, expected) if others.verdicts else "",
            FULL_SIZE_TABLE: full_size_markdown(others, expected),
            MODULES_TABLE: modules_table(modules, expected) if modules else "",
        }
        for name, table in tables.items():
            text = replace_table(text, table, name) if table else text
        if modules:
            (options.document.parent / MODULES).write_text(modules_csv(modules, expected), encoding="utf-8")
        options.document.write_text(text, encoding="utf-8")
    split_document(options.document)
    if options.document == DOCUMENT:
        list_supported((DOCUMENT.parent / FILES[ZOO_TABLE]).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
