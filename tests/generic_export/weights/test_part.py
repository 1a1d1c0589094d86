"""A part of a parameter streams the bytes that slicing, permuting and padding the parameter in PyTorch gives."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import WeightError
from generic_export.weights.part import PartTensor, TensorPart, part_source
from generic_export.weights.source import CHUNK_BYTES, InMemoryTensor


def read(source: PartTensor) -> torch.Tensor:
    data = bytearray(b"".join(bytes(chunk) for chunk in source.chunks()))
    assert len(data) == source.nbytes
    return torch.frombuffer(data, dtype=source.dtype).reshape(source.shape) if data else torch.empty(source.shape)


@st.composite
def parts(draw: st.DrawFn) -> TensorPart:
    view = tuple(draw(st.integers(1, 6)) for _ in range(3))
    cuts = []
    for size in view:
        begin = draw(st.integers(0, size - 1))
        cuts.append((begin, draw(st.integers(begin + 1, size)), draw(st.integers(1, 3))))
    order = draw(st.sampled_from([(0, 1, 2), (0, 2, 1)]))
    part = TensorPart("w", view, tuple(cuts), order, (0, 0, 0))
    shape = tuple(size + draw(st.integers(0, 3)) for size in part.inner_shape)
    return TensorPart("w", view, tuple(cuts), order, shape)


@given(part=parts(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=100, deadline=None)
def test_the_stream_is_what_slicing_gives(part: TensorPart, dtype: torch.dtype) -> None:
    stored_shape = (part.view[0] * part.view[1], part.view[2])  # as a checkpoint may hold stacked matrices
    parameter = torch.arange(1, 1 + torch.Size(part.view).numel(), dtype=torch.float32).to(dtype).reshape(stored_shape)
    expected = torch.zeros(part.shape, dtype=dtype)
    inner = parameter.reshape(part.view)[tuple(slice(*cut) for cut in part.cuts)].permute(part.order)
    expected[tuple(slice(size) for size in inner.shape)] = inner
    stored = read(PartTensor("stored", InMemoryTensor("w", parameter), part))
    torch.testing.assert_close(stored, expected, rtol=0, atol=0)
    torch.testing.assert_close(part.inner(stored), part.of(parameter), rtol=0, atol=0)
    assert TensorPart.parse(asdict(part)) == part


def test_slices_larger_than_a_chunk() -> None:
    rows = CHUNK_BYTES // 4 // 512 + 3
    parameter = torch.randn(2, rows, 512)
    part = TensorPart("w", (2, rows, 512), ((0, 2, 1), (0, rows, 2), (0, 512, 1)), (0, 2, 1), (2, 512, (rows + 1) // 2))
    stored = read(PartTensor("stored", InMemoryTensor("w", parameter), part))
    torch.testing.assert_close(stored, parameter[:, ::2].transpose(1, 2), rtol=0, atol=0)


def test_a_part_is_a_view_that_can_be_written_through() -> None:
    parameter = torch.zeros(2, 4, 3)
    part = TensorPart("w", (2, 4, 3), ((0, 2, 1), (1, 4, 2), (0, 3, 1)), (0, 2, 1), (2, 3, 32))
    part.of(parameter).copy_(torch.ones(2, 3, 2))
    assert parameter[:, 1::2].eq(1).all() and parameter[:, ::2].eq(0).all()


def test_all_of_a_parameter_is_its_own_source() -> None:
    source = InMemoryTensor("w", torch.randn(3, 4))
    assert part_source("label", TensorPart.whole("w", (3, 4)), source) is source


def test_a_source_of_another_size_is_refused() -> None:
    part = TensorPart("experts.w", (2, 4, 3), ((0, 2, 1), (0, 4, 1), (0, 3, 1)), (0, 1, 2), (2, 4, 3))
    with pytest.raises(WeightError, match=r"experts\.w: expected shape \[2, 4, 3\]"):
        PartTensor("stored", InMemoryTensor("w", torch.randn(2, 4, 4)), part)
