"""Operators written with other PyTorch operators, where PyTorch's own decomposition is absent, inexact or does not export.

A rewrite is a plain PyTorch function with the operator's arguments: `@rewrites(aten.hypot.default)`. The tracer uses it
before PyTorch's decompositions, for operators that have no translation; so it can be tested without any engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from generic_export.compat import OpOverload
from generic_export.errors import RegistrationError

F = TypeVar("F", bound=Callable[..., Any])

REWRITES: dict[OpOverload, Callable[..., Any]] = {}


def rewrites(*overloads: OpOverload) -> Callable[[F], F]:
    """Register a function of tensors as what one or several overloads compute.

    Raises:
        RegistrationError: the overload has a rewrite already.
    """

    def register(function: F) -> F:
        for overload in overloads:
            if overload in REWRITES:
                raise RegistrationError(f"{overload} already has a rewrite: {REWRITES[overload].__name__}.")
            REWRITES[overload] = function
        return function

    return register


__all__ = ["REWRITES", "rewrites"]
