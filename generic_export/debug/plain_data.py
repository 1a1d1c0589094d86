"""Frozen dataclasses as plain data for JSON, and back by their annotations.

In: dataclasses of enums, tuples, mappings, numbers and text. Out: what `json` writes; infinities are text.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def built(kind: Any, plain: Any) -> Any:
    """Return plain data as a value of a type annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if plain is None else built(inner, plain)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: built(hints[name], item) for name, item in plain.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(plain)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(built(arguments[0], item) for item in plain)
        return tuple(built(argument, item) for argument, item in zip(arguments, plain, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {key: built(arguments[1], item) for key, item in plain.items()}
    return float(plain) if kind is float else plain


__all__ = ["built", "plain"]
