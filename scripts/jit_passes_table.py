#!/usr/bin/env python3
"""Write the table of hardening passes on silero_vad.jit: what each changed, and how many nodes the graph has behind it.

usage: scripts/jit_passes_table.py [--script FILE] [--document docs/how-to/torchscript.md]

FILE is by default where `scripts/fetch_test_models.py silero-vad` puts it. The table goes to stdout, or with --document
between the two `jit_passes_table` marks of that file. Constants are not counted; nodes in branches and loops are.
Needs the project's environment (scripts/test makes it): .venv/bin/python scripts/jit_passes_table.py
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fetch_test_models import SILERO_FILE, SILERO_NAME, default_output

BEGIN, END = "<!-- jit_passes_table: begin -->", "<!-- jit_passes_table: end -->"


@dataclass(frozen=True)
class Case:
    """One script that is hardened.

    Attributes:
        title: of its columns.
        script: the ScriptModule.
        args: its example inputs.
        freeze: whether it is frozen first.
    """

    title: str
    script: Any
    args: tuple[Any, ...]
    freeze: bool = True


@dataclass(frozen=True)
class Row:
    """What a stage did to a graph: changes, nodes left, and how many of those are an `if`."""

    stage: str
    changes: str
    nodes: int
    branches: int


def default_script() -> Path:
    """Return where the fetching script puts the model."""
    return default_output() / SILERO_NAME / SILERO_FILE


def cases(file: Path) -> list[Case]:
    """Load the model and return what is hardened: the whole of it, and the part that has its state as an input."""
    import torch

    model = torch.jit.load(file).eval()
    whole = (torch.zeros(1, 512), 16000)
    part = (torch.zeros(1, 576), torch.zeros(2, 1, 128))
    return [
        Case("whole model", model, whole),
        Case("`_model`", model._model, part),
        Case("`_model`, not frozen", model._model, part, freeze=False),
    ]


def rows(case: Case) -> Iterator[Row]:
    """Harden a script stage by stage and yield what each did."""
    from generic_export.torchscript.harden.chain import stages
    from generic_export.torchscript.harden.edits import node_count, nodes_of

    start = case.script.inlined_graph
    yield Row("as loaded, calls inlined", "", node_count(start), len(nodes_of(start, "prim::If")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which branches the example inputs took
        for stage in stages(case.script, case.args, freeze=case.freeze):
            if stage.name == "froze" and not stage.changes:
                continue
            graph = stage.script.graph
            changes = "" if stage.name == "froze" else str(stage.changes)
            name = "`torch.jit.freeze`" if stage.name == "froze" else f"`{stage.name}`"
            yield Row(name, changes, node_count(graph), len(nodes_of(graph, "prim::If")))


def table(found: list[Case]) -> str:
    """Return the table in Markdown: a row per stage, and for each case changes, nodes and `if`s left."""
    columns = [{row.stage: row for row in rows(case)} for case in found]
    order = list(dict.fromkeys(name for name in max(columns, key=len)))
    names = [*order[:1], *(name for column in columns for name in column if name not in order), *order[1:]]
    lines = [
        "| stage | " + " | ".join(f"{case.title}: changes | nodes | `if`s" for case in found) + " |",
        "|---|" + "---:|" * (3 * len(found)),
    ]
    for name in names:
        cells = []
        for column in columns:
            row = column.get(name)
            cells += ["", "", ""] if row is None else [row.changes, str(row.nodes), str(row.branches)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_into(document: Path, text: str) -> None:
    """Put the table between the marks of a document.

    Raises:
        ValueError: the document has no such marks.
    """
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document}: no {BEGIN} and {END} in it")
    document.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--script", type=Path, metavar="FILE", default=None, help="silero_vad.jit")
    parser.add_argument("--document", type=Path, metavar="FILE", default=None, help="document that holds the table")
    options = parser.parse_args(arguments)
    file = options.script or default_script()
    if not file.is_file():
        print(f"error: {file}: not there. Run scripts/fetch_test_models.py silero-vad.", file=sys.stderr)
        return 1
    text = table(cases(file))
    try:
        if options.document is None:
            print(text, end="")
        else:
            write_into(options.document, text)
    except (OSError, ValueError) as error:
        print(f"error: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
