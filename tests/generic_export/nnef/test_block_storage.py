"""Which tensors may be blocks, and what the engine makes of the graphs that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from generic_export.errors import GraphError, TensorFormatError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef import dat
from generic_export.nnef.block_storage import may_store, split_products, storage_uses, store_in_blocks
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, NnefVariable, Reference
from generic_export.nnef.text import graph_text
from generic_export.weights.source import InMemoryBlocks, InMemoryTensor, TensorSource
from generic_export.write.document import write_document
from quant.algorithms import BUILT_IN
from quant.packing import dequantize_bytes, pack_q4_0


def op(operator: str, inputs: list[Argument], output: str, **attributes: Argument) -> NnefOperation:
    generic = "scalar" if operator == "variable" else ""
    return NnefOperation(operator, tuple(inputs), tuple(attributes.items()), (output,), generic_type=generic)


def einsum(expr: str, operands: list[str], output: str, acc: str = "f16") -> NnefOperation:
    return op("tract_core_einsum", [ArrayLiteral(tuple(map(Reference, operands)))], output, expr=expr, acc=acc)


def gather(table: str, output: str, **attributes: Argument) -> NnefOperation:
    return op("tract_core_gather", [Reference(table), Reference("ids")], output, **({"axis": 0} | attributes))


def graph_of(shape: tuple[int, ...], *operations: NnefOperation, dtype: str = "f16") -> NnefGraph:
    sizes = ArrayLiteral(shape)
    return NnefGraph(
        "g",
        ("x", "ids"),
        (operations[-1].outputs[0],),
        (
            op("tract_core_external", [], "x", shape=ArrayLiteral((2, 3, 64)), datum_type=dtype),
            op("tract_core_external", [], "ids", shape=ArrayLiteral((5,)), datum_type="i64"),
            op("variable", [], "w", label="w", shape=sizes),
            *operations,
        ),
        (NnefVariable("w", shape, dtype),),
        registries=("tract_core",),
    )


@pytest.mark.parametrize(
    ("graph", "obstacle"),
    [
        (graph_of((8, 64), einsum("abk,nk->abn", ["x", "w"], "y")), ""),
        (graph_of((8, 64), einsum("nk,abk->abn", ["w", "x"], "y")), ""),
        (graph_of((2, 4, 64), einsum("abk,hdk->abhd", ["x", "w"], "y")), ""),
        (graph_of((8, 4, 16), einsum("abhd,nhd->abn", ["x", "w"], "y")), ""),
        (graph_of((64, 8), einsum("abk,kn->abn", ["x", "w"], "y")), ""),
        (graph_of((8, 64), gather("w", "y")), ""),
        (graph_of((8, 64), gather("w", "y", axis=1)), "tract_core_gather (y) reads it"),
        (graph_of((8, 48), einsum("abk,nk->abn", ["x", "w"], "y")), "not a multiple of 32"),
        (graph_of((3, 48, 32), einsum("abk,bkn->abn", ["x", "w"], "y")), "sums over 48 values of it"),
        (graph_of((8, 64), einsum("abk,nk->abnk", ["x", "w"], "y")), "does not sum over its last axis"),
        (graph_of((4, 8, 64), einsum("asb,abk->sk", ["x", "w"], "y")), "sums over several of its axes"),
        (graph_of((8, 64), op("slice", [Reference("w")], "y")), "slice (y) reads it"),
        (graph_of((8, 64), gather("w", "e"), op("add", [Reference("w"), 1.0], "y")), "add (y)"),
        (graph_of((64, 64), gather("w", "e"), einsum("abk,kn->abn", ["x", "w"], "y")), "different axes"),
        (graph_of((8, 64), op("copy", [Reference("x")], "y")), "nothing reads it"),
    ],
)
def test_obstacles_are_found(graph: NnefGraph, obstacle: str) -> None:
    found = storage_uses(graph)["w"].obstacle
    assert (obstacle in found) if obstacle else not found
    if obstacle:
        with pytest.raises(GraphError, match="tensor 'w' cannot be stored as q4_0"):
            store_in_blocks(graph, {"w": "q4_0"})


def test_vectors_are_no_matter_for_blocks() -> None:
    assert "w" not in storage_uses(graph_of((64,), op("mul", [Reference("x"), Reference("w")], "y")))


def test_eight_bits_are_for_gathers_only() -> None:
    product = storage_uses(graph_of((8, 64), einsum("abk,nk->abn", ["x", "w"], "y")))["w"]
    table = storage_uses(graph_of((8, 64), gather("w", "y")))["w"]
    assert may_store(product, "q8_1") and not may_store(table, "q8_1")


def test_a_folded_table_counts_as_gathered() -> None:
    out = op("reshape", [Reference("w")], "r", shape=ArrayLiteral((2, 32)), axis_start=1, axis_count=1)
    back = op("reshape", [Reference("r")], "t", shape=ArrayLiteral((64,)), axis_start=1, axis_count=2)
    use = storage_uses(graph_of((8, 64), out, back, gather("t", "y")))["w"]
    assert use.gathered and not use.multiplied and not use.obstacle


def test_products_accumulate_in_f32_and_round_once() -> None:
    text = graph_text(store_in_blocks(graph_of((8, 64), einsum("abk,nk->abn", ["x", "w"], "y")), {"w": "q4_0"}))
    assert 'y_sum = tract_core_einsum([w, x], expr="nk,abk->abn", acc="f32");' in text
    assert 'y = tract_core_cast(y_sum, to="f16");' in text


def stored(label: str, values: torch.Tensor) -> tuple[TensorSource, torch.Tensor]:
    blob = pack_q4_0(BUILT_IN["search"].quantize(values))
    return InMemoryBlocks(label, tuple(values.shape), "q4_0", blob), dequantize_bytes(blob, "q4_0")


def run(path: Path, graph: NnefGraph, sources: dict[str, TensorSource], inputs: list[torch.Tensor]) -> torch.Tensor:
    archive = write_document(path / "model", graph, sources, compression_level=None).path
    with TractWheel().load(archive) as model:
        return torch.from_numpy(model.run([tensor.numpy() for tensor in inputs])[0])


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_engine_multiplies_with_blocks(tmp_path: Path, dtype: str, transposed: bool) -> None:
    torch.manual_seed(0)
    product = einsum("abk,kn->abn" if transposed else "abk,nk->abn", ["x", "w"], "y", acc=dtype)
    graph = store_in_blocks(graph_of((64, 8) if transposed else (8, 64), product, dtype=dtype), {"w": "q4_0"})
    assert graph.variables == (NnefVariable("w", (8, 64), "q4_0"),)
    source, values = stored("w", torch.randn(8, 64))
    x = torch.randn(2, 3, 64, dtype=torch.float16 if dtype == "f16" else torch.float32)
    actual = run(tmp_path, graph, {"w": source}, [x, torch.zeros(5, dtype=torch.int64)])
    assert actual.dtype is x.dtype
    expected = x.float() @ values.T
    assert torch.allclose(actual.float(), expected, rtol=1e-3, atol=2e-2 if dtype == "f16" else 1e-4)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("order", ["abk,nk->abn", "nk,abk->abn"])
def test_products_with_joined_heads_are_right_in_a_batch(tmp_path: Path, batch: int, order: str) -> None:
    """[B, H, S, D] -> [B, S, H*D] -> a product: the engine folds the reshape into it."""
    torch.manual_seed(0)
    turned = op("transpose", [Reference("x")], "t", axes=ArrayLiteral((0, 2, 1, 3)))
    joined = op("reshape", [Reference("t")], "r", shape=ArrayLiteral((64,)), axis_start=2, axis_count=2)
    operands = ["r", "w"] if order.startswith("a") else ["w", "r"]
    graph = graph_of((8, 64), turned, joined, einsum(order, operands, "y", acc="f32"), dtype="f32")
    heads = op("tract_core_external", [], "x", shape=ArrayLiteral((batch, 4, 3, 16)), datum_type="f32")
    graph = NnefGraph(**(graph.__dict__ | {"operations": (heads, *graph.operations[1:])}))
    source, values = stored("w", torch.randn(8, 64))
    x = torch.randn(batch, 4, 3, 16)
    blocks = store_in_blocks(graph, {"w": "q4_0"})
    actual = run(tmp_path, blocks, {"w": source}, [x, torch.zeros(5, dtype=torch.int64)])
    assert torch.allclose(actual, x.transpose(1, 2).flatten(2) @ values.T, rtol=1e-3, atol=1e-4)


def test_a_product_that_reads_a_concatenation_is_one_product(tmp_path: Path) -> None:
    """tract would make two of it, with slices of the blocks, and abort."""
    source, values = stored("w", torch.randn(32, 128, generator=torch.Generator().manual_seed(0)))
    joined = op("concat", [ArrayLiteral((Reference("x"), Reference("twice")))], "joined", axis=2)
    twice = op("add", [Reference("x"), Reference("x")], "twice")
    plain = graph_of((32, 128), twice, joined, einsum("abk,nk->abn", ["joined", "w"], "y", acc="f32"), dtype="f32")
    x = torch.randn(2, 3, 64)
    y = run(tmp_path, store_in_blocks(plain, {"w": "q4_0"}), {"w": source}, [x, torch.zeros(5, dtype=torch.int64)])
    torch.testing.assert_close(y, torch.cat([x, 2 * x], -1) @ values.T, atol=1e-3, rtol=1e-3)


def test_a_product_that_reads_a_concatenation_whose_axes_moved_is_one_product(tmp_path: Path) -> None:
    """Heads of a mixer joined as channels [B, 2*D, S], then turned (Zamba): the engine turns the parts and goes on as above."""
    source, values = stored("w", torch.randn(32, 128, generator=torch.Generator().manual_seed(0)))
    channels = op("transpose", [Reference("x")], "channels", axes=ArrayLiteral((0, 2, 1)))
    twice = op("add", [Reference("channels"), Reference("channels")], "twice")
    joined = op("concat", [ArrayLiteral((Reference("channels"), Reference("twice")))], "joined", axis=1)
    back = op("transpose", [Reference("joined")], "back", axes=ArrayLiteral((0, 2, 1)))
    product = einsum("nk,abk->abn", ["w", "back"], "y", acc="f32")
    plain = graph_of((32, 128), channels, twice, joined, back, product, dtype="f32")
    x = torch.randn(2, 3, 64)
    y = run(tmp_path, store_in_blocks(plain, {"w": "q4_0"}), {"w": source}, [x, torch.zeros(5, dtype=torch.int64)])
    torch.testing.assert_close(y, torch.cat([x, 2 * x], -1) @ values.T, atol=1e-3, rtol=1e-3)


def test_the_head_of_a_tied_table_may_be_stored_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    joined = op("add", [Reference("e"), Reference("p")], "y")
    pick = gather("w", "e", datum_type="f32")
    graph = graph_of((8, 64), pick, einsum("abk,nk->n", ["x", "w"], "n", "f32"), gather("n", "p"), joined, dtype="f32")
    reshape = op("unsqueeze", [Reference("p")], "q", axes=ArrayLiteral((1,)))
    operations = (*graph.operations[:-1], reshape, op("add", [Reference("e"), Reference("q")], "y"))
    graph = NnefGraph(**(graph.__dict__ | {"operations": operations}))
    split = store_in_blocks(split_products(graph, {"w": "head"}), {"head": "q4_0"})
    assert [(variable.label, variable.dtype) for variable in split.variables] == [("w", "f32"), ("head", "q4_0")]
    table = torch.randn(8, 64)
    source, values = stored("head", table)
    x, ids = torch.randn(2, 3, 64), torch.tensor([7, 0, 1, 3, 3])
    actual = run(tmp_path, split, {"w": InMemoryTensor("w", table), "head": source}, [x, ids])
    expected = table[ids] + (x @ values.T).sum(dim=(0, 1))[ids].unsqueeze(1)
    assert torch.allclose(actual, expected, atol=1e-3)


# --- the file ----------------------------------------------------------------------------------------


def test_block_files_are_written_and_read(tmp_path: Path) -> None:
    source, _ = stored("w", torch.randn(4, 64))
    header = dat.block_header_bytes((4, 64), "q4_0")
    path = tmp_path / "w.dat"
    path.write_bytes(header + b"".join(source.chunks()))
    found = dat.read_block_dat(path)
    assert found.header.shape == (4, 64)
    assert found.header.block_format == dat.BLOCK_FORMATS["q4_0"]
    assert found.data.numpy().tobytes() == b"".join(source.chunks())
    assert header[44:52] == bytes.fromhex("ffffffff40305254")  # bits, item type, vendor
    with pytest.raises(TensorFormatError, match="has no torch dtype"):
        dat.read_dat(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TensorFormatError, match="its header says"):
        dat.read_block_dat(path)


@pytest.mark.parametrize("shape", [(64,), (4, 48), (0, 64), (1,) * 9 + (32,)])
def test_shapes_without_blocks_have_no_header(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorFormatError, match="has no q4_0 form"):
        dat.block_header_bytes(shape, "q4_0", name="w")


def test_headers_that_contradict_themselves_are_refused() -> None:
    header = bytearray(dat.block_header_bytes((4, 64), "q8_1"))
    assert dat.parse_header(header).data_size == 4 * 2 * 36
    header[4] ^= 1
    with pytest.raises(TensorFormatError, match="says 289 bytes of q8_1"):
        dat.parse_header(header)
    with pytest.raises(TensorFormatError, match="block format 'q5_0' is unknown"):
        dat.block_header_bytes((4, 64), "q5_0")
    with pytest.raises(TensorFormatError, match="at most 4294967295"):
        dat.block_header_bytes((1 << 18, 1 << 16), "q4_0")


def test_plain_files_are_no_block_files(tmp_path: Path) -> None:
    dat.write_dat(tmp_path / "w.dat", torch.zeros(2, 32))
    with pytest.raises(TensorFormatError, match="not one of the block formats"):
        dat.read_block_dat(tmp_path / "w.dat")
