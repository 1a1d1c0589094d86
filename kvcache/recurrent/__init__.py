"""Recurrences in place of transformers' own: they start from the state before, and work for any number of positions.

transformers keeps them as functions of the same few names in every family's module. `explicit_recurrences` puts ours there for
the length of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.errors import CaptureError
from generic_export.tested_versions import TRANSFORMERS
from kvcache.recurrent.delta_rule import gated_delta_rule
from kvcache.recurrent.last_read import LastRead
from kvcache.recurrent.mamba import selective_scan, state_space_dual
from kvcache.recurrent.short_conv import short_convolution

PastState = Callable[[int], torch.Tensor | None]
"""Rank of the state -> the one that the running layer has just read from its cache."""

# Name in transformers' modeling files -> ours, and the rank of its state.
_RECURRENCES: Mapping[str, tuple[Callable[..., Any], int]] = {
    "mamba_selective_scan": (selective_scan, 3),
    "mamba2_chunk_scan": (state_space_dual, 4),
    "torch_chunk_gated_delta_rule": (gated_delta_rule, 4),
    "chunk_kimi_delta_attention": (gated_delta_rule, 4),
}
_CONVOLUTION = "causal_conv1d_fn"


@contextmanager
def explicit_recurrences(model: nn.Module, past: PastState, *, columns_before: bool = True) -> Iterator[None]:
    """Replace the recurrences in the modules of a model's code.

    Args:
        model: its submodules say which files.
        past: asked for the state when a function is not given it.
        columns_before: whether what is convolved carries the columns before it; transformers' own convolution stays where it
            does not.

    Raises:
        CaptureError: a layer's recurrence is none of those that can be replaced: it would be captured for the example's length.
    """
    refuse_unknown_recurrences(model)
    files = [sys.modules[name] for name in sorted({type(part).__module__ for part in model.modules()})]
    with ExitStack() as stack:
        for file in files:
            if columns_before and hasattr(file, _CONVOLUTION):
                stack.enter_context(mock.patch.object(file, _CONVOLUTION, short_convolution))
            for name, (function, rank) in _RECURRENCES.items():
                if hasattr(file, name):
                    stack.enter_context(mock.patch.object(file, name, partial(_from_past, function, past, rank)))
        yield


def refuse_unknown_recurrences(model: nn.Module) -> None:
    """Refuse a model with a layer of the Mamba or delta rule kind whose code has no recurrence by the names that transformers uses.

    Raises:
        CaptureError: names the layer and the releases of transformers that were tried.
    """
    for path, part in model.named_modules():
        file = sys.modules[type(part).__module__]
        # Every such layer of transformers, and no other, calls its decay so.
        if hasattr(part, "A_log") and not any(hasattr(file, name) for name in _RECURRENCES):
            raise CaptureError(
                f"{type(part).__name__} at {path or '(root)'}: {file.__name__} has no recurrence that is known ("
                f"{', '.join(_RECURRENCES)}), and its own would be right for one length only.",
                f"Use transformers {TRANSFORMERS.lowest} to {TRANSFORMERS.newest}, with which it was tried.",
            )


def _from_past(function: Callable[..., Any], past: PastState, rank: int, *args: Any, **kwargs: Any) -> Any:
    return function(past(rank), *args, **kwargs)


__all__ = ["LastRead", "PastState", "explicit_recurrences", "refuse_unknown_recurrences"]
