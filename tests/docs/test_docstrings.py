"""Every public name has a docstring that describes each of its parameters.

Public are the names on the pages of docs/api, and those that the packages list in `__all__`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

from tests.docs.pages import DOCS

_PACKAGES = ("generic_export", "generic_export.detection", "kvcache", "quant", "t2n_llm")
_DIRECTIVE = re.compile(r"^::: ([\w.]+)(?:\n(?: .*\n)*? +members: \[(.*)\])?", re.MULTILINE)
# Options whose fields carry their descriptions, for the command line too.
_DESCRIBED_FIELDS = ("CheckingOptions", "CompressionOptions", "ExportOptions", "GraphOptions")


def _names() -> set[str]:
    found: set[str] = set()
    for page in sorted((DOCS / "api").glob("*.md")):
        for name, members in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found |= {f"{name}.{member.strip()}" for member in members.split(",")} if members else {name}
    return found | {f"{package}.{name}" for package in _PACKAGES for name in import_module(package).__all__}


def _resolved(name: str) -> Any:
    module, _, member = name.rpartition(".")
    try:
        return import_module(name)
    except ImportError:
        return getattr(import_module(module), member)


def _objects() -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions of this project among the public names, and the public methods of the classes."""
    for name in sorted(_names()):
        value = _resolved(name)
        inside = (
            [each for each in vars(value).values() if inspect.isclass(each)] if inspect.ismodule(value) else [value]
        )
        for each in inside:
            if (
                not (inspect.isclass(each) or inspect.isfunction(each))
                or each.__module__.split(".")[0] not in _PACKAGES
            ):
                continue
            yield each.__qualname__, each
            members = vars(each).items() if inspect.isclass(each) else ()
            for member, defined in members:
                function = inspect.unwrap(getattr(defined, "__func__", getattr(defined, "fget", None)) or defined)
                # `dataclass` and `enum` make methods that nobody wrote.
                if inspect.isfunction(function) and not member.startswith("_") and _is_written(function):
                    yield f"{each.__qualname__}.{member}", function


def _is_written(function: Any) -> bool:
    return function.__module__.split(".")[0] in _PACKAGES and "<" not in function.__code__.co_filename


def _parameters(value: Any) -> set[str]:
    if getattr(value, "_is_protocol", False):
        return set()
    if inspect.isclass(value) and (issubclass(value, (enum.Enum, Exception)) or value.__name__ in _DESCRIBED_FIELDS):
        return set()
    if inspect.isclass(value) and not is_dataclass(value) and "__init__" not in vars(value):
        return set()  # protocols, and classes whose base class describes the arguments
    function = value.__init__ if inspect.isclass(value) and not is_dataclass(value) else value
    found = inspect.signature(inspect.unwrap(function) if inspect.isfunction(function) else function).parameters
    if hasattr(function, "__signature__"):  # options by name, which stand for `**choices`
        (definition,) = ast.parse(inspect.getsource(inspect.unwrap(function))).body
        assert isinstance(definition, ast.FunctionDef)
        arguments = definition.args
        return {each.arg for each in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg) if each is not None}
    return {name for name in found if name not in ("self", "cls") and not name.startswith("_")}


_OBJECTS = dict(_objects())


def test_there_are_public_names() -> None:
    assert len(_OBJECTS) > 150


@pytest.mark.parametrize("name", sorted(_OBJECTS))
def test_it_describes_every_parameter(name: str) -> None:
    text = inspect.getdoc(_OBJECTS[name]) or ""
    first = text.split("\n", 1)[0]
    assert first.endswith((".", ":")), f"{name}: the docstring begins with one sentence on one line: {first!r}"
    sections = re.split(r"^(?:Args|Attributes):\n", text, flags=re.MULTILINE)[1:]
    described = set(re.findall(r"^    (\w+):", "\n".join(sections), re.MULTILINE))
    missing = _parameters(_OBJECTS[name]) - described
    assert not missing, f"{name}: Args does not describe {', '.join(sorted(missing))}"
