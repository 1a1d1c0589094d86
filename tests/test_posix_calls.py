"""The table of docs/contributing/platforms.md names every call of the packages that POSIX alone has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("generic_export", "quant", "kvcache", "t2n_llm")
HEADING = "## Calls that POSIX alone has"

# Windows has some of these, but they do less there.
_MORE_MODULES = {"readline"}
_MORE_NAMES = {"os": {"getppid"}}
_METHODS = {"chmod", "chown", "symlink", "symlink_to", "hardlink_to", "mkfifo", "lchmod"}  # of `os`, and of `Path`
_LIBRARY = {
    "CDLL",
    "fallocate64",
    "mallopt",
    "malloc_trim",
    "prctl",
    "renameat2",
    "sync_file_range",
}  # of the C library
_WORDS = {"fork", "forkserver", "sysctl"}  # whole strings: how multiprocessing starts a process; a program
_FOLDERS = ("/proc", "/dev/", "/sys/")  # how strings begin


@cache
def _absent() -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """Return the modules, and the names of modules, that the stand-in for Windows takes away."""
    source = (ROOT / "tests" / "like_windows" / "sitecustomize.py").read_text(encoding="utf-8")
    values = {
        target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = values["ABSENT_NAMES"]
    assert isinstance(names, ast.Dict)
    by_module = {
        key.id: frozenset(value.value.split()) | _MORE_NAMES.get(key.id, set())
        for key, value in zip(names.keys, names.values, strict=True)
        if isinstance(key, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    return frozenset(ast.literal_eval(values["ABSENT_MODULES"])) | _MORE_MODULES, by_module


def calls(source: str) -> Iterator[str]:
    """Yield the words of POSIX that stand in Python code; comments and docstrings do not count."""
    modules, names = _absent()
    every = frozenset().union(*names.values())
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from modules & {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                yield from modules & {module}
                yield from names.get(module, frozenset()) & {alias.name for alias in node.names}
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in names.get(module, ()):
                yield name
            case ast.Attribute(attr=name) if name in _METHODS | _LIBRARY:
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield from (every | _LIBRARY) & {name}
            case ast.Constant(value=str(text)) if text in _WORDS:
                yield text
            case ast.Constant(value=str(text)) if text.startswith(_FOLDERS):
                yield next(folder for folder in _FOLDERS if text.startswith(folder))


def rows(page: str) -> list[tuple[str, set[str]]]:
    """Return the rows of the table: the call, and its files."""
    _, found, section = page.partition(HEADING + "\n")
    assert found, f"docs/contributing/platforms.md has no heading {HEADING!r}"
    lines = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [(call, set(re.findall(r"`([^`]+)`", files))) for _, call, files, *_ in lines[2:]]


def missing(sources: dict[str, str], table: list[tuple[str, set[str]]]) -> list[str]:
    """Return `word: file` for what no row of the table names."""
    return sorted(
        f"{word}: {file}"
        for file, source in sources.items()
        for word in set(calls(source))
        if not any(file in files and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", call) for call, files in table)
    )


def test_the_table_names_every_call() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    table = rows((ROOT / "docs" / "contributing" / "platforms.md").read_text(encoding="utf-8"))
    assert missing(sources, table) == []
    named = {file for _, files in table for file in files}
    assert named - sources.keys() == set(), "the table names files that are not there"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import fcntl", "fcntl"),
        ("def f():\n    from resource import getrusage", "resource"),
        ("from signal import SIGKILL", "SIGKILL"),
        ("os.pwrite(1, b'', 0)", "pwrite"),
        ("getattr(os, 'O_DIRECT', 0)", "O_DIRECT"),
        ("library.mallopt(1, 2)", "mallopt"),
        ("Path(f'/proc/{pid}/status')", "/proc"),
        ("start(method='fork')", "fork"),
        ("'of /proc and SIGKILL'; connection.poll()", None),
    ],
)
def test_a_call_that_the_table_lacks_is_found(source: str, word: str | None) -> None:
    other = [("`os.pwritev`", {"a.py"}), ("`os.pwrite`, `SIGKILL`, `fork`", {"b.py"})]
    assert missing({"a.py": source}, other) == ([f"{word}: a.py"] if word else [])
    assert missing({"a.py": source}, [(f"`{word}`", {"a.py"})]) == []
