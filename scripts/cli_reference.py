#!/usr/bin/env python3
"""Print the reference of the command line in Markdown, as the site shows it: every command with its options.

usage: scripts/cli_reference.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from typer.main import get_command  # noqa: E402

from t2n_llm.cli.app import app  # noqa: E402

_KINDS = {int: "N", float: "X", str: "TEXT"}


def commands(command: Any, name: str = "t2n-llm") -> Iterator[tuple[str, Any]]:
    """Yield every command that is not hidden, by the words that call it."""
    inside = getattr(command, "commands", None)
    if inside is None:
        if not command.hidden:
            yield name, command
        return
    for word, child in inside.items():
        if not child.hidden:
            yield from commands(child, f"{name} {word}")


def reference() -> str:
    """Return the reference in Markdown."""
    return "\n".join(line for name, command in commands(get_command(app)) for line in _section(name, command))


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if _is_argument(each)]
    options = [each for each in command.params if each not in arguments and not getattr(each, "hidden", False)]
    yield f"## {name}"
    yield ""
    yield from (_escaped(line.strip()) for line in (command.help or "").splitlines())
    yield ""
    yield "```bash"
    yield " ".join((name, *(_argument(each) for each in arguments), "[OPTIONS]"))
    yield "```"
    yield ""
    if not options:
        return
    yield "| Option | Default | Description |"
    yield "|---|---|---|"
    for each in options:
        yield f"| {_flags(each)} | {_default(each)} | {_escaped(each.help or '')} |"
    yield ""


def _is_argument(parameter: Any) -> bool:
    return str(parameter.param_type_name) == "argument"


def _argument(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required else f"[{word}]"


def _flags(option: Any) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return (
        flags if option.is_flag else f"{flags} {_escaped(option.metavar or _KINDS.get(type(option.default), 'VALUE'))}"
    )


def _default(option: Any) -> str:
    value = option.default
    if value is None or option.is_flag or callable(value) or value in ((), []):
        return ""
    return f"`{', '.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    print(reference())
