"""Half precision casts: torch's own rounding, and saturation that is counted instead of a silent inf."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import WeightError
from generic_export.weights import half
from generic_export.weights.source import InMemoryTensor, TensorSource
from quant import CastReport, CastTensor, OverflowCount, cast_tensor

FLOATS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}


def streamed(source: TensorSource) -> torch.Tensor:
    data = bytearray(b"".join(source.chunks()))
    values = torch.frombuffer(data, dtype=source.dtype) if data else torch.empty(0, dtype=source.dtype)
    return values.reshape(source.shape)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, CastReport]:
    report = CastReport()
    return streamed(cast_tensor(InMemoryTensor("w", tensor), dtype, report)), report


@pytest.mark.parametrize("dtype", half.TARGET_DTYPES, ids=str)
@pytest.mark.parametrize("origin", half.SOURCE_DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_cast_is_torchs_own_with_saturation(origin, dtype, data):
    numbers = st.floats(width=32) | st.floats(65_000, 66_000) | st.sampled_from([65504.0, 65519.9, 65520.0, 65536.0])
    signed = st.tuples(numbers, st.sampled_from([1.0, -1.0])).map(math.prod)
    wide = st.floats() if origin is torch.float64 else signed
    tensor = torch.tensor(data.draw(st.lists(signed | wide, max_size=40)), dtype=torch.float64).to(origin)
    expected = tensor.to(dtype)
    overflowed = expected.isinf() & tensor.isfinite()
    expected[overflowed] = tensor[overflowed].sign().to(dtype) * torch.finfo(dtype).max
    result, report = cast(tensor, dtype)
    assert torch.equal(result.isnan(), tensor.isnan())
    assert torch.equal(result.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    count = int(overflowed.sum())
    assert report.overflows == ({"w": OverflowCount(count, tensor[overflowed].abs().max().item())} if count else {})


@pytest.mark.parametrize("origin", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_16_bit_pattern(origin, dtype):
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(origin)
    result, report = cast(tensor, dtype)
    reference = tensor.to(dtype)
    overflowed = reference.isinf() & tensor.isfinite()
    assert torch.equal(result[~overflowed].nan_to_num(nan=1.0), reference[~overflowed].nan_to_num(nan=1.0))
    assert torch.equal(result[overflowed], tensor[overflowed].sign().to(dtype) * torch.finfo(dtype).max)
    if origin is torch.bfloat16 and dtype is torch.float16:
        assert report.overflows["w"] == OverflowCount(int(overflowed.sum()), torch.finfo(torch.bfloat16).max)
    else:
        assert report.overflows == {}


@pytest.mark.parametrize(
    ("value", "result", "counted"),
    [(65504.0, 65504.0, 0), (65519.0, 65504.0, 0), (65520.0, 65504.0, 1), (-1e9, -65504.0, 1), (1e300, 65504.0, 1)],
)
def test_the_edge_of_float16(value, result, counted):
    tensor, report = cast(torch.tensor([value, 1.0], dtype=torch.float64), torch.float16)
    assert tensor.tolist() == [result, 1.0]
    assert report.overflows == ({"w": OverflowCount(1, abs(value))} if counted else {})


def test_true_infinities_and_nan_stay_and_are_not_counted():
    tensor, report = cast(torch.tensor([math.inf, -math.inf, math.nan, 2.0]), torch.float16)
    assert str(tensor.tolist()) == "[inf, -inf, nan, 2.0]"
    assert report.overflows == {}


def test_overflows_add_up_over_chunks_and_not_over_passes(monkeypatch):
    import generic_export.weights.source as source_module

    monkeypatch.setattr(source_module, "CHUNK_BYTES", 8)
    tensor = torch.tensor([1e6, 1.0, -2e6, 3e5, 0.5])
    report = CastReport()
    source = CastTensor(InMemoryTensor("w", tensor), torch.float16, report)
    for _ in range(2):
        streamed(source)
        assert report.overflows == {"w": OverflowCount(3, 2e6)}


def test_widening_keeps_chunks_small(monkeypatch):
    monkeypatch.setattr(half, "CHUNK_BYTES", 64)
    tensor = torch.arange(100).half()
    source = CastTensor(InMemoryTensor("w", tensor), torch.float64, CastReport())
    assert max(len(chunk) for chunk in source.chunks()) == 64
    assert torch.equal(streamed(source), tensor.double())


def test_metadata_follows_the_new_dtype():
    source = CastTensor(InMemoryTensor("layer.w", torch.ones(3, 5).bfloat16()), torch.float32, CastReport())
    assert isinstance(source, TensorSource)
    assert (source.name, source.shape, source.dtype, source.nbytes) == ("layer.w", (3, 5), torch.float32, 60)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_scalars_and_empty_tensors(shape):
    result, _ = cast(torch.ones(shape), torch.float16)
    assert torch.equal(result, torch.ones(shape, dtype=torch.float16))


def test_same_dtype_is_the_source_itself():
    for dtype in (torch.float16, torch.int64, torch.bfloat16):
        source = InMemoryTensor("w", torch.ones(2, dtype=dtype))
        assert cast_tensor(source, dtype, CastReport()) is source


@pytest.mark.parametrize(
    ("origin", "dtype"),
    [(torch.int64, torch.float16), (torch.bool, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_other_casts_are_refused(origin, dtype):
    with pytest.raises(WeightError, match="tensor w: no cast from"):
        cast_tensor(InMemoryTensor("w", torch.ones(2).to(origin)), dtype, CastReport())


class Bytes:
    """A source whose chunks are read-only bytes."""

    name, shape, dtype, nbytes = "w", (2,), torch.float32, 8

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def chunks(self):
        return map(memoryview, self._chunks)


@pytest.mark.filterwarnings("error")
def test_read_only_chunks_are_cast_without_a_warning():
    source = Bytes(b"\x00\x00\x80\x3f", b"", b"\x00\x00\x00\x40")
    assert streamed(CastTensor(source, torch.float16, CastReport())).tolist() == [1.0, 2.0]


def test_a_chunk_that_splits_a_value_is_refused():
    with pytest.raises(WeightError, match="tensor w: a chunk of 5 bytes splits a float32 value"):
        streamed(CastTensor(Bytes(b"12345", b"678"), torch.float16, CastReport()))
