#!/usr/bin/env python3
"""Measure which releases of transformers, PyTorch and Python work: one short smoke a cell, in an environment of its own.

usage: scripts/compatibility_versions.py [--transformers 5.22.2 ...] [--torch 2.12.1 ...] [--pythons python3.12 ...]
           [--work DIR] [--results FILE] [--write]

Every release that is named is a cell: that release, and of all others the set of constraints.txt. A cell runs
`scripts/version_smoke --short` in DIR (default .venv-versions, one environment for each Python, kept and changed from cell to
cell) and is a line of FILE (default out/versions.jsonl); a cell whose line is there is not run again. --write puts the
table of FILE into docs/measurements/compatibility.md. Exit code 1 when a cell that pyproject.toml promises did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from table_source import commit

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "measurements" / "compatibility.md"
SECTION = "## Releases of transformers, PyTorch and Python"
TRANSFORMERS = (
    *("5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0"),
)  # the last release of each minor one, from the lowest that pyproject.toml allows
TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
# What goes with one release of these and not with another: pip chooses.
_FOLLOWERS = {"tokenizers", "huggingface-hub"}
# transformers has no part in operators
_SHORT = {"transformers": ("--short", "--no-operators"), "torch": ("--short",), "python": ("--short",)}
_PATIENCE_SECONDS = 3600
_USUAL_PYTHON = "3.11"


@dataclass(frozen=True)
class Cell:
    """One set of versions, named by the package that is not the usual one, and what became of it.

    Attributes:
        package: transformers, torch or python.
        version: the release of it.
        outcome: "passed", "refused" by pip because pyproject.toml does not allow it, "failed", or "not run".
        reason: the first line that says why, empty when it passed.
        versions: all that was installed, by name.
        seconds: the smoke's own time, with what pip took.
    """

    package: str
    version: str
    outcome: str
    reason: str = ""
    versions: Mapping[str, str] | None = None
    seconds: float = 0.0


def constraints(usual: str, package: str, version: str) -> str:
    """Return the text of constraints.txt with one release changed, and without the packages that follow it."""
    free = {package} | (_FOLLOWERS if package == "transformers" else set())
    lines = [line for line in usual.splitlines() if line.partition("==")[0] not in free]
    return "\n".join([*lines, *([f"{package}=={version}"] if package != "python" else []), ""])


def measure(package: str, version: str, python: str, work: Path) -> Cell:
    """Install one set of versions and run the short smoke in it."""
    if shutil.which(python) is None:
        return Cell(package, version, "not run", f"no {python} on this machine")
    work.mkdir(parents=True, exist_ok=True)
    asked = work / f"{package}-{version}.txt"
    asked.write_text(constraints((ROOT / "constraints.txt").read_text(), package, version))
    environment = {**os.environ, "PYTHON": python, "T2N_VENV": str((work / Path(python).name).resolve())}
    environment.pop("PYTHONPATH", None)
    started = time.monotonic()
    done = subprocess.run(
        [ROOT / "scripts" / "version_smoke", *_SHORT[package], asked],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        timeout=_PATIENCE_SECONDS,
    )
    asked.with_suffix(".log").write_text(done.stdout)
    found = dict(re.findall(r"^([A-Za-z_-]+)==(\S+)$", done.stdout, re.MULTILINE))
    seconds = round(time.monotonic() - started, 1)
    if done.returncode == 0:
        return Cell(package, version, "passed", "", found, seconds)
    outcome = "refused" if "ResolutionImpossible" in done.stdout else "failed"
    return Cell(package, version, outcome, reason(done.stdout), found, seconds)


def _is_usual(cell: Cell) -> bool:
    """Say whether a cell is the set of constraints.txt as it is, in the Python that is taken first."""
    if cell.package == "transformers":  # whose cells leave the operators out
        return False
    usual = (ROOT / "constraints.txt").read_text().splitlines()
    return cell.version == _USUAL_PYTHON or f"{cell.package}=={cell.version}" in usual


def reason(said: str) -> str:
    """Return the line of a log that says best why it ended: pip's or our error, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["nothing was said"]
    errors = [line for line in lines if re.match(r"(error|ERROR|[A-Za-z.]*Error)\b", line)]
    return (errors or lines[-1:])[0][:200]


def read_cells(path: Path) -> dict[tuple[str, str], Cell]:
    """Return what was measured, the last word on each cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [Cell(**json.loads(line)) for line in lines]
    return {(cell.package, cell.version): cell for cell in cells}


def section(cells: Mapping[tuple[str, str], Cell]) -> Iterator[str]:
    """Yield the lines of the section of docs/measurements/compatibility.md."""
    yield SECTION
    yield ""
    yield "Each row is a run of `scripts/version_smoke --short` with one release, and constraints.txt of that day for the rest."
    yield "The bundled model is exported and validated, with three families of the zoo; for PyTorch and Python also ten operators."
    yield "*Refused*: pip does not install this combination."
    yield ""
    yield f"Source: `scripts/compatibility_versions.py`; commit {commit()}, {platform.machine()}, {date.today().isoformat()}."
    yield ""
    yield "| package | release | with | smoke |"
    yield "|---|---|---|---|"
    asked = {"transformers": TRANSFORMERS, "torch": TORCH, "python": [name.removeprefix("python") for name in PYTHONS]}
    missing = {(package, version): Cell(package, version, "not run") for package in asked for version in asked[package]}
    for package in asked:
        rows = [cell for cell in (missing | dict(cells)).values() if cell.package == package]
        for cell in sorted(rows, key=lambda row: _order(row.version)):
            yield f"| {package} | {cell.version} | {_beside(cell)} | {_mark(cell)} |"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _beside(cell: Cell) -> str:
    found = {name.lower().replace("_", "-"): version for name, version in (cell.versions or {}).items()}
    names = ("transformers", "torch", *(sorted(_FOLLOWERS) if cell.package == "transformers" else ()))
    return ", ".join(f"{name} {found[name]}" for name in names if name != cell.package and name in found)


def _mark(cell: Cell) -> str:
    return {"passed": "✓", "not run": "not run here", "refused": "*refused*"}.get(
        cell.outcome, f"**{cell.outcome}**: {cell.reason}"
    )


def write_section(document: Path, lines: Sequence[str]) -> None:
    """Put the section at the end of a document, in the place of the one that is there."""
    before = document.read_text(encoding="utf-8").partition(SECTION)[0].rstrip("\n")
    document.write_text("\n".join([before, "", *lines, ""]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are asked for; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--transformers", nargs="*", default=TRANSFORMERS)
    parser.add_argument("--torch", nargs="*", default=TORCH)
    parser.add_argument("--pythons", nargs="*", default=PYTHONS)
    parser.add_argument("--work", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "versions.jsonl")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    usual = next((python for python in ("python3.11", *PYTHONS) if shutil.which(python)), "python3")
    asked = [
        *(("transformers", version, usual) for version in options.transformers),
        *(("torch", version, usual) for version in options.torch),
        *(("python", Path(python).name.removeprefix("python"), python) for python in options.pythons),
    ]
    cells = read_cells(options.results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for package, version, python in asked:
        if (package, version) not in cells:
            same = [cell for cell in cells.values() if _is_usual(cell)] if _is_usual(Cell(package, version, "")) else []
            measured = same[0] if same else measure(package, version, python, options.work)
            cell = cells[package, version] = replace(measured, package=package, version=version)
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
        cell = cells[package, version]
        print(f"{package} {version}: {cell.outcome} {cell.reason} ({cell.seconds:.0f} s)", flush=True)
    if options.write:
        write_section(DOCUMENT, list(section(cells)))
    return int(any(cells[package, version].outcome == "failed" for package, version, _ in asked))


if __name__ == "__main__":
    sys.exit(main())
