"""Long sums in parts: the same results, matrices cut at load, and everything else left alone."""

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
from generic_export.nnef.block_storage import store_in_blocks
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from generic_export.nnef.long_reductions import MEASURED, LongReductions, split_long_reductions
from generic_export.translate.translate import TranslationOptions
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.write.document import write_document


class Pair(nn.Module):
    """Two layers that read the same values, and one that is too short."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, 24), nn.Linear(width, 40, bias=False)
        self.short = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.short(self.one(x)), self.other(x)


def captured(model: nn.Module, width: int) -> tuple[NnefGraph, dict]:
    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    prepared = prepare(model.eval(), (torch.zeros(1, 5, width),), target, ("x",), ("y", "z"))
    return translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)


@pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])
@pytest.mark.parametrize(("width", "parts"), [(64, 2), (65, 3), (96, 3)])
def test_the_parts_add_up(width: int, parts: int, half: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair(width)
    graph, sources = captured(model, width)
    if half:
        labels = ["one.weight", "other.weight"]
        graph = store_in_half(graph, labels)
        sources |= {label: cast_tensor(sources[label], torch.float16, CastReport()) for label in labels}
        model.one.weight.data, model.other.weight.data = (
            layer.weight.data.half().float() for layer in (model.one, model.other)
        )
    split = split_long_reductions(graph, LongReductions(least=64, piece=32))
    assert split.variables == graph.variables
    assert sum(op.operator == "tract_core_einsum" for op in split.operations) == 2 * parts + 1
    archive = write_document(tmp_path / "model", split, sources, compression_level=None).path
    with TractWheel().load(archive) as engine:
        for steps in (1, 3, 40):
            x = torch.randn(1, steps, width)
            for found, wanted in zip(engine.run([x.numpy()]), model(x), strict=True):
                np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)
        assert engine.operators()["Slice"] == parts  # of the values; matrices are cut at load


def test_short_sums_and_blocks_stay() -> None:
    graph, _ = captured(Pair(64), 64)
    assert split_long_reductions(graph, MEASURED) is graph
    assert split_long_reductions(graph, LongReductions(65, 32)) is graph
    blocks = store_in_blocks(graph, {"one.weight": "q4_0", "other.weight": "q4_0"})
    assert split_long_reductions(blocks, LongReductions(64, 32)) is blocks
