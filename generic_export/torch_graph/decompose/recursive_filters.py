"""torchaudio's recursive filters (`lfilter`, and all biquads) as one loop of the graph, while a module is captured.

Their loop over samples is an operator of torchaudio's own, or one of Python's, that writes into its argument.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F

from generic_export.torch_graph.loops import loop

_MODULE = "torchaudio.functional.filtering"
_FILTER = "_lfilter"


@contextmanager
def filters_as_loops() -> Iterator[None]:
    """Replace the function under `torchaudio.functional.lfilter`, where that is imported, for the length of the block."""
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FILTER):
        yield
        return
    with mock.patch.object(module, _FILTER, filtered):
        yield


def filtered(waveform: torch.Tensor, a_coeffs: torch.Tensor, b_coeffs: torch.Tensor) -> torch.Tensor:
    """Return y with a_0 y[t] = sum_k b_k x[t - k] - sum_(k > 0) a_k y[t - k] (torchaudio.functional.lfilter, not clamped).

    Args:
        waveform: x [B, C, T].
        a_coeffs, b_coeffs: [C, order + 1].
    """
    first, order = a_coeffs[:, :1], a_coeffs.shape[1] - 1
    taps = (b_coeffs / first).flip(1).unsqueeze(1)
    driven = F.conv1d(F.pad(waveform, (order, 0)), taps, groups=a_coeffs.shape[0])
    if order == 0:
        return driven
    feedback = (a_coeffs[:, 1:] / first).T.unsqueeze(1)  # [order, 1, C], the last sample's first
    past = torch.zeros_like(driven[:, :, :1]).squeeze(2).expand(order, *driven.shape[:2])
    _, (samples,) = loop(_sample, [past, feedback], [driven.permute(2, 0, 1)])
    return samples.permute(1, 2, 0)


def _sample(states: list[torch.Tensor], slices: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    past, feedback = states
    given = slices[0] - (feedback * past).sum(0)
    return [torch.cat([given.unsqueeze(0), past[:-1]]), feedback], [given]


__all__ = ["filtered", "filters_as_loops"]
