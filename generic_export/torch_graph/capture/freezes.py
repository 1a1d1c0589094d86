"""Where a capture made plain numbers of symbolic sizes, and the capture again where `int` did.

In: what captures. Out: what it captured, or its refusal with the lines of the model's code.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from unittest import mock

import sympy
from torch.fx.experimental.sym_node import SymNode

from generic_export.compat import fixed_sizes_seen
from generic_export.errors import CaptureError, SpecializedAxisError
from generic_export.torch_graph.capture.whole_sizes import Namespace, calling_namespace, whole_sizes
from generic_export.torch_graph.naming import current_source, user_source


@dataclass(frozen=True)
class Freezes:
    """Where a capture made plain numbers of sizes.

    Attributes:
        lines: of the model's code, in order.
        namespaces: of the modules whose code calls `int` there.
    """

    lines: list[str] = field(default_factory=list)
    namespaces: list[Namespace] = field(default_factory=list)


Captured = TypeVar("Captured")


def with_whole_sizes(capture: Callable[[Freezes], Captured]) -> Captured:
    """Capture; where that is refused and `int` was called with a size, again, with an `int` that keeps sizes.

    Raises:
        CaptureError: the first one's, unless a later one goes on to another line that freezes a size.
    """
    kept: list[Namespace] = []
    refused: CaptureError | None = None
    while True:
        freezes = Freezes()
        try:
            with whole_sizes(kept):
                return capture(freezes)
        except CaptureError as error:
            refused = error if refused is None or isinstance(error, SpecializedAxisError) else refused
            found = [each for each in freezes.namespaces if not any(each is known for known in kept)]
            if not found:
                raise refused from refused.__cause__
            kept += found


@contextmanager
def recorded_freezes(freezes: Freezes) -> Iterator[None]:
    """Note where PyTorch first fixes a symbolic size to a number."""
    guard_int = SymNode.guard_int

    def note_line() -> None:
        source = current_source() or user_source("".join(traceback.format_stack()))
        if source:
            freezes.lines.append(source)

    def fixed(target: sympy.Expr) -> None:
        if getattr(target, "is_number", False):
            note_line()

    def recorded_int(node: SymNode, file: str, line: int) -> int:
        if node.expr.free_symbols:  # `int(0.5 * size)`, `range(size)`
            note_line()
            namespace = calling_namespace()
            if namespace is not None and not any(namespace is known for known in freezes.namespaces):
                freezes.namespaces.append(namespace)
        return guard_int(node, file, line)

    with fixed_sizes_seen(fixed), mock.patch.object(SymNode, "guard_int", recorded_int):
        yield


__all__ = ["Freezes", "recorded_freezes", "with_whole_sizes"]
