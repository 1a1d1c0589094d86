"""`int(size)` and `range(0, size, size)` keep symbolic sizes what they are, in the modules of a model where they would freeze them.

Python makes a plain number of whatever `int` is called with, so `int(x.shape[1] * 0.5)` asks PyTorch for one size. A capture that
is refused notes the namespaces where that happened, and is tried once more with others in them: an `int` that passes for the real
one, and hands sizes on, and a `range` that knows how many steps there are where that is no matter of the size.
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


def _range(*bounds: Any) -> Any:
    """`range`, but for as many steps at every size (`range(0, size, size)` has one)."""
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not any(isinstance(each, torch.SymInt) for each in bounds):
        return builtins.range(*bounds)
    count = -((start - stop) // step)
    known = count if isinstance(count, builtins.int) else count.node.maybe_as_int()
    return builtins.range(*bounds) if known is None else [start + place * step for place in builtins.range(known)]


_REPLACED: Namespace = {"int": _Int, "range": _range}
_PLAIN: Namespace = {"int": builtins.int, "range": builtins.range}


def calling_namespace() -> Namespace | None:
    """Return the globals of the innermost code outside PyTorch that is being run, if it calls the builtin `int` or `range`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, "<")) and frame.f_globals.get("__name__", "").split(".")[0] not in (
            "generic_export",
            "contextlib",
        ):
            names, given = code.co_names, frame.f_globals
            calls = any(name in names and given.get(name, plain) is plain for name, plain in _PLAIN.items())
            return given if calls else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextmanager
def whole_sizes(namespaces: Sequence[Namespace]) -> Iterator[None]:
    """Put an `int` and a `range` that keep sizes into namespaces, for the length of the block."""
    missing = object()
    before = [{name: namespace.get(name, missing) for name in _REPLACED} for namespace in namespaces]
    for namespace in namespaces:
        namespace.update(_REPLACED)
    try:
        yield
    finally:
        for namespace, values in zip(namespaces, before, strict=True):
            for name, value in values.items():
                if value is missing:
                    namespace.pop(name, None)
                else:
                    namespace[name] = value


__all__ = ["Namespace", "calling_namespace", "whole_sizes"]
