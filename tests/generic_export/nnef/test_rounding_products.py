"""Casts to f16 that products make unnecessary: the same bytes in the engine, fewer nodes."""

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
from generic_export.nnef.block_storage import store_in_blocks
from generic_export.nnef.graph import NnefGraph, references
from generic_export.nnef.half_storage import store_in_half
from generic_export.nnef.rewriting import FreeNames, attribute
from generic_export.nnef.rounding_products import IdentityProducts, RoundedValues, float_types, round_in_products
from generic_export.nnef.weights_in_memory import widen_weights
from generic_export.translate.translate import TranslationOptions
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.write.document import write_document
from quant.algorithms import BUILT_IN
from quant.stream import QuantizationReport, QuantizedTensor

WIDTH, HEADS, INNER = 64, 4, 96
LABEL = "values.weight"


class KeptValues(nn.Module):
    """What attention keeps of its values: a product, its heads apart, in f16."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.values = nn.Linear(WIDTH, INNER, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.values(x).view(*x.shape[:2], HEADS, INNER // HEADS)
        return heads.transpose(1, 2).to(torch.float16)


class _ReadTwice(KeptValues):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        made = self.values(x)
        return made.to(torch.float16), made.exp()


class _Computed(KeptValues):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(x).exp().to(torch.float16)


def captured(model: nn.Module) -> tuple[NnefGraph, dict]:
    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    names = ("y", "z") if isinstance(model, _ReadTwice) else ("y",)
    prepared = prepare(model.eval(), (torch.zeros(1, 5, WIDTH),), target, ("x",), names)
    return translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)


def in_half(model: nn.Module) -> tuple[NnefGraph, dict]:
    graph, sources = captured(model)
    halved = store_in_half(graph, [LABEL])
    return halved, sources | {LABEL: cast_tensor(sources[LABEL], torch.float16, CastReport())}


def in_blocks(model: nn.Module) -> tuple[NnefGraph, dict]:
    graph, sources = captured(model)
    packed = QuantizedTensor(sources[LABEL], BUILT_IN["min_max"], QuantizationReport())
    return store_in_blocks(graph, {LABEL: "q4_0"}), sources | {LABEL: packed}


def answers(folder: Path, graph: NnefGraph, sources: dict, inputs: list[np.ndarray]) -> tuple[list, dict[str, int]]:
    archive = write_document(folder, graph, sources, compression_level=None).path
    with TractWheel().load(archive) as engine:
        return [engine.run([x])[0] for x in inputs], dict(engine.operators())


@pytest.mark.parametrize("stored", [in_half, in_blocks])
def test_the_same_bytes_without_the_cast(tmp_path: Path, stored) -> None:
    torch.manual_seed(0)
    graph, sources = stored(KeptValues())
    rounding = round_in_products(graph)
    inputs = [(10 ** torch.randn(1, steps, WIDTH)).numpy() for steps in (1, 4, 33)]
    expected, before = answers(tmp_path / "cast", graph, sources, inputs)
    found, after = answers(tmp_path / "product", rounding, sources, inputs)
    assert (before.get("Cast", 0), after.get("Cast", 0)) == (1, 0)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float16
        assert one.tobytes() == other.tobytes()
    assert rounding.outputs == graph.outputs
    (product,) = (op for op in rounding.operations if op.operator == "tract_core_einsum")
    assert attribute(product, "acc") == "f16"
    assert product.note.startswith("f16 [")


@pytest.mark.parametrize(
    "graph",
    [
        captured(KeptValues())[0],  # f32 weights: the kernels for them do not store f16
        in_half(KeptValues(bias=True))[0],  # would be added in f16
        in_half(_ReadTwice())[0],
        in_half(_Computed())[0],
    ],
    ids=["f32", "bias", "read twice", "computed"],
)
def test_other_casts_stay(graph: NnefGraph) -> None:
    assert round_in_products(graph) == graph


def test_half_values_are_not_summed_in_half() -> None:
    graph, _ = in_blocks(KeptValues())
    halves = tuple(
        replace(op, attributes=(("shape", attribute(op, "shape")), ("datum_type", "f16")))
        if op.operator == "tract_core_external"
        else op
        for op in graph.operations
    )
    graph = replace(graph, operations=halves)
    assert float_types(graph)["x"] == "f16"
    assert round_in_products(graph) == graph


def test_a_product_that_rounds_is_not_widened() -> None:
    graph = round_in_products(in_half(KeptValues())[0])
    assert widen_weights(graph, "f32") == graph
    assert widen_weights(in_half(KeptValues())[0], "f32") != in_half(KeptValues())[0]


@pytest.mark.parametrize("width", [1, 7, 64])
def test_an_identity_product_rounds_as_a_cast_does(width: int, tmp_path: Path) -> None:
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float16)

    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    prepared = prepare(Halved(), (torch.zeros(1, 5, width),), target, ("x",), ("y",))
    graph = translate_graph(prepared.graph, target, TranslationOptions())
    source, cast = graph.operations
    product = IdentityProducts(FreeNames(graph)).rounded(source.outputs[0], cast.outputs[0], 3, width, cast, cast.note)
    replaced = replace(graph, operations=(source, *product))
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, (1, 999, width), dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = 65519.99  # the largest that f16 holds, rounded
    inputs = [values, generator.standard_normal((1, 3, width), dtype=np.float32)]
    expected, _ = answers(tmp_path / "cast", graph, {}, inputs)
    found, operators = answers(tmp_path / "product", replaced, {}, inputs)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)  # but for the sign of zeros
    assert "Eq" not in operators and "Range" not in operators  # the matrix is folded at load


def test_what_a_product_rounds_anyway() -> None:
    graph, _ = in_half(KeptValues())
    (cast,) = (op for op in graph.operations if op.operator == "tract_core_cast")
    assert references(cast)[0] in RoundedValues(graph)
    assert graph.inputs[0] not in RoundedValues(graph)
