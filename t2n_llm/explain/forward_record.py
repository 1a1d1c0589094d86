"""What the modules of a model receive and which operators they run, in one real run of a small model.

In: a causal LM on the CPU. Out: a `ForwardRecord`. Hooks and a dispatch mode, both gone when the run ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.compat import OpOverload, TorchDispatchMode, pytree
from generic_export.coverage import OperatorUse
from generic_export.errors import CaptureError, described

_STEPS = 5
_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.dirname(os.path.dirname(__file__))
# Bookkeeping of eager mode: no value depends on it.
_BOOKKEEPING = frozenset({"aten.detach.default", "aten.lift_fresh.default", "aten.alias.default"})


@dataclass(frozen=True)
class ModuleCall:
    """The first call of a module.

    Attributes:
        args, kwargs: what its forward received.
        signature: shapes and element types of the tensors, and the other values, as text.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    signature: str


@dataclass(frozen=True)
class ForwardRecord:
    """One run of a model.

    Attributes:
        calls: the first call of each module, by path, without a cache.
        uses: every operator that ran inside a module, with and without a cache.
    """

    calls: Mapping[str, ModuleCall]
    uses: tuple[OperatorUse, ...]


def record_forward(model: nn.Module) -> ForwardRecord:
    """Run a causal LM: once whole for the calls, then with its cache, a few tokens and one more, for the operators.

    Raises:
        CaptureError: the model does not run.
    """
    ids = torch.arange(_STEPS)[None] + 3
    calls: dict[str, ModuleCall] = {}
    watch = _OperatorWatch()
    try:
        with torch.no_grad():
            with _recorded(model, calls, watch):
                model(input_ids=ids, use_cache=False)
            with _recorded(model, {}, watch), watch:
                _run_with_cache(model, ids)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(f"{type(model).__name__} does not run in PyTorch: {described(error)}") from error
    return ForwardRecord(calls, tuple(watch.uses))


def _run_with_cache(model: nn.Module, ids: torch.Tensor) -> None:
    result = model(input_ids=ids, use_cache=True)
    for name in ("past_key_values", "cache_params"):
        if getattr(result, name, None) is not None:
            model(input_ids=ids[:, :1], use_cache=True, **{name: getattr(result, name)})
            return


@contextmanager
def _recorded(model: nn.Module, calls: dict[str, ModuleCall], watch: _OperatorWatch) -> Iterator[None]:
    """Note the first call of each module, and tell the watch where the run is, for the length of the block."""
    with ExitStack() as stack:
        for path, module in model.named_modules():

            def enter(module: nn.Module, args: tuple, kwargs: dict, path: str = path) -> None:
                calls.setdefault(path, ModuleCall(args, kwargs, _signature(args, kwargs)))
                watch.stack.append((path, type(module).__name__))

            def leave(*_: Any) -> None:
                watch.stack.pop()

            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
        yield


def _signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    leaves, layout = pytree.tree_flatten((args, dict(kwargs)))
    told = [
        f"{leaf.dtype}{tuple(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        if isinstance(leaf, (int, float, str, type(None)))
        else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{layout}{told}"


class _OperatorWatch(TorchDispatchMode):
    """Notes every operator that runs, with the module and the line of the model's code that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[str, str]] = []
        self.uses: list[OperatorUse] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.stack and str(func) not in _BOOKKEEPING:
            path, kind = self.stack[-1]
            self.uses.append(OperatorUse(str(func), func, path, kind, _model_line()))
        return func(*args, **(kwargs or {}))


def _model_line() -> str:
    """Return `file.py:line` of the innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OWN, "<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


__all__ = ["ForwardRecord", "ModuleCall", "record_forward"]
