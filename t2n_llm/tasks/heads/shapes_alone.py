"""What some models ask of values, while there are only shapes: answered without them, where the answer does not depend on them.

In: a network, and what it is given. Out: further keywords for it, and a block in which its constants are values of the graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_MASK, _LENGTHS = "attention_mask", "lengths"


@dataclass(frozen=True)
class _Lengths:
    """Stands for the lengths of texts in models that a mask tells them as well (XLM, FlauBERT): nothing but their bound is read."""

    mask: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def size(self, axis: int) -> int:
        return int(self.mask.shape[axis]) if axis else self.mask.shape[0]

    def max(self) -> _Lengths:
        return self

    def item(self) -> int:
        return 0


def further_keywords(network: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that keep a network from looking at values that its mask makes superfluous."""
    known = inspect.signature(network.forward).parameters
    return {_LENGTHS: _Lengths(given[_MASK])} if _LENGTHS in known and _MASK in given else {}


_CHECK = "torch_compilable_check"  # transformers' name for an assertion about values


@contextmanager
def sizes_stay_symbols(network: nn.Module) -> Iterator[None]:
    """Let the files of a network's code see the length of a tensor as a symbol, and assert nothing about values.

    Python's own `len` gives a number, which would freeze the batch (RT-DETR).
    """
    files = [sys.modules[name] for name in sorted({type(part).__module__ for part in network.modules()})]
    with ExitStack() as stack:
        for file in files:
            if file.__name__.partition(".")[0] == "torch":
                continue
            stack.enter_context(mock.patch.object(file, "len", _length, create=True))
            if hasattr(file, _CHECK):
                stack.enter_context(mock.patch.object(file, _CHECK, lambda *_, **__: None))
        yield


def _length(sized: Any) -> int:
    return sized.shape[0] if isinstance(sized, torch.Tensor) else len(sized)


class ConstantsInGraph(TorchFunctionMode):
    """Makes an operator of a number that a model writes as a tensor on the device of its inputs: as a constant without values it
    would be lost (TAPAS).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and type(args[0]) in (bool, int, float):
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "meta":
                dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
                return torch.full((), args[0], dtype=dtype, device=device)
        return func(*args, **kwargs)


__all__ = ["ConstantsInGraph", "further_keywords", "sizes_stay_symbols"]
