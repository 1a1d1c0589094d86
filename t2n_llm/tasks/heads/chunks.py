"""Models that walk over a recording chunk by chunk, with a cache of speakers chosen by value: what fits in one chunk is one pass.

In: a network, and its config. Out: a block in which the walk is the one step that it is for such a recording, and how long that
may be (Nemotron 3 diarization: 340 frames of its encoder, 27 seconds).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

_CACHE, _STACKING = "Nemotron3DiarizationSpeakerCache", "Nemotron3DiarizationFeatureStacking"


def longest_chunk(config: Any) -> int | None:
    """Return how many frames of sound such a model takes in one chunk; None for models that do not walk."""
    sound = getattr(config, "audio_config", None)
    chunk, factor = getattr(config, "chunk_length", None), getattr(sound, "subsampling_factor", None)
    if not isinstance(chunk, int) or not isinstance(factor, int) or not hasattr(config, "chunk_right_context"):
        return None
    return chunk * factor


@contextmanager
def one_chunk(network: nn.Module) -> Iterator[None]:
    """Let the code of such a network see one chunk where its length is a symbol, whose cache nobody reads again.

    The symbol is bounded by `longest_chunk`.
    """
    files = {sys.modules[type(part).__module__] for part in network.modules()}
    file = next((each for each in files if hasattr(each, _CACHE)), None)
    if file is None:
        yield
        return
    cache, stacking = getattr(file, _CACHE), getattr(file, _STACKING)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(file, "range", _steps, create=True))
        stack.enter_context(mock.patch.object(file, "min", _end, create=True))
        stack.enter_context(mock.patch.object(cache, "update", _updated_unless_last(cache.update)))
        stack.enter_context(mock.patch.object(stacking, "forward", _stacked))
        yield


def _steps(*bounds: Any) -> Sequence[int]:
    return bounds[:1] if any(isinstance(bound, torch.SymInt) for bound in bounds) else range(*bounds)


def _end(chunk: Any, recording: Any) -> Any:
    """Return where a chunk ends: with the recording, where that is one."""
    return recording if isinstance(recording, torch.SymInt) else min(chunk, recording)


def _updated_unless_last(update: Callable[..., None]) -> Callable[..., None]:
    def updated(cache: Any, chunk_embeds: torch.Tensor, *args: Any, **keywords: Any) -> None:
        # How many frames a chunk of any length leaves is a symbol: there is no second chunk to read them.
        if not isinstance(chunk_embeds.shape[1], torch.SymInt):
            update(cache, chunk_embeds, *args, **keywords)

    return updated


def _stacked(stacking: Any, input_features: torch.Tensor) -> torch.Tensor:
    """Stack frames as the class does, their number written so that it is seen to be whole: 8*((T + 7)//8)."""
    batch, frames, width = input_features.shape
    factor = stacking.subsampling_factor
    groups = (frames + factor - 1) // factor
    padded = nn.functional.pad(input_features, (0, 0, 0, groups * factor - frames))
    return stacking.projection(padded.reshape(batch, groups, factor * width))


__all__ = ["longest_chunk", "one_chunk"]
