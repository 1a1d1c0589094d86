"""Quantising in the stream: the same bytes as in one piece, bounded memory, errors with names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from generic_export.errors import WeightError
from generic_export.weights.source import BlockTensorSource, InMemoryTensor, RenamedTensor
from generic_export.weights.values import row_pieces
from quant import stream
from quant.algorithms import BUILT_IN
from quant.packing import dequantize_bytes, pack_q4_0, pack_q8_1
from quant.stream import PermutedTensor, QuantizationReport, QuantizedTensor, Remainder, row_length


def streamed(source: InMemoryTensor, **options: object) -> tuple[bytes, QuantizationReport]:
    report = QuantizationReport()
    quantized = QuantizedTensor(source, BUILT_IN["min_max"], report, **options)  # type: ignore[arg-type]
    assert isinstance(quantized, BlockTensorSource)
    data = b"".join(quantized.chunks())
    assert len(data) == quantized.nbytes
    return data, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [32, 200, 1 << 20])
def test_pieces_give_the_bytes_of_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int) -> None:
    monkeypatch.setattr(stream, "ROW_PIECE_VALUES", piece)
    monkeypatch.setattr("generic_export.weights.source.CHUNK_BYTES", 1000)  # chunks that split rows
    weight = torch.randn(37, 96).to(dtype)
    data, report = streamed(InMemoryTensor("w", weight))
    whole = BUILT_IN["min_max"].quantize(weight.float())
    assert data == pack_q4_0(whole).numpy().tobytes()
    error = report.errors["w"]
    exact = (whole.dequantize() - weight.float()).double().square().sum() / weight.double().square().sum()
    assert error.values == weight.numel()
    assert error.relative_error == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("piece", [32, 200, 1 << 20])
def test_what_blocks_leave_is_added_to_them(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(stream, "_ONE_PASS_VALUES", piece)
    weight = torch.randn(70, 96)
    weight[3] = torch.arange(96) % 8 * 0.5  # on a grid
    report = QuantizationReport()
    blocks = QuantizedTensor(InMemoryTensor("w", weight), BUILT_IN["search"], report)
    rest = QuantizedTensor(RenamedTensor(Remainder(blocks), "rest"), BUILT_IN["search"], report)
    total = sum(dequantize_bytes(read_blocks(each), "q4_0") for each in (blocks, rest)).reshape(weight.shape)
    left = float((total - weight).square().sum() / weight.square().sum())
    assert left < 5e-5 and torch.equal(total[3], weight[3])
    assert report.errors["rest"].squared_error / report.errors["w"].energy == pytest.approx(left, rel=1e-3)


def read_blocks(source: QuantizedTensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(source.chunks())), dtype=torch.uint8)


def test_streaming_twice_counts_once() -> None:
    report = QuantizationReport()
    tensor = QuantizedTensor(InMemoryTensor("w", torch.randn(4, 64)), BUILT_IN["search"], report)
    first = b"".join(tensor.chunks()), report.errors["w"]
    assert (b"".join(tensor.chunks()), report.errors["w"]) == first


def test_q8_1_in_the_stream() -> None:
    weight = torch.randn(50, 64)
    data, report = streamed(InMemoryTensor("w", weight), block_format="q8_1")
    assert data == pack_q8_1(weight).numpy().tobytes()
    assert report.errors["w"].relative_error < 1e-4


def test_kernels_are_rows_of_all_their_values() -> None:
    weight = torch.randn(8, 32, 3)
    assert row_length((8, 32, 3)) == 96
    data, _ = streamed(InMemoryTensor("w", weight))
    assert data == pack_q4_0(BUILT_IN["min_max"].quantize(weight.flatten(1))).numpy().tobytes()


@pytest.mark.parametrize("shape", [(64,), (4, 48), (0, 64), ()])
def test_shapes_without_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match="tensor w: shape"):
        QuantizedTensor(InMemoryTensor("w", torch.zeros(shape)), BUILT_IN["search"], QuantizationReport())


def test_integers_are_refused() -> None:
    with pytest.raises(WeightError, match=r"tensor w: torch\.int64 cannot be quantized"):
        QuantizedTensor(
            InMemoryTensor("w", torch.zeros(2, 32, dtype=torch.int64)), BUILT_IN["search"], QuantizationReport()
        )


def test_nan_is_refused_with_the_tensors_name_and_the_threads_end() -> None:
    weight = torch.randn(64, 64)
    weight[40, 3] = torch.nan
    threads = torch.get_num_threads()
    with pytest.raises(WeightError, match=r"tensor model\.layers\.3\.w: it contains inf or NaN"):
        streamed(InMemoryTensor("model.layers.3.w", weight))
    assert torch.get_num_threads() == threads


def test_a_source_is_read_only_a_few_pieces_ahead() -> None:
    read = 0

    class Counting:
        """Rows that are counted as they are asked for."""

        name, shape, dtype = "w", (40, 1 << 16), torch.float32
        nbytes = 40 * 4 << 16

        def chunks(self) -> Iterator[memoryview]:
            nonlocal read
            for _ in range(40):
                read += 1
                yield memoryview(bytearray(4 << 16))

    tensor = QuantizedTensor(Counting(), BUILT_IN["min_max"], QuantizationReport())
    chunks = tensor.chunks()
    next(chunks)
    assert read <= 4 * (stream.ROW_PIECE_VALUES >> 16)
    chunks.close()  # type: ignore[attr-defined]


def test_row_pieces_keep_rows_whole() -> None:
    weight = torch.arange(7 * 64, dtype=torch.float32).view(7, 64)
    pieces = list(row_pieces(InMemoryTensor("w", weight), 64, 150))
    assert [piece.shape for piece in pieces] == [(2, 64), (2, 64), (2, 64), (1, 64)]
    assert torch.equal(torch.cat(pieces), weight)


def test_a_permuted_tensor_streams_its_values_in_the_new_order() -> None:
    weight = torch.randn(6, 32)
    permuted = PermutedTensor(InMemoryTensor("w", weight), (1, 0))
    assert permuted.shape == (32, 6)
    assert b"".join(permuted.chunks()) == weight.T.contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [32, 200, 1 << 20])
def test_one_pass_gives_the_blocks_of_the_algorithm(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(stream, "_ONE_PASS_VALUES", piece)
    monkeypatch.setattr("generic_export.weights.source.CHUNK_BYTES", 1000)  # chunks that split rows
    weight = torch.randn(37, 96).to(dtype)
    report = QuantizationReport()
    data = b"".join(QuantizedTensor(InMemoryTensor("w", weight), BUILT_IN["search"], report).chunks())
    blocks = BUILT_IN["search"].quantize(weight.float())
    assert data == pack_q4_0(blocks).numpy().tobytes()
    exact = (blocks.dequantize() - weight.float()).double().square().sum() / weight.double().square().sum()
    assert report.errors["w"].values == weight.numel()
    assert report.errors["w"].relative_error == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_is_refused_with_the_tensors_name_in_one_pass(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 64).to(dtype)
    weight[40, 3] = torch.nan
    source = InMemoryTensor("model.layers.3.w", weight)
    with pytest.raises(WeightError, match=r"tensor model\.layers\.3\.w: it contains inf or NaN"):
        list(QuantizedTensor(source, BUILT_IN["search"], QuantizationReport()).chunks())
