#!/usr/bin/env python3
"""Run the smoke set (scripts/dialect_smoke.py) in every installed engine and release; write docs/measurements/compatibility.md.

The section that scripts/compatibility_versions.py measures is kept.

In: the wheel of each release, fetched where there is a network, and the command. Out: a table module x engine, with
the reason for everything that does not pass; exit code 1 when a module that the dialect accepts is wrong somewhere.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import dialect_smoke as smoke
import torch
from compatibility_versions import SECTION
from dialect_smoke import Outcome, SmokeCase, judge
from table_source import commit

from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.dialect import RELEASES
from generic_export.inference_target.tract.releases.install import TRACT_CLI_VERSION
from generic_export.inference_target.tract.releases.wheels import wheel_packages

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "measurements" / "compatibility.md"
_TIMEOUT_SECONDS = 30.0
_MARKS = {"passed": "✓", "refused": "refused", "failed": "**wrong**"}


@dataclass(frozen=True)
class Column:
    """One engine of one release.

    Attributes:
        title: heading of the column.
        version: the release that is exported for.
        engine: the engine, or why there is none.
    """

    title: str
    version: str
    engine: TractWheel | TractCli | str


def columns(versions: Sequence[str]) -> list[Column]:
    """Return a column per wheel, and one for the command."""
    found = [Column(f"wheel {version}", version, _engine(version)) for version in versions]
    if TRACT_CLI_VERSION in versions:
        found.append(Column(f"command {TRACT_CLI_VERSION}", TRACT_CLI_VERSION, _engine()))
    return found


def _engine(wheel: str | None = None) -> TractWheel | TractCli | str:
    """Return the wheel of a release, or the command; why there is none."""
    try:
        if wheel is None:
            return TractCli(timeout_seconds=_TIMEOUT_SECONDS)
        return TractWheel(timeout_seconds=_TIMEOUT_SECONDS, packages=wheel_packages(wheel))
    except EngineMissingError as error:
        return str(error)


def document(table: Sequence[Column], cases: Sequence[SmokeCase], found: Mapping[tuple[str, str], Outcome]) -> str:
    """Return docs/measurements/compatibility.md."""
    return "\n".join(_lines(table, cases, found)) + "\n"


def _lines(
    table: Sequence[Column], cases: Sequence[SmokeCase], found: Mapping[tuple[str, str], Outcome]
) -> Iterator[str]:
    yield "# Compatibility"
    yield ""
    yield "## Releases of tract"
    yield ""
    yield (
        f"Each of {len(cases)} modules is exported for a tract release (`TractNNEF(version=...)`), run in that release at two "
        "sizes, and compared with PyTorch (dtypes exactly, values within 1e-4)."
    )
    yield ""
    yield "✓ passed; *refused*: the release lacks an operator, and the export reports it; **wrong**: anything else."
    yield ""
    yield (
        f"Source: `scripts/compatibility.py`; commit {commit()}, PyTorch {torch.__version__.split('+')[0]} on "
        f"{platform.machine()}, {date.today().isoformat()}."
    )
    yield ""
    yield "| module | " + " | ".join(column.title for column in table) + " |"
    yield "|---|" + "---|" * len(table)
    for case in cases:
        marks = (_MARKS[found[case.name, column.title].status] for column in table)
        yield f"| {case.name} | " + " | ".join(marks) + " |"
    counts = (sum(found[case.name, column.title].status == "passed" for case in cases) for column in table)
    yield "| **passed** | " + " | ".join(f"{count} of {len(cases)}" for count in counts) + " |"
    for status, title in (("refused", "Refused"), ("failed", "Wrong")):
        rows = _reasons(table, cases, found, status)
        if rows:
            yield ""
            yield f"### {title}"
            yield ""
            yield from rows


def _reasons(
    table: Sequence[Column], cases: Sequence[SmokeCase], found: Mapping[tuple[str, str], Outcome], status: str
) -> list[str]:
    outcomes = ((column.title, found[case.name, column.title]) for case in cases for column in table)
    return [f"* {outcome.case}, {title}: {outcome.reason}" for title, outcome in outcomes if outcome.status == status]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the document; see --help."""
    parser = argparse.ArgumentParser(prog="compatibility", description="Write docs/measurements/compatibility.md.")
    parser.add_argument("--versions", nargs="+", default=list(RELEASES), help="releases (default: %(default)s)")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="where to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    cases = [case for case in smoke.CASES if options.only in case.name]
    table = columns(options.versions)
    missing = [f"{column.title}: {column.engine}" for column in table if isinstance(column.engine, str)]
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 2
    found: dict[tuple[str, str], Outcome] = {}
    for column in table:
        assert not isinstance(column.engine, str)
        for case in cases:
            outcome = found[case.name, column.title] = judge(case, column.version, column.engine)
            print(f"{column.title}: {case.name}: {outcome.status} {outcome.reason}", flush=True)
    kept = options.output.read_text(encoding="utf-8").partition(SECTION) if options.output.exists() else ("", "", "")
    written = [document(table, cases, found), *(["\n", *kept[1:]] if kept[1] else [])]
    options.output.write_text("".join(written), encoding="utf-8")
    return int(any(outcome.status == "failed" for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
