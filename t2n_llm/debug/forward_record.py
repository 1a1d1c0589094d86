"""What the modules of a model receive and which operators they run, in one real run of a small model.

In: a causal LM on the CPU. Out: a `ForwardRecord`: a diagnosis' recording, and what a dispatch mode saw.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from generic_export.compat import OpOverload, TorchDispatchMode
from generic_export.debug.coverage import OperatorUse
from generic_export.diagnose import Recording, observe
from generic_export.errors import CaptureError, described
from kvcache.compat import cache_keyword, cache_of

_STEPS = 5
_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.dirname(os.path.dirname(__file__))
# Bookkeeping of eager mode: no value depends on it.
_BOOKKEEPING = frozenset({"aten.detach.default", "aten.lift_fresh.default", "aten.alias.default"})


@dataclass(frozen=True)
class ForwardRecord:
    """One run of a model.

    Attributes:
        recording: every call of its modules, without a cache.
        uses: every operator that ran inside a module, with a cache.
    """

    recording: Recording
    uses: tuple[OperatorUse, ...]


def record_forward(model: nn.Module) -> ForwardRecord:
    """Run a causal LM: once whole for the calls, then with its cache, a few tokens and one more, for the operators.

    Raises:
        CaptureError: the model does not run.
    """
    ids = torch.arange(_STEPS)[None] + 3
    try:
        with torch.no_grad():
            with observe(model, max_calls=1) as recording:
                model(input_ids=ids, use_cache=False)
            with ModuleTracker() as tracker, _OperatorWatch(recording, tracker) as watch:
                _run_with_cache(model, ids)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(f"{type(model).__name__} does not run in PyTorch: {described(error)}") from error
    return ForwardRecord(recording, tuple(watch.uses))


def _run_with_cache(model: nn.Module, ids: torch.Tensor) -> None:
    result = model(input_ids=ids, use_cache=True)
    cache = cache_of(result)
    if cache is not None:
        model(input_ids=ids[:, :1], use_cache=True, **{cache_keyword(model.forward): cache})


class _OperatorWatch(TorchDispatchMode):
    """Notes every operator that runs, with the module and the line of the model's code that called it."""

    def __init__(self, recording: Recording, tracker: ModuleTracker) -> None:
        super().__init__()
        self._recording, self._tracker = recording, tracker
        self.uses: list[OperatorUse] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Names begin with the root's class; the innermost module has the longest.
        inside = self._tracker.parents - {"Global"}
        if inside and str(func) not in _BOOKKEEPING:
            module = self._recording.model.get_submodule(max(inside, key=len).partition(".")[2])
            path = self._recording.paths[module][0]
            self.uses.append(OperatorUse(str(func), func, path, type(module).__name__, _model_line()))
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


__all__ = ["ForwardRecord", "record_forward"]
