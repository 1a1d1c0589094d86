"""Which chunks of a prompt fit into a bound of memory, and what a manifest says of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from generic_export.errors import ArchiveError
from generic_export.nnef.graph import NnefGraph, NnefOperation
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.prefill import bounded_chunks, chunks_of, prefill_chunks, recorded_chunks, split_prompt

sizes = st.integers(0, 1 << 24)


@given(score=sizes, token=sizes, positions=st.none() | st.integers(1, 1 << 22), memory=st.integers(1, 1 << 34))
def test_every_chunk_fits_where_the_table_says_and_twice_as_many_tokens_do_not(score, token, positions, memory):
    chunks = bounded_chunks(score, token, positions, memory)

    def taken(chunk, past):
        return chunk * (token + score * (past + chunk))

    assert chunks[0][0] == 0
    assert chunks == sorted(chunks)
    for (past, chunk), (end, _) in zip(chunks, [*chunks[1:], (None, None)], strict=True):
        assert chunk == 512 or taken(2 * chunk, past) > memory
        if chunk > 16:
            last = positions if end is None else end - 1
            assert last is None or last < past or taken(chunk, last) <= memory


@given(score=sizes, positions=st.integers(1, 1 << 16), length=st.integers(0, 3000))
def test_a_prompt_is_split_without_loss(score, positions, length):
    chunks = bounded_chunks(score, 0, positions, 1 << 28)
    pieces = list(split_prompt(range(length), chunks))
    assert [token for piece in pieces for token in piece] == list(range(length))
    assert all(0 < len(piece) <= 512 for piece in pieces)


def test_a_small_model_is_fed_512_tokens_whatever_the_past():
    assert bounded_chunks(0, 0, None) == [(0, 512)]
    assert bounded_chunks(12 * 9, 0, 4096) == [(0, 512)]


def test_a_long_past_makes_the_chunks_smaller():
    assert bounded_chunks(12 * 32, 0, 8192) == [(0, 512), (854, 256), (2475, 128), (5334, 64)]


def test_a_manifest_holds_the_table():
    chunks = bounded_chunks(12 * 32, 0, 8192)
    assert chunks_of({"graph": {"prefill": recorded_chunks(chunks)}}) == chunks
    assert chunks_of({"graph": {}}) == [(0, 512)]


@pytest.mark.parametrize(
    "table",
    [[], [{}], [{"past": 1, "chunk": 5}], [{"past": 0, "chunk": 0}], [{"past": 0, "chunk": "5"}]],
)
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ArchiveError, match=r"graph\.prefill of export\.json"):
        chunks_of({"graph": {"prefill": table}})


@pytest.mark.parametrize(
    ("operator", "chunk"), [("tract_transformers_scaled_masked_softmax", 128), ("tract_transformers_sdpa", 512)]
)
def test_chunks_are_as_fast_as_attention_is_written(operator: str, chunk: int) -> None:
    graph = NnefGraph(name="g", inputs=(), outputs=("y",), operations=(NnefOperation(operator, (), (), ("y",)),))
    assert prefill_chunks(LlamaConfig(), graph, GraphOptions())[0] == (0, chunk)
