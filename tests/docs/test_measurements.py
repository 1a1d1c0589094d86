"""Every table of measurements states its source: a script or command that is there, a commit, a machine and a date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_COMMAND = re.compile(r"`(scripts/[\w.]+|t2n-llm)[^`]*`")
_SOURCE = re.compile(r"^Source: (.*)$", re.MULTILINE)
_COMMIT = re.compile(r"\bcommits? [0-9a-f]{7}\b")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


@pytest.mark.parametrize("page", pages.measurement_pages(), ids=pages.name_of)
def test_tables_have_a_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = list(_TABLE.finditer(text))
    assert tables
    for table in tables:
        # In its section; a page that has one source has it at its beginning.
        section = text[: table.start()].rfind("\n## ") if len(_SOURCE.findall(text)) > 1 else 0
        assert _SOURCE.search(text, max(section, 0), table.start()), f"no source before {table[0].splitlines()[0]}"


@pytest.mark.parametrize("page", pages.measurement_pages(), ids=pages.name_of)
def test_sources_are_complete(page: Path) -> None:
    for source in _SOURCE.findall(page.read_text(encoding="utf-8")):
        commands = _COMMAND.findall(source)
        assert commands, source
        assert all(command == "t2n-llm" or (pages.ROOT / command).is_file() for command in commands), source
        assert _COMMIT.search(source), source
        assert _DATE.search(source), source
        assert re.search(r"EPYC|Xeon|H100|x86_64", source), source
