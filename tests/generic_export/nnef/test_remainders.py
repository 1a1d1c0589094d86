"""Tensors stored as the sum of two: what the engine makes of products and gathers that read both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generic_export.nnef.block_storage import storage_uses, store_in_blocks
from generic_export.nnef.graph import ArrayLiteral, NnefGraph, NnefVariable, Reference
from generic_export.nnef.half_storage import with_remainders
from generic_export.nnef.text import graph_text
from generic_export.nnef.weights_in_memory import widen_weights
from tests.generic_export.nnef.test_block_storage import einsum, gather, graph_of, op, run, stored

IDS = torch.tensor([7, 0, 1, 3, 3])


def in_two(graph: NnefGraph) -> NnefGraph:
    return store_in_blocks(with_remainders(graph, {"w": "rest"}), {"w": "q4_0", "rest": "q4_0"})


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_two_products_are_added_before_they_are_rounded(tmp_path: Path, dtype: str, transposed: bool) -> None:
    torch.manual_seed(0)
    product = einsum("abk,kn->abn" if transposed else "abk,nk->abn", ["x", "w"], "y", acc=dtype)
    plain = graph_of((64, 8) if transposed else (8, 64), product, dtype=dtype)
    assert storage_uses(plain)["w"].addable
    graph = in_two(plain)
    assert graph.outputs == ("y",)
    assert [(each.label, each.shape, each.residual_of) for each in graph.variables] == [
        ("w", (8, 64), ""),
        ("rest", (8, 64), "w"),
    ]
    assert sum(each.values for each in graph.variables) == 8 * 64 and graph.variables[1].parameter == "w"
    if dtype == "f16":
        assert 'y = tract_core_cast(y_total, to="f16");' in graph_text(graph) and 'acc="f16"' not in graph_text(graph)
    weight = torch.randn(8, 64)
    first, values = stored("w", weight)
    second, left = stored("rest", weight - values.reshape(8, 64))
    x = torch.randn(2, 3, 64, dtype=torch.float16 if dtype == "f16" else torch.float32)
    actual = run(tmp_path, graph, {"w": first, "rest": second}, [x, IDS])
    assert actual.dtype is x.dtype
    expected = x.float() @ (values + left).reshape(8, 64).T
    torch.testing.assert_close(actual.float(), expected, rtol=1e-3, atol=2e-2 if dtype == "f16" else 1e-4)
    torch.testing.assert_close(actual.float(), x.float() @ weight.T, rtol=1e-2, atol=0.2)


@pytest.mark.parametrize("folded", [False, True])
def test_rows_of_two_tables_and_a_product_with_both_are_added(tmp_path: Path, folded: bool) -> None:
    """A tied table; a wide one is folded out and back before the gather."""
    torch.manual_seed(0)
    out = op("reshape", [Reference("w")], "o", shape=ArrayLiteral((2, 32)), axis_start=1, axis_count=1)
    back = op("reshape", [Reference("o")], "t", shape=ArrayLiteral((64,)), axis_start=1, axis_count=2)
    pick = gather("t" if folded else "w", "e", datum_type="f32")
    total = einsum("abk,nk->n", ["x", "w"], "p", "f32")
    column = op("unsqueeze", [Reference("p")], "q", axes=ArrayLiteral((1,)))
    joined = op("add", [Reference("e"), Reference("s")], "y")
    scale = op(
        "slice", [Reference("q")], "s", axes=ArrayLiteral((0,)), begin=ArrayLiteral((0,)), end=ArrayLiteral((1,))
    )
    moves = (out, back) if folded else ()
    plain = graph_of((8, 64), *moves, pick, total, column, scale, joined, dtype="f32")
    assert storage_uses(plain)["w"].addable
    weight, x = torch.randn(8, 64), torch.randn(2, 3, 64)
    first, values = stored("w", weight)
    second, left = stored("rest", weight - values.reshape(8, 64))
    whole = (values + left).reshape(8, 64)
    actual = run(tmp_path, in_two(plain), {"w": first, "rest": second}, [x, IDS])
    expected = whole[IDS] + (x @ whole.T).sum(dim=(0, 1))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wider", ["f16", "f32"])
def test_in_memory_the_two_are_one_weight(tmp_path: Path, wider: str) -> None:
    torch.manual_seed(0)
    graph = in_two(graph_of((8, 64), einsum("abk,nk->abn", ["x", "w"], "y", acc="f32"), dtype="f32"))
    widened = widen_weights(graph, wider)
    assert [each.operator for each in widened.operations].count("tract_core_einsum") == 1
    assert graph_text(widen_weights(graph, wider, kept=["w"])) == graph_text(graph)
    weight, x = torch.randn(8, 64), torch.randn(2, 3, 64)
    first, values = stored("w", weight)
    second, left = stored("rest", weight - values.reshape(8, 64))
    actual = run(tmp_path, widened, {"w": first, "rest": second}, [x, IDS])
    expected = x @ (values + left).reshape(8, 64).T
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-2 if wider == "f16" else 1e-4)


def test_what_is_neither_product_nor_gather_is_not_doubled() -> None:
    kernel = op("conv", [Reference("x"), Reference("w"), 0.0], "y", groups=1)
    assert not storage_uses(graph_of((8, 64, 3), kernel))["w"].addable


def test_other_variables_are_left_alone() -> None:
    graph = graph_of((8, 64), einsum("abk,nk->abn", ["x", "w"], "y"))
    more = replace(graph, variables=(*graph.variables, NnefVariable("v", (3,), "f32")))
    assert with_remainders(more, {}) == more
    assert [each.label for each in with_remainders(more, {"w": "rest"}).variables] == ["w", "rest", "v"]
