"""`--help` shows what most users need on two screens, `--help-all` the rest; options of the last release work with a warning."""

from __future__ import annotations

import pytest
from typer.main import get_command

from t2n_llm.cli.app import ADVANCED, RENAMED, app, with_current_names
from tests.load_script import load_script
from tests.t2n_llm.command_line import call

COMMANDS = dict(load_script("cli_reference").commands(get_command(app)))
TWO_SCREENS = 64
WORDS = 12


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_two_screens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(call(*name.split()[1:], "--help").out.splitlines()) <= TWO_SCREENS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_an_option_is_short(name: str) -> None:
    long = {each.name: each.help for each in COMMANDS[name].params if len((each.help or "").split()) > WORDS}
    assert not long


def test_all_options_are_shown_when_asked_for() -> None:
    short, everything = call("export", "--help").out, call("export", "--help-all").out
    assert "--kv-cache" not in short and "--kv-cache" in everything
    assert "--compress" in short and "--help-all shows" in short and "--help-all shows" not in everything
    assert everything.count("<bool>") == 1  # of --help itself


def test_advanced_options_are_options() -> None:
    by_word = {name.split()[-1]: command for name, command in COMMANDS.items()}
    for word, hidden in ADVANCED.items():
        assert hidden <= {each.name for each in by_word[word].params}


def test_renamed_options_are_options() -> None:
    for name, names in RENAMED.items():
        flags = {flag for each in COMMANDS[f"t2n-llm {name}"].params for flag in each.opts}
        assert set(names.values()) <= flags


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("profile DIR --past 3", "profile DIR --depth 3"),
        ("bench DIR --checkpoint=x --depth 4", "bench DIR --reference=x --depth 4"),
        ("--debug zoo run --engine ray", "--debug zoo run --runner ray"),
        ("diagnose M --out d --memory 1GB --depth 2", "diagnose M --output d --max-memory 1GB --max-depth 2"),
        ("coverage M --json -", "coverage M --json"),
        ("coverage M --json=-", "coverage M --json"),
        ("diagnose M --json r.json --tiny", "diagnose M --json-file r.json --tiny"),
    ],
)
def test_names_of_the_last_release_become_those_of_today(before: str, now: str) -> None:
    words, warnings = with_current_names(before.split())
    assert words == now.split() and warnings


@pytest.mark.parametrize(
    "line", ["coverage --json config.json", "diagnose M --json --tiny", "profile DIR --depth 3", "zoo diff a b"]
)
def test_names_of_today_stay(line: str) -> None:
    assert with_current_names(line.split()) == (line.split(), [])


def test_a_renamed_option_warns() -> None:
    outcome = call("profile", "/nowhere", "--past", "3")
    assert outcome.code == 2 and "--past of profile was renamed to --depth" in outcome.err
