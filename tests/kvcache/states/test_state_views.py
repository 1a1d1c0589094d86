"""A grown cache that a model reads in parts still becomes engine state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.capture import prepare
from generic_export.documents import translate_graph
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import NnefGraph
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document
from kvcache.states.state_views import keep_states_whole

HEADS, WIDTH = 2, 8


class PartlyRotated(nn.Module):
    """Queries joined of two parts, as under partial rotary embeddings: the product sums over a concatenated axis."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = tokens.transpose(1, 2)
        keys = torch.cat([past, new], dim=2)
        queries = torch.cat([new[..., :4] * 2.0, new[..., 4:]], dim=-1)
        return queries @ keys.transpose(2, 3), keys


class Joined(nn.Module):
    """Keys beside others (DeepSeek-V4's entries): the product with such queries reaches through the join."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = tokens.transpose(1, 2)
        keys = torch.cat([past, new], dim=2)
        queries = torch.cat([new[..., :4] * 2.0, new[..., 4:]], dim=-1)
        return queries @ torch.cat([keys, new * 3.0], dim=2).transpose(2, 3), keys


class Chunked(nn.Module):
    """Values split by heads, as differential attention has them."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.cat([past, tokens.transpose(1, 2)], dim=2)
        return torch.cat(values.chunk(self.parts, dim=1), dim=-1).sum(2), values


def document(model: nn.Module, heads: int = HEADS) -> tuple[NnefGraph, dict]:
    target = TractNNEF(dynamic_axes={"tokens": {1: "S"}, "past": {2: "P"}}, check_io=False)
    example = (torch.randn(1, 3, heads, WIDTH), torch.randn(1, heads, 5, WIDTH))
    prepared = prepare(model.eval(), example, target, ("tokens", "past"), ("result", "grown"))
    return translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)


@pytest.mark.parametrize(("model", "heads"), [(PartlyRotated(), 2), (Joined(), 2), (Chunked(2), 2), (Chunked(2), 6)])
def test_it_becomes_state_and_says_the_same(model: nn.Module, heads: int, tmp_path: Path) -> None:
    graph, sources = document(model, heads)
    kept = keep_states_whole(graph)
    archive = write_document(tmp_path / "model.nnef", kept, sources, compression_level=None).path
    torch.manual_seed(0)
    tokens, past = torch.randn(1, 5, heads, WIDTH), torch.randn(1, heads, 3, WIDTH)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        answer, grown = engine.run([tokens.numpy(), past.numpy()])
    expected = model(tokens, past)
    np.testing.assert_allclose(answer, expected[0].numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(grown, expected[1].numpy())
    with TractWheel(timeout_seconds=60).load(archive, transforms=("transformers_detect_all",)) as engine:
        assert [each.name for each in engine.inputs] == ["tokens"]


def test_the_rules_are_still_needed(tmp_path: Path) -> None:
    """Should tract stop taking such graphs apart, this room can go."""
    graph, sources = document(PartlyRotated())
    archive = write_document(tmp_path / "model.nnef", graph, sources, compression_level=None).path
    with TractWheel(timeout_seconds=60).load(archive, transforms=("transformers_detect_all",)) as engine:
        assert [each.name for each in engine.inputs] == ["tokens", "past"]


def test_what_reads_a_state_whole_is_left_alone() -> None:
    class Whole(nn.Module):
        def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys = torch.cat([past, tokens.transpose(1, 2)], dim=2)
            return tokens.transpose(1, 2)[..., 4:] @ tokens.transpose(1, 2)[..., :4].transpose(2, 3), keys

    graph, _ = document(Whole())
    assert keep_states_whole(graph) is graph
