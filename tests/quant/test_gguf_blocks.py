"""Kernels that decode GGUF blocks: the very bits of the gguf package, whatever bytes the blocks are."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.prequantized.gguf_blocks import LAYOUTS, decode_blocks

# Of scales and minima: zeros, the smallest and largest of float16, inf and nan among them.
EXTREME = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], np.uint16)


def random_rows(kind: str, seed: int, rows: int, blocks: int) -> np.ndarray:
    size = LAYOUTS[kind].size
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), np.uint8)


def same_bits(kind: str, rows: np.ndarray) -> None:
    ours = decode_blocks(kind, rows)
    with np.errstate(all="ignore"):
        theirs = np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[kind]), np.float32)
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    # What sign and payload a nan has is the processor's choice of operand.
    missing = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), missing)
    assert np.array_equal(ours.view(np.uint32)[~missing], theirs.view(np.uint32)[~missing])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sizes_are_those_of_ggml(kind: str) -> None:
    assert (LAYOUTS[kind].values, LAYOUTS[kind].size) == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 9), data=st.data())
def test_any_bytes_give_the_values_of_gguf(kind: str, seed: int, rows: int, blocks: int, data: st.DataObject) -> None:
    made = random_rows(kind, seed, rows, blocks)
    words = made.reshape(-1, LAYOUTS[kind].size)
    for place in (LAYOUTS[kind].scale, LAYOUTS[kind].minimum):
        if place is not None and data.draw(st.booleans()):
            chosen = np.random.default_rng(seed).choice(EXTREME, len(words))
            words[:, place : place + 2] = chosen.view(np.uint8).reshape(-1, 2)
    same_bits(kind, made)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantised_weights_come_back(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType[kind])
    same_bits(kind, packed)
    assert np.abs(decode_blocks(kind, packed) - values).mean() < 0.2


def test_read_only_rows_are_not_written_to() -> None:
    rows = random_rows("Q6_K", 1, 2, 3)
    rows.flags.writeable = False
    same_bits("Q6_K", rows)


def test_the_benchmark_prints_every_type(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.load_script import load_script

    script = load_script("bench_gguf")
    monkeypatch.setattr("sys.argv", ["bench_gguf.py", "--types", "Q4_K,Q8_0", "--values", "2", "--repeat", "1"])
    script.main()
    assert re.findall(r"^\| (Q\w+) \| \d+ \| \d+ \|$", capsys.readouterr().out, re.M) == ["Q4_K", "Q8_0"]


def test_what_decodes_nothing_does_not_import_the_compiler() -> None:
    """numba takes a second of processor, which every command that opens a model would pay."""
    code = "import sys, t2n_llm.export.pipeline; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
