"""Options that had another name in the last release: they work with a warning.

In: the words of a command line. Out: the same with today's names, and a warning for each that changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RENAMED: Mapping[str, Mapping[str, str]] = {
    "bench": {"--checkpoint": "--reference"},
    "diagnose": {"--out": "--output", "--memory": "--max-memory", "--depth": "--max-depth"},
    "profile": {"--past": "--depth"},
    "zoo run": {"--engine": "--runner"},
}
"""Today's names by command and earlier name; removed with the next release."""

_JSON_TOOK_A_FILE = ("coverage", "diagnose")
_JSON, _JSON_FILE, _STDOUT = "--json", "--json-file", "-"


def with_current_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with today's options, and a warning for each option that was renamed.

    Args:
        words: of the command line, without the program.
    """
    start = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    named = " ".join(words[start : start + 2])
    command = named if named in RENAMED else named.partition(" ")[0]
    renamed = RENAMED.get(command, {})
    current, warnings = list(words), []
    for place, word in enumerate(words[start:], start):
        flag, equals, value = word.partition("=")
        if flag in renamed:
            current[place] = f"{renamed[flag]}{equals}{value}"
            warnings.append(f"{flag} of {command} was renamed to {renamed[flag]}.")
    if command in _JSON_TOOK_A_FILE:
        warnings += _json_to_a_file(current, start + 1)
    return current, warnings


def _json_to_a_file(words: list[str], start: int) -> list[str]:
    """Turn `--json -` and, behind the model, `--json FILE` into what they are called today, in place."""
    for place in range(start, len(words)):
        flag, equals, value = words[place].partition("=")
        if flag != _JSON:
            continue
        follows = words[place + 1] if not equals and place + 1 < len(words) else value
        if follows == _STDOUT:
            words[place : place + (1 if equals else 2)] = [_JSON]
            return ["--json no longer takes a value; it prints."]
        if equals or (follows and not follows.startswith("-") and place > start):
            words[place : place + (1 if equals else 2)] = [_JSON_FILE, follows]
            return ["--json FILE was renamed to --json-file FILE."]
    return []
