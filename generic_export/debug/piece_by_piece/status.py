"""What came of exporting one node, in the words of the piece-by-piece tool: flags that combine, and a frozen record.

In: verdicts of attempts. Out: `StatusExport`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from generic_export.errors import OptionError


class CustomOpStrategy(enum.IntEnum):
    """When `try_export` replaces a module by one opaque operator."""

    NONE = 0  # never: a module is exported whole
    ONLY_IF_FAILING = 1  # the children of a module that fails, which is then tried again
    ALWAYS = 2  # the module itself, so that nearly everything passes
    LOCAL = 3  # the children of every module

    @classmethod
    def of(cls, value: object) -> CustomOpStrategy:
        """Convert a strategy given as a member, its number or its name; True means `ONLY_IF_FAILING` and False means `NONE`.

        Args:
            value: the strategy in one of these forms.

        Raises:
            OptionError: the value has none of these forms.
        """
        if isinstance(value, bool):
            return cls.ONLY_IF_FAILING if value else cls.NONE
        try:
            return cls[value] if isinstance(value, str) else cls(value)  # type: ignore[arg-type]
        except (KeyError, ValueError, TypeError):
            names = ", ".join(strategy.name for strategy in cls)
            hint = f"Use one of {names}, a bool, or a dict of these by class, class name or module name."
            raise OptionError(f"replace_by_custom_op is {value!r}.", hint) from None


@dataclass(frozen=True)
class Strategies:
    """A strategy for each module of a tree.

    Attributes:
        default: of modules that nothing else is said of.
        chosen: by class, name of a class, or name of a module (its path, its name in its parent, that of its operator).
    """

    default: CustomOpStrategy = CustomOpStrategy.NONE
    chosen: Mapping[type | str, CustomOpStrategy] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object) -> Strategies:
        """Return the strategies for what callers give: a dict, or what `CustomOpStrategy.of` takes.

        Raises:
            OptionError: it is neither.
        """
        if not isinstance(value, Mapping):
            return cls(CustomOpStrategy.of(value))
        odd = [key for key in value if not isinstance(key, (type, str))]
        if odd:
            raise OptionError(f"replace_by_custom_op has the key {odd[0]!r}.", "Give classes, or names, as keys.")
        return cls(chosen={key: CustomOpStrategy.of(strategy) for key, strategy in value.items()})

    def at(self, node: Named) -> CustomOpStrategy:
        """Return the strategy of a module; what is said of its name counts more than what is said of its class."""
        return next((self.chosen[key] for key in _keys(node) if key in self.chosen), self.default)

    def check(self, nodes: Iterable[Named]) -> None:
        """Refuse a key that speaks of no module.

        Raises:
            OptionError: there is one.
        """
        nodes = list(nodes)
        known = {key for node in nodes for key in _keys(node)}
        for key in self.chosen:
            if key not in known:
                classes = ", ".join(sorted({type(node.model).__name__ for node in nodes}))
                name = key if isinstance(key, str) else key.__name__
                raise OptionError(
                    f"replace_by_custom_op speaks of {name!r}, which is not there.", f"Classes: {classes}."
                )


class Named(Protocol):
    """What a module is chosen by."""

    name: str
    model: nn.Module

    @property
    def path(self) -> str: ...
    @property
    def custom_op_name(self) -> str: ...


def _keys(node: Named) -> tuple[type | str, ...]:
    kind = type(node.model)
    return *filter(None, (node.path, node.name, node.custom_op_name)), kind.__name__, kind


class StatusExportCode(enum.IntFlag):
    """Result flags of an export. They can be combined."""

    NONE = 0
    OK = 1
    FAIL = 2
    CHILDC = 4  # with the children replaced by opaque operators
    CUSTOM = 8  # with the module itself replaced by one
    DISC = 16  # exported, and gives other numbers
    NOINPUT = 32  # never called

    OK_CHILDC = OK | CHILDC
    OK_CUSTOM = OK | CUSTOM
    FAIL_CHILDC = FAIL | CHILDC
    FAIL_CUSTOM = FAIL | CUSTOM
    FAIL_DISC = FAIL | DISC
    FAIL_NOINPUT = FAIL | NOINPUT

    def remove(self, a: StatusExportCode) -> StatusExportCode:
        """Return these flags without `a`.

        Args:
            a: flags to remove.
        """
        return StatusExportCode(self & ~a)

    def __str__(self) -> str:
        names = [flag.name for flag in _SINGLE if flag in self and flag.name]
        return "_".join(names) or "NONE"


_SINGLE = tuple(StatusExportCode[name] for name in ("OK", "FAIL", "CHILDC", "CUSTOM", "DISC", "NOINPUT"))

_SHORT = 30


@dataclass(frozen=True)
class StatusExport:
    """Result of exporting one module.

    Attributes:
        status: result flags.
        step: the step that failed: `EXPORT`, `EVAL` or `DISC`; "" if none did.
        reason: reason of the failure.
        exported: object that the exporter returned, if any.
        dynamic_shapes: dynamic axes that were requested.
        error: the exception, if it was raised in this process.
    """

    status: StatusExportCode
    step: str = ""
    reason: str = ""
    exported: Any = None
    dynamic_shapes: Any = None
    error: BaseException | None = field(default=None, compare=False, repr=False)

    def is_ok(self) -> bool:
        """Return whether the export passed, with or without opaque operators."""
        return StatusExportCode.OK in self.status

    @property
    def short_reason(self) -> str:
        """Start of the reason, on one line."""
        text = " ".join(self.reason.split())
        return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."

    def pretty_text(self) -> str:
        """Return status, step and reason as text."""
        return "\n".join(filter(None, [f"{self.status} {self.step}".strip(), self.reason]))


__all__ = ["CustomOpStrategy", "Named", "StatusExport", "StatusExportCode", "Strategies"]
