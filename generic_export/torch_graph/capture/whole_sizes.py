"""`int(size)` keeps a symbolic size what it is, in the modules of a model where it would freeze it.

Python makes a plain number of whatever `int` is called with, so `int(x.shape[1] * 0.5)` asks PyTorch for one size. A capture that
is refused notes the namespaces where that happened, and is tried once more with another `int` in them: a class that passes for
the real one, and hands sizes on.
"""

from __future__ import annotations

import builtins
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from generic_export.compat import depends_on_data
from generic_export.torch_graph.sizes.in_tensors import SizeNumber

Namespace = dict[str, Any]
"""The globals of a module."""

_TORCH = os.path.dirname(torch.__file__)


class _Whole(type):
    """What `int` is in checks, and what is done when it is called."""

    def __call__(cls, value: Any = 0, *base: Any, **options: Any) -> Any:
        if isinstance(value, SizeNumber):
            value = value.value
        if isinstance(value, torch.Tensor) and not base:
            value = value.item()  # which a block of known numbers answers
        if isinstance(value, torch.SymInt | torch.SymFloat) and not depends_on_data(value):
            return value if isinstance(value, torch.SymInt) else math.trunc(value)
        return builtins.int(value, *base, **options)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> int:
        return hash(builtins.int)


class _Int(int, metaclass=_Whole):
    """`int`, but for sizes."""


def calling_namespace() -> Namespace | None:
    """Return the globals of the innermost code outside PyTorch that is being run, if it calls the builtin `int`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, "<")) and frame.f_globals.get("__name__", "").split(".")[0] not in (
            "generic_export",
            "contextlib",
        ):
            calls = "int" in code.co_names and frame.f_globals.get("int", builtins.int) is builtins.int
            return frame.f_globals if calls else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextmanager
def whole_sizes(namespaces: Sequence[Namespace]) -> Iterator[None]:
    """Put an `int` that keeps sizes into namespaces, for the length of the block."""
    missing = object()
    before = [namespace.get("int", missing) for namespace in namespaces]
    for namespace in namespaces:
        namespace["int"] = _Int
    try:
        yield
    finally:
        for namespace, value in zip(namespaces, before, strict=True):
            if value is missing:
                namespace.pop("int", None)
            else:
                namespace["int"] = value


__all__ = ["Namespace", "calling_namespace", "whole_sizes"]
