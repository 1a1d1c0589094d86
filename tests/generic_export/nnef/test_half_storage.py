"""f16 tensors read by a graph that computes in f32, in the engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.capture import prepare
from generic_export.documents import translate_graph
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from generic_export.nnef.text import graph_text
from generic_export.translate.translate import TranslationOptions
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.write.document import write_document


class Reads(nn.Module):
    """Reads tensors in every way that matters: rows, products, both, a kernel, an addition, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.narrow = nn.Embedding(50, 16), nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.added = nn.Parameter(torch.randn(1, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + 1e5 * self.narrow(ids) + self.added  # beyond f16's range on the way
        x = self.linear(x) + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x @ self.table.weight.T


def captured(model: nn.Module) -> tuple[NnefGraph, dict]:
    target = TractNNEF(dynamic_axes={"ids": {1: "S"}}, check_io=False)
    prepared = prepare(model.eval(), (torch.zeros(1, 5, dtype=torch.int64),), target, ("ids",), ("y",))
    return translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)


def test_the_engine_computes_in_f32_with_f16_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reads()
    graph, sources = captured(model)
    names = dict(model.named_parameters())
    halved = store_in_half(graph, names)
    dtypes = {variable.label: variable.dtype for variable in halved.variables}
    assert {label for label, dtype in dtypes.items() if dtype == "f16"} == {
        name for name, parameter in names.items() if parameter.ndim >= 2
    }
    for variable in halved.variables:
        if variable.dtype == "f16":
            sources[variable.label] = cast_tensor(sources[variable.label], torch.float16, CastReport())
    archive = write_document(tmp_path / "model", halved, sources, compression_level=None).path
    rounded = Reads().eval()
    rounded.load_state_dict({n: p.half().float() if p.ndim >= 2 else p for n, p in model.state_dict().items()})
    with TractWheel().load(archive) as engine:
        for steps in (1, 4, 9):
            ids = torch.randint(0, 50, (1, steps))
            (answer,) = engine.run([ids.numpy()])
            expected = rounded(ids).detach()
            assert answer.dtype == "float32"
            assert torch.allclose(
                torch.from_numpy(answer), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())
            )


def test_products_and_rows_are_read_as_they_are() -> None:
    text = graph_text(store_in_half(*_named(Reads())))
    assert text.count('to="f32"') == text.count("_rows = ") + 2  # and one for the kernel, one for what is added
    assert text.count("_rows = tract_core_gather") == 2
    assert not [line for line in text.splitlines() if "einsum" in line and "_f32" in line.split("#")[0]]


def test_what_is_not_named_stays() -> None:
    graph, _ = captured(Reads())
    assert store_in_half(graph, ()) == graph
    some = store_in_half(graph, {"linear.weight"})
    assert [variable.label for variable in some.variables if variable.dtype == "f16"] == ["linear.weight"]


def _named(model: nn.Module) -> tuple[NnefGraph, list[str]]:
    return captured(model)[0], [name for name, _ in model.named_parameters()]
