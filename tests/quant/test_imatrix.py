"""Input statistics: accumulated, kept in files, and read from both forms that llama.cpp writes."""

import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import WeightError
from quant.imatrix import (
    Imatrix,
    ImatrixQuantizer,
    StatisticsAccumulator,
    load_imatrix,
    matching_statistics,
    save_imatrix,
)
from quant.protocol import InputStatistics
from quant.weighted_search import weighted_scale_search

CALLS = 5


def channels(count: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.1


def write_dat(path: Path, entries: dict[str, torch.Tensor]) -> Path:
    data = struct.pack("<i", len(entries))
    for name, mean_square in entries.items():
        values = (mean_square * CALLS).numpy().astype("<f4").tobytes()
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", CALLS, mean_square.numel()) + values
    # What follows the entries (last chunk, data set name) is of no use here.
    path.write_bytes(data + struct.pack("<ii", 7, 4) + b"text")
    return path


def write_gguf(path: Path, entries: dict[str, torch.Tensor], counts: dict[str, list[float]]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, mean_square in entries.items():
        count = np.array(counts[name], dtype=np.float32).reshape(-1, 1)
        sums = mean_square.reshape(len(count), -1).numpy() * count
        writer.add_tensor(f"{name}.in_sum2", np.ascontiguousarray(sums, dtype=np.float32))
        writer.add_tensor(f"{name}.counts", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_batches_add_up_to_the_mean_over_all_rows():
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    accumulator = StatisticsAccumulator(8, with_hessian=True)
    for piece in (rows[:3], rows[3:20].reshape(1, 17, 8), rows[20:].bfloat16().float()):
        accumulator.add(piece)
    statistics = accumulator.statistics()
    rows[20:] = rows[20:].bfloat16().float()
    assert statistics.tokens == 50
    torch.testing.assert_close(statistics.mean_square, rows.square().mean(0))
    torch.testing.assert_close(statistics.hessian, rows.T @ rows / 50)


def test_without_input_everything_is_zero():
    statistics = StatisticsAccumulator(4).statistics()
    assert statistics.tokens == 0 and statistics.hessian is None and not statistics.mean_square.any()


def test_save_and_load(tmp_path):
    path = tmp_path / "model.imatrix.safetensors"
    entries = {
        "a.weight": InputStatistics(channels(), 12),
        "b.weight": InputStatistics(torch.rand(3, 1, 32), 99),
    }
    save_imatrix(Imatrix(entries, "revision", "hash"), path)
    loaded = load_imatrix(path)
    assert (loaded.model, loaded.tokenizer) == ("revision", "hash")
    assert {name: entry.tokens for name, entry in loaded.statistics.items()} == {"a.weight": 12, "b.weight": 99}
    assert torch.equal(loaded.statistics["b.weight"].mean_square, entries["b.weight"].mean_square)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("readers", "mode"), [(0o044, 0o644), (0o040, 0o640), (0, 0o600)])
def test_statistics_are_read_by_those_who_may_read_the_model(tmp_path, readers, mode):
    path = tmp_path / "a.imatrix.safetensors"
    before = os.umask(0o022)
    try:
        save_imatrix(Imatrix({"w": InputStatistics(torch.ones(32), 4)}, "m", "t"), path, readers)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["dat", "gguf"])
def test_llama_cpp_names_become_hugging_face_names(tmp_path, form):
    entries = {"blk.0.attn_q.weight": channels(seed=1), "blk.1.ffn_down.weight": channels(96, seed=2)}
    if form == "dat":
        path = write_dat(tmp_path / "imatrix.dat", entries)
    else:
        path = write_gguf(tmp_path / "imatrix.gguf", entries, {name: [7.0] for name in entries})
    found = load_imatrix(path, "llama", 2).statistics
    torch.testing.assert_close(
        found["model.layers.0.self_attn.q_proj.weight"].mean_square, entries["blk.0.attn_q.weight"]
    )
    torch.testing.assert_close(
        found["model.layers.1.mlp.down_proj.weight"].mean_square, entries["blk.1.ffn_down.weight"]
    )


def test_experts_keep_their_own_counts(tmp_path):
    means = torch.stack([channels(seed=3), channels(seed=4), channels(seed=5)])
    entries = {"blk.0.ffn_down_exps.weight": means}
    path = write_gguf(tmp_path / "i.gguf", entries, {"blk.0.ffn_down_exps.weight": [5.0, 1.0, 30.0]})
    found = load_imatrix(path, "llama", 1).statistics
    entry = next(entry for name, entry in found.items() if "expert" in name)
    assert entry.tokens == 36
    torch.testing.assert_close(entry.mean_square, means.unsqueeze(1))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_give_an_error_that_names_the_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"imatrix\.dat"):
        load_imatrix(path, "llama", 1)


@pytest.mark.parametrize("form", ["dat", "gguf", "safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_truncated_file_is_refused(tmp_path, form, share):
    entries = {"blk.0.attn_q.weight": channels(512)}
    path = tmp_path / f"x.{form}"
    if form == "dat":
        write_dat(path, entries)
    elif form == "gguf":
        write_gguf(path, entries, {"blk.0.attn_q.weight": [3.0]})
    else:
        save_imatrix(Imatrix({"a.weight": InputStatistics(channels(512), 3)}), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(WeightError, match=rf"x\.{form}"):
        load_imatrix(path, "llama", 1)


def test_what_is_missing_or_unknown_is_said(tmp_path):
    path = write_dat(tmp_path / "imatrix.dat", {"blk.0.attn_q.weight": channels()})
    with pytest.raises(WeightError, match=r"llama\.cpp's names"):
        load_imatrix(path)
    with pytest.raises(WeightError, match="no architecture 'nonsense'"):
        load_imatrix(path, "nonsense", 1)
    with pytest.raises(WeightError, match="cannot be read"):
        load_imatrix(tmp_path / "absent.dat", "llama", 1)


def test_only_statistics_that_fit_a_parameter_are_used():
    imatrix = Imatrix(
        {
            "a.weight": InputStatistics(channels(), 5),
            "zero.weight": InputStatistics(torch.zeros(64), 5),
            "nan.weight": InputStatistics(torch.full((64,), torch.nan), 5),
        }
    )
    assert matching_statistics(imatrix, "a.weight", (10, 64)) is imatrix.statistics["a.weight"]
    assert matching_statistics(imatrix, "a.weight", (10, 32)) is None
    for name in ("zero.weight", "nan.weight", "absent.weight"):
        assert matching_statistics(imatrix, name, (10, 64)) is None


def test_the_quantizer_weighs_by_mean_square_and_by_magnitude_without_statistics():
    weight, mean_square = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), channels() ** 4
    statistics = InputStatistics(mean_square, 100)
    assert torch.equal(ImatrixQuantizer().quantize(weight, statistics).q, weighted_scale_search(weight, mean_square).q)
    assert torch.equal(ImatrixQuantizer().quantize(weight).q, weighted_scale_search(weight, weight.abs()).q)
