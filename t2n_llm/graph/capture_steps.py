"""Progress of a capture: the number of layers that torch.export has traced, and the start of the translation.

In: a reporter. Out: a `with` block that reports every capture inside it. Layers are the items of a network's longest `ModuleList`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from t2n_llm.reporter import Reporter

CAPTURING, TRANSLATING = "Capturing the graph", "Translating the graph"


@contextmanager
def captures_told(reporter: Reporter) -> Iterator[None]:
    """Report the stages of every capture in the block, and one step per layer."""
    reporter.stage(CAPTURING)
    told = _Layers(reporter)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(told.begins).remove)
        stack.callback(register_module_forward_hook(told.ended).remove)
        yield


class _Layers:
    """Counts the layers of the network that is captured."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._network: nn.Module | None = None
        self._parts: frozenset[int] = frozenset()
        self._left: set[int] = set()
        self._count = 0
        self._translates = False

    def begins(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        if not torch.compiler.is_exporting():
            return
        if id(module) not in self._parts or module is self._network:
            self._begin(module)
        if id(module) in self._left:
            self._left.remove(id(module))
            self._reporter.steps(self._count - len(self._left), self._count)

    def _begin(self, network: nn.Module) -> None:
        lists = [each for each in network.modules() if isinstance(each, nn.ModuleList)]
        layers = max(lists, key=len, default=nn.ModuleList())
        self._network, self._parts = network, frozenset(map(id, network.modules()))
        self._left, self._count = set(map(id, layers)), len(layers)
        if self._translates:  # the next archive, or this one at other sizes
            self._reporter.stage(CAPTURING)
        self._translates = False

    def ended(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module has returned."""
        if module is self._network and torch.compiler.is_exporting():
            self._translates = True
            self._reporter.stage(TRANSLATING)


__all__ = ["CAPTURING", "TRANSLATING", "captures_told"]
