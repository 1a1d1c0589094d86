"""A state class with an adapter made of functions that can be imported, as a reproduction needs them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from generic_export.diagnose import StateAdapter
from tests.generic_export.debug.toys import Growing, UsesCache


def flatten(cache: Growing) -> dict[str, torch.Tensor]:
    return {} if cache.past is None else {"past": cache.past}


def copied(cache: Growing) -> Growing:
    return Growing(cache.past)


def assign(cache: Growing, tensors: Mapping[str, torch.Tensor]) -> None:
    cache.past = tensors["past"]


def blank(_name: str, after: torch.Tensor) -> torch.Tensor:
    return after[:0]


GROWING = StateAdapter(Growing, flatten, copied, assign, blank)


class FaultyCache(UsesCache):
    """Appends to its cache, then needs an operator that has no translation."""

    def forward(self, x: torch.Tensor, cache: Growing | None = None) -> torch.Tensor:
        total = super().forward(x, cache)
        return total + torch.linalg.ldl_factor_ex(total.transpose(0, 1) @ total)[0].sum()
