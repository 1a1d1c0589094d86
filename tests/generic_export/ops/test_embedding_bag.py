"""Embedding bags in the engine: modes, padding, weights, empty bags."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.engine_check import check

TABLE = torch.linspace(-2, 2, 28).reshape(7, 4).sin()
INDICES = torch.tensor([1, 4, 1, 0, 6, 3])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_modes(mode: str) -> None:
    check(
        lambda indices, offsets: (
            F.embedding_bag(indices, TABLE, offsets, mode=mode),
            F.embedding_bag(indices, TABLE, offsets, mode=mode, padding_idx=1),
            F.embedding_bag(indices, TABLE, offsets, mode=mode, include_last_offset=True),
        ),
        (INDICES, torch.tensor([0, 2, 2, 6])),
    )


def test_weighted_bags_of_equal_length() -> None:
    check(
        lambda indices, weights: F.embedding_bag(indices, TABLE, mode="sum", per_sample_weights=weights),
        (INDICES.reshape(2, 3), torch.rand(2, 3)),
        (INDICES.reshape(2, 3).flip(1), torch.rand(2, 3)),
    )


def test_as_a_module() -> None:
    check(torch.nn.EmbeddingBag(7, 3), (INDICES.reshape(3, 2),))
