"""Caches in f16 under a graph that computes in f32: grown, cut to a window, read in parts, kept by the engine."""

from __future__ import annotations

from dataclasses import replace
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
from generic_export.nnef.rewriting import attribute
from generic_export.nnef.text import graph_text
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document
from kvcache.states.half_states import keep_states_in_half
from kvcache.states.state_views import keep_states_whole
from kvcache.states.tensors import StateTensor

HEADS, WIDTH = 2, 8
STATE = StateTensor("past", "grown", "cache_key", 0, (1, HEADS, "P", WIDTH), 2, "f32")


class Grown(nn.Module):
    """Appends, multiplies with all positions, and reads some of the channels."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([past, tokens], dim=2)
        return torch.einsum("bhnk,bhmk->bhmn", keys, tokens) + keys[..., :4].sum((2, 3), keepdim=True), keys


class Scaled(Grown):
    """What comes out is no concatenation."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer, keys = super().forward(tokens, past)
        return answer, keys * 0.5


def document(model: nn.Module) -> tuple[NnefGraph, dict]:
    target = TractNNEF(dynamic_axes={"tokens": {2: "S"}, "past": {2: "P"}}, check_io=False)
    example = (torch.randn(1, HEADS, 3, WIDTH), torch.randn(1, HEADS, 5, WIDTH))
    prepared = prepare(model.eval(), example, target, ("tokens", "past"), ("result", "grown"))
    return translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)


class Last(Grown):
    """Keeps the last two positions, as layers with a window do."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer, keys = super().forward(tokens, past)
        total = keys.shape[2]
        return answer, keys.index_select(2, torch.arange(total - torch.sym_min(total, 2), total))


@pytest.mark.parametrize("by_products", [False, True], ids=["casts", "products"])
@pytest.mark.parametrize("model", [Grown(), Scaled(), Last()], ids=["appended", "computed", "window"])
def test_in_the_engine(model: nn.Module, by_products: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph, sources = document(model)
    halved, (state,) = keep_states_in_half(graph, (STATE,), by_products=by_products)
    narrow = [
        each for each in halved.operations if attribute(each, "to") == "f16" and "identity" not in each.outputs[0]
    ]
    assert len(narrow) == (not by_products)
    assert state.dtype == "f16"
    archive = write_document(tmp_path / "model", keep_states_whole(halved), sources, compression_level=None).path
    with TractWheel().load(archive) as engine:
        assert [str(fact.datum_type) for fact in engine.inputs] == ["f32", "f16"]
        for steps, past in ((3, 5), (1, 0), (4, 9)):
            tokens, before = torch.randn(1, HEADS, steps, WIDTH), torch.randn(1, HEADS, past, WIDTH).half()
            answer, grown = engine.run([tokens.numpy(), before.numpy()])
            expected, after = model(tokens, before.float())
            assert (answer.dtype, grown.dtype) == (np.float32, np.float16)
            np.testing.assert_allclose(grown, after, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(answer, expected, rtol=2e-2, atol=2e-2)


def test_the_engine_makes_such_a_cache_its_own(tmp_path: Path) -> None:
    graph, sources = document(Grown())
    halved, _ = keep_states_in_half(graph, (STATE,))
    archive = write_document(tmp_path / "model", keep_states_whole(halved), sources, compression_level=None).path
    with TractWheel().load(archive, transforms=["transformers_detect_all"]) as engine:
        assert [fact.name for fact in engine.inputs] == ["tokens"]


class Repeated(nn.Module):
    """Appends heads that share their values, as Falcon does."""

    def forward(self, tokens: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = tokens[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        return tokens, torch.cat([past, heads], dim=2)


def test_repeated_heads_are_cast(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"tokens": {2: "S"}, "past": {2: "P"}}, check_io=False)
    example = (torch.randn(1, HEADS, 3, WIDTH), torch.randn(1, 2 * HEADS, 5, WIDTH))
    prepared = prepare(Repeated(), example, target, ("tokens", "past"), ("result", "grown"))
    graph = translate_graph(prepared.graph, target, TranslationOptions())
    state = replace(STATE, shape=(1, 2 * HEADS, "P", WIDTH))
    halved, _ = keep_states_in_half(graph, (state,), by_products=True)
    assert "tract_core_einsum" not in {operation.operator for operation in halved.operations}
    archive = write_document(tmp_path / "model", keep_states_whole(halved), {}, compression_level=None).path
    with TractWheel().load(archive) as engine:
        tokens, past = example[0].numpy(), example[1].half().numpy()
        np.testing.assert_array_equal(
            engine.run([tokens, past])[1], Repeated()(*map(torch.tensor, (tokens, past)))[1].half()
        )


def test_other_states_stay() -> None:
    graph, _ = document(Grown())
    recurrent = StateTensor("past", "grown", "recurrent_state", 0, (1, HEADS, 5, WIDTH), None, "f32")
    same, states = keep_states_in_half(graph, (recurrent,))
    assert states == (recurrent,)
    assert graph_text(same) == graph_text(graph)
