"""Code of the documentation: Python runs, commands parse, and every option is described."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from t2n_llm.cli.app import app
from tests.docs import pages
from tests.load_script import load_script

PAGES = [*pages.user_pages(), *pages.examples()]
# Their blocks run in tests of their own, which compare what they print.
TESTED_ELSEWHERE = ("remodel.md", "piece-by-piece.md", "torchscript.md")
LANGUAGES = {"bash", "python", "py", "text", "yaml", "toml", "json"}
# Options of other programs, in the text of user pages.
OF_OTHERS = {"--llm", "--pulse", "--transform", "--readings", "--debug", "--version", "--install-completion"} | {
    "--show-completion"
}
COMMANDS: dict[str, Any] = dict(load_script("cli_reference").commands(get_command(app)))
_CODE_OPTION = re.compile(r"`[^`]*?(--[a-z][\w-]+)[^`]*`")


def options(command: Any) -> set[str]:
    """Return the options of a command, hidden ones included."""
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts) if flag.startswith("-")}


def lines(page: Path) -> list[str]:
    """Return the lines of the shell that a page shows, continued ones joined."""
    shown = [block.code for block in pages.blocks(page) if block.language == "bash"]
    return [line for code in shown for line in code.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_blocks_have_a_language_and_are_fenced(page: Path) -> None:
    assert {block.language for block in pages.blocks(page)} <= LANGUAGES
    outside = pages.without_code(page.read_text(encoding="utf-8"))
    assert not re.search(r"(?:^|\n)\n    \S", re.sub(r"\n!!!.*\n(    .*\n)+", "\n", outside))


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    for line in lines(page):
        for call in re.findall(r"(?:^|\| )(t2n-llm .*?)(?= \| |$)", line):
            words = shlex.split(call, comments=True)
            depth = 3 if " ".join(words[:3]) in COMMANDS else 2
            if words[1].startswith("-"):
                continue
            command = COMMANDS[" ".join(words[:depth])]
            asked = {word.partition("=")[0] for word in words[depth:] if re.match(r"--?[a-zA-Z]", word)}
            assert asked <= options(command), line


def test_options_in_the_text_exist() -> None:
    known = set().union(*(options(command) for command in COMMANDS.values())) | OF_OTHERS
    for page in pages.user_pages():
        text = pages.without_code(page.read_text(encoding="utf-8"))
        assert set(_CODE_OPTION.findall(text)) <= known, page


def test_every_option_is_described_outside_of_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (*PAGES, pages.DOCS / "contributing" / "zoo.md"))
    described = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
    missing = {
        f"{name} {each.opts[0]}"
        for name, command in COMMANDS.items()
        for each in command.params
        if each.opts[0].startswith("--") and not each.hidden and not described & {*each.opts, *each.secondary_opts}
    }
    assert not missing


def test_the_reference_has_every_option_and_keeps_brackets() -> None:
    text = load_script("cli_reference").reference()
    assert all(f"## {name}\n" in text for name in COMMANDS)
    assert all(f"`{flag}`" in text for command in COMMANDS.values() for flag in options(command) - {"--help"})
    assert "t2n-llm[plot]" in text


RUN = [
    page
    for page in PAGES
    if page.name not in TESTED_ELSEWHERE
    and any(block.language == "python" and not block.skipped and not block.executed for block in pages.blocks(page))
]


@pytest.mark.parametrize("page", RUN, ids=pages.name_of)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled_export: Path) -> None:
    """A page is one namespace, in a folder with the examples and an export of the bundled model."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny").symlink_to(bundled_export)
    (tmp_path / "examples").symlink_to(pages.ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    if "export_llm" in page.read_text(encoding="utf-8"):
        (tmp_path / "out" / "tiny").unlink()
    names: dict[str, object] = {"__name__": "docs"}
    for block in pages.blocks(page):
        if block.language == "python" and not block.skipped and not block.executed:
            exec(compile(block.code, str(page), "exec"), names)
