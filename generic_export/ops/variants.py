"""One function for several operators that differ in what their names say: `tril` and `triu`, `max_pool1d` to `3d`.

@variant(aten.tril.default, upper=False)
@variant(aten.triu.default, upper=True)
def triangle(b, self, diagonal=0, *, upper): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from generic_export.compat import OpOverload
from generic_export.translate.registry import translates

F = TypeVar("F", bound=Callable[..., Any])


def given(function: F, **known: Any) -> F:
    """Return a function with some of its parameters given, keyword-only ones; its signature is without them."""
    signature = inspect.signature(function)
    left = [parameter for name, parameter in signature.parameters.items() if name not in known]

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **known)

    called.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]


def variant(*overloads: OpOverload, **known: Any) -> Callable[[F], F]:
    """Register a function as `translates` does, for overloads that leave some of its parameters to their name.

    Args:
        overloads: whose schemas lack those parameters.
        known: what the parameters are for them.

    Raises:
        RegistrationError: see `translates`.
    """

    def register(function: F) -> F:
        translates(*overloads)(given(function, **known))
        return function

    return register
