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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode

from generic_export.compat import depends_on_data, fixed_sizes_seen
from generic_export.errors import CaptureError, SpecializedAxisError
from generic_export.torch_graph.sizes.in_tensors import SizeNumber
from generic_export.torch_graph.source_lines import running_source

Namespace = dict[str, Any]
"""The globals of a module."""

_TORCH = os.path.dirname(torch.__file__)

Captured = TypeVar("Captured")


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


# Where a capture made plain numbers of symbolic sizes, and the capture again where `int` did.
# In: what captures. Out: what it captured, or its refusal with the lines of the model's code.
@dataclass(frozen=True)
class Specializations:
    """Where a capture made plain numbers of sizes.

    Attributes:
        lines: of the model's code, in order.
        namespaces: of the modules whose code calls `int` there.
    """

    lines: list[str] = field(default_factory=list)
    namespaces: list[Namespace] = field(default_factory=list)


def with_whole_sizes(capture: Callable[[Specializations], Captured]) -> Captured:
    """Capture; where that is refused and `int` was called with a size, again, with an `int` that keeps sizes.

    Raises:
        CaptureError: the first one's, unless a later one goes on to another line that freezes a size.
    """
    kept: list[Namespace] = []
    refused: CaptureError | None = None
    while True:
        specializations = Specializations()
        try:
            with whole_sizes(kept):
                return capture(specializations)
        except CaptureError as error:
            refused = error if refused is None or isinstance(error, SpecializedAxisError) else refused
            found = [each for each in specializations.namespaces if not any(each is known for known in kept)]
            if not found:
                raise refused from refused.__cause__
            kept += found


@contextmanager
def record_specializations(specializations: Specializations) -> Iterator[None]:
    """Note where PyTorch first fixes a symbolic size to a number."""
    guard_int = SymNode.guard_int

    def note_line() -> None:
        source = running_source()
        if source:
            specializations.lines.append(source)

    def fixed(target: sympy.Expr) -> None:
        if getattr(target, "is_number", False):
            note_line()

    def recorded_int(node: SymNode, file: str, line: int) -> int:
        if node.expr.free_symbols:  # `int(0.5 * size)`, `range(size)`
            note_line()
            namespace = calling_namespace()
            if namespace is not None and not any(namespace is known for known in specializations.namespaces):
                specializations.namespaces.append(namespace)
        return guard_int(node, file, line)

    with fixed_sizes_seen(fixed), mock.patch.object(SymNode, "guard_int", recorded_int):
        yield


__all__ = [
    "Namespace",
    "Specializations",
    "calling_namespace",
    "record_specializations",
    "whole_sizes",
    "with_whole_sizes",
]
