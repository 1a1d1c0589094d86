"""An option is written once: a dataclass field with its type, default, help and refusal.

In: frozen dataclasses whose fields are made with `option` (or `options`, for a group of them). Out: the keywords of the
Python interface (`made`, `keywords_of`), the options of the command line (`cli/parameters.py`), and the refusals.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from generic_export.errors import OptionError

_OPTION, _GROUP = "option", "group"

REMOVED: Mapping[str, tuple[str, str]] = {
    "adapter_only": (
        "no command reads an adapter's tensors alone.",
        "Export the base model with --adapter PATH, which merges it.",
    ),
    "budget": ("tuned has no training stage any more; it ends when its layers are quantized.", "Omit it."),
    "calibration_seed": ("calibration uses a fixed seed, so the same text gives the same archive.", "Omit it."),
    "speculate": (
        "speculative decoding takes tokens from the prompt, without a draft model.",
        "Run t2n-llm generate EXPORT --prompt-lookup.",
    ),
}
"""Options of earlier releases, by keyword, and commands: what took their place, and what to do."""

GroupT = TypeVar("GroupT")


class Panel(Enum):
    """Where `--help` shows an option; the first holds what most users need."""

    FIRST = "Options"
    SAMPLING = "Sampling"
    FILES = "Images and sound"
    ENCODER_DECODER = "Encoder-decoders"
    SPEECH = "Speech"
    SOURCE = "Source"
    GRAPH = "Graph and numerics"
    COMPRESSION = "Compression"
    CHECK = "Check"
    OUTPUT = "Output"


@dataclass(frozen=True)
class Declaration:
    """What is said of an option beside its type and default.

    Attributes:
        help: one sentence for `--help`.
        panel: where `--help` shows it.
        keyword: its name in Python; None for the field's own.
        flags: of the command line; none for the keyword with dashes.
        metavar: what stands for its value in `--help`.
        choices: what it may be; None allows anything.
        noun: what it is called when it is refused.
        minimum: the least it may be.
        advice: what to do when it is refused.
    """

    help: str
    panel: Panel
    keyword: str | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    noun: str | None = None
    minimum: float | None = None
    advice: str | None = None


@dataclass(frozen=True)
class Option:
    """An option of a class: what is declared, with its name, type and default.

    Attributes:
        keyword: its name in Python.
        hint: its type.
        default: a value, or `inspect.Parameter.empty` when it must be given.
        declaration: the rest.
    """

    keyword: str
    hint: Any
    default: Any
    declaration: Declaration


def option(default: Any, help: str, panel: Panel = Panel.FIRST, **further: Any) -> Any:
    """Declare a field of a frozen dataclass as an option; see `Declaration` for the arguments."""
    return field(default=default, metadata={_OPTION: Declaration(help, panel, **further)})


def options(group: type[GroupT]) -> GroupT:
    """Declare a field that holds a dataclass of further options; they are given by their own names."""
    made_field: Any = field(default_factory=group, metadata={_GROUP: group})
    return made_field  # type: ignore[no-any-return]  # as dataclasses.field, typed as what it holds


def options_of(group: type) -> Iterator[Option]:
    """Yield the options of a dataclass, those of its groups included, in the order of their fields."""
    hints = get_type_hints(group)
    for each in fields(group):
        if _GROUP in each.metadata:
            yield from options_of(each.metadata[_GROUP])
        elif _OPTION in each.metadata:
            declaration: Declaration = each.metadata[_OPTION]
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            yield Option(declaration.keyword or each.name, hints[each.name], default, declaration)


def made(group: type[GroupT], given: Mapping[str, Any]) -> GroupT:
    """Make a dataclass of options from keywords.

    Args:
        group: the class.
        given: by keyword; text stands for a path, a list for a tuple.

    Raises:
        OptionError: a keyword is unknown or was removed, or a value is refused.
    """
    known = [each.keyword for each in options_of(group)]
    for keyword in given:
        if keyword not in known:
            if (removed := removal(keyword, keyword)) is not None:
                raise removed
            near = difflib.get_close_matches(keyword, known, 1)
            raise OptionError(
                f"option {keyword!r} is unknown.",
                f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}.",
            )
    return _filled(group, given)


def removal(keyword: str, written: str) -> OptionError | None:
    """Return the error for an option or a command of an earlier release; None for any other name.

    Args:
        keyword: its name in Python.
        written: the name as the user wrote it.
    """
    if keyword not in REMOVED:
        return None
    replacement, hint = REMOVED[keyword]
    return OptionError(f"{written} was removed: {replacement}", hint)


def _filled(group: type[GroupT], given: Mapping[str, Any]) -> GroupT:
    hints = get_type_hints(group)
    values: dict[str, Any] = {}
    for each in fields(group):  # type: ignore[arg-type]
        if _GROUP in each.metadata:
            values[each.name] = _filled(each.metadata[_GROUP], given)
        elif _OPTION in each.metadata:
            keyword = each.metadata[_OPTION].keyword or each.name
            if keyword in given:
                values[each.name] = _parsed(given[keyword], hints[each.name])
    return group(**values)


def _parsed(value: Any, hint: Any) -> Any:
    kinds = {*get_args(hint), hint} - {NoneType}
    if Path in kinds and isinstance(value, str):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return what was most probably meant: a name that the word begins, or one that is spelled nearly so; None for neither."""
    names = sorted(known, key=len)
    begun = [name for name in names if name.startswith(word) and len(word.strip("-")) > 1]
    return next(iter(begun or difflib.get_close_matches(word, names, 1)), None)


def guess(word: object, known: Iterable[str]) -> str:
    """Return `Did you mean ...? ` for a word, or nothing."""
    near = nearest(str(word), known)
    return "" if near is None else f"Did you mean {near}? "


def refuse_invalid(group: Any) -> None:
    """Refuse values that their declarations do not allow; call it in `__post_init__`.

    Raises:
        OptionError: a value is none of the choices, or below the minimum.
    """
    for each in fields(group):
        declaration: Declaration | None = each.metadata.get(_OPTION)
        value = getattr(group, each.name)
        if declaration is None or value is None:
            continue
        if declaration.choices is not None and value not in declaration.choices:
            raise OptionError(
                f"{declaration.noun or each.name} {value!r} is unknown.",
                declaration.advice
                or f"{guess(value, declaration.choices)}Use one of {', '.join(declaration.choices)}.",
            )
        if declaration.minimum is not None and value < declaration.minimum:
            raise OptionError(f"{each.name} is {value}.", declaration.advice or f"Use {declaration.minimum} or more.")


def keywords_of(*groups: type) -> Callable[[GroupT], GroupT]:
    """Let `help()` and editors show the options of dataclasses as keywords of a function that takes them as `**choices`."""

    def show(function: GroupT) -> GroupT:
        shown = inspect.signature(function)  # type: ignore[arg-type]
        own = [each for each in shown.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = [
            inspect.Parameter(each.keyword, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.hint)
            for group in groups
            for each in options_of(group)
        ]
        function.__signature__ = shown.replace(parameters=[*own, *taken])  # type: ignore[attr-defined]
        return function

    return show


__all__ = [
    "REMOVED",
    "Declaration",
    "Option",
    "Panel",
    "keywords_of",
    "made",
    "option",
    "options",
    "options_of",
    "refuse_invalid",
    "removal",
]
