"""Any method of a module as the forward of one, for code that only knows forwards.

In: a module and a method's name. Out: a module to capture or export; parameters bear the names that they have in the given one.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from generic_export.compat import MODULE_STATE
from generic_export.errors import OptionError

_INNER = "_t2n_inner"


class SharedState(nn.Module):
    """A module around another one, whose parameters, buffers, children and mode *are* the other's, under their names.

    What an export reads from one it reads from the other, and no tensor is copied. Hooks are not shared.

    Args:
        inner: the other one, which stays as it is; not a ScriptModule, which keeps its state out of reach.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        # Past nn.Module, which would make the module a child with a prefix; under a name that no child has.
        object.__setattr__(self, _INNER, inner)
        for name in MODULE_STATE:
            object.__setattr__(self, name, getattr(inner, name))

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The other module's mode: there is one mode for the two."""
        inner = self.__dict__.get(_INNER)
        return True if inner is None else inner.training

    @training.setter
    def training(self, mode: bool) -> None:
        inner = self.__dict__.get(_INNER)
        if inner is not None:
            inner.training = mode

    def extra_repr(self) -> str:
        """Return the other module's class."""
        return type(inner_of(self)).__name__


def inner_of(module: SharedState) -> nn.Module:
    """Return the other module; not an attribute, since a child may have any name."""
    inner: nn.Module = module.__dict__[_INNER]
    return inner


class _Method(SharedState):
    """A module whose forward is a method of another one: whatever else that method calls is the other's own."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__(inner)
        object.__setattr__(self, "original_name", f"{type(inner).__name__}.{name}")
        method = getattr(inner, name)

        @functools.wraps(method)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        self.forward = forward


def as_forward(module: nn.Module, fn_name: str) -> nn.Module:
    """Return a module whose `forward` is another method of a module.

    Args:
        module: the module. It is not modified.
        fn_name: name of the method, such as "encode".

    Raises:
        OptionError: there is no such method, or the module is a ScriptModule.
    """
    if fn_name == "forward":
        return module
    kind = type(module).__name__
    if isinstance(module, ScriptModule):
        raise OptionError(
            f"{kind}.{fn_name}: of a ScriptModule only the forward is exported.",
            "Export the method of the module that it was scripted or traced from.",
        )
    if not callable(getattr(module, fn_name, None)):
        raise OptionError(
            f"{kind} has no method {fn_name!r}.", f"Its own methods: {', '.join(_methods(module)) or '-'}."
        )
    return _Method(module, fn_name)


def _methods(module: nn.Module) -> list[str]:
    """Return the public methods that a module's classes add to nn.Module's, with the forward."""
    kind = type(module)
    added = [name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name)]
    return ["forward", *(name for name in added if callable(getattr(kind, name)))]


__all__ = ["SharedState", "as_forward", "inner_of"]
