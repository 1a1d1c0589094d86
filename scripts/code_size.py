#!/usr/bin/env python3
"""Measure how large the code is: lines, files, who imports whom, and how many files one export goes through.

usage: scripts/code_size.py [--calls] [--json]

Code lines are those that hold code: no blank lines, comments or docstrings. A small file has fewer than 100 lines, one other file
imports it, and it is no package's `__init__`. --calls also exports a small module and counts the project's files that are entered,
and those that are entered more than once from another file.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from import_graph import PACKAGES, ROOT, ImportGraph, import_graph

_SMALL = 100
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return how many lines of a Python file hold code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - documented)


def sizes(folders: Mapping[str, list[Path]]) -> dict[str, tuple[int, int, int]]:
    """Return files, code lines and all lines of each group of files."""
    found = {}
    for name, files in folders.items():
        texts = [file.read_text() for file in files]
        found[name] = len(files), sum(map(code_lines, texts)), sum(len(text.splitlines()) for text in texts)
    return found


def python_files() -> dict[str, list[Path]]:
    """Return the Python files of each package, of the scripts and of the tests."""
    return {name: sorted((ROOT / name).rglob("*.py")) for name in (*PACKAGES, "scripts", "tests")}


def small_files(graph: ImportGraph) -> list[str]:
    """Return the modules that one other imports, and that are small."""
    importers = Counter(imported for _, imported in graph.arrows)
    return [
        name
        for name, file in graph.files.items()
        if importers[name] == 1 and file.name != "__init__.py" and len(file.read_text().splitlines()) < _SMALL
    ]


def fan_out(graph: ImportGraph) -> tuple[str, int]:
    """Return the module that imports most of the project's, and how many."""
    most = max(graph.files, key=lambda name: len(graph.imports[name]))
    return most, len(graph.imports[most])


def files_of_an_export() -> tuple[int, int]:
    """Return how many of the project's files `export_model_to_nnef` enters, and enters again from another file."""
    import torch

    from generic_export import TractNNEF, export_model_to_nnef

    model, example = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), (torch.randn(2, 4),)
    packages = tuple(str(ROOT / package) for package in PACKAGES)
    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        if event == "call" and file.startswith(packages) and (caller is None or caller.f_code.co_filename != file):
            entered[file] += frame.f_code.co_name != "<module>"

    with tempfile.TemporaryDirectory() as folder:
        target = TractNNEF(dynamic_axes={"x": {0: "B"}}, check_io=False)
        for name in ("warm", "counted"):  # imports are over by the second
            entered.clear()
            sys.setprofile(note)
            try:
                export_model_to_nnef(model, example, Path(folder) / name, target, input_names=["x"])
            finally:
                sys.setprofile(None)
    return len(entered), sum(times > 1 for times in entered.values())


def main() -> None:
    """Print the figures; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="export a module and count the files that it goes through")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    options = parser.parse_args()
    graph, found = import_graph(), sizes(python_files())
    found["four packages"] = tuple(map(sum, zip(*(found[name] for name in PACKAGES), strict=True)))  # type: ignore[assignment]
    module, imports = fan_out(graph)
    figures: dict[str, Any] = {
        "sizes": {name: dict(zip(("files", "code", "text"), each, strict=True)) for name, each in found.items()},
        "small files with one importer": len(small_files(graph)),
        "most imports of one file": {"file": module, "imports": imports},
    }
    if options.calls:
        sys.path.insert(0, str(ROOT))
        figures["files that an export enters"], figures["and enters again"] = files_of_an_export()
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print(f"{'':16}{'files':>8}{'code':>8}{'text':>8}")
    for name, each in found.items():
        print(f"{name:16}{each[0]:8,}{each[1]:8,}{each[2]:8,}")
    for label, figure in list(figures.items())[1:]:
        print(f"{label}: {figure if not isinstance(figure, dict) else ', '.join(map(str, figure.values()))}")


if __name__ == "__main__":
    main()
