#!/usr/bin/env python3
"""Write docs/measurements/models.md from results of the zoo: figures and exceptions there, all architectures in CSV files.

usage: scripts/models_tables.py [RESULTS.jsonl ...] [--document docs/measurements/models.md]

The results are files of `t2n-llm zoo run --results FILE`. The CSV files lie beside the document, named after their table, and
docs/reference/supported-models.md lists what passes. Without results, tables with a row per architecture that the document has are
moved to CSV files.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from t2n_llm.zoo.expectations import read_expected  # noqa: E402
from t2n_llm.zoo.history import Run, read_results  # noqa: E402
from t2n_llm.zoo.tables import FULL_SIZE_TABLE, ZOO_TABLE, full_size_markdown, markdown, replace_table  # noqa: E402

SUPPORTED = ROOT / "docs" / "reference" / "supported-models.md"
SUPPORTED_TABLE = "supported models"
DOCUMENT = ROOT / "docs" / "measurements" / "models.md"
FILES = {ZOO_TABLE: "models.csv", FULL_SIZE_TABLE: "models-full-size.csv"}

# A table whose rows are architectures and whose second column is no list of element types: the reasons keep their place.
_ROWS = re.compile(r"^\| architecture \| (?:class|layers) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_LEGEND = re.compile(r"^✓: .*\n(?:prevents .*\n)?\n", re.MULTILINE)


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
        for name, table in ((ZOO_TABLE, markdown(run, expected)), (FULL_SIZE_TABLE, full_size_markdown(run, expected))):
            text = replace_table(text, table, name) if table else text
        options.document.write_text(text, encoding="utf-8")
    split_document(options.document)
    if options.document == DOCUMENT:
        list_supported((DOCUMENT.parent / FILES[ZOO_TABLE]).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
