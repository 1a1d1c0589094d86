"""The export benchmark: checkpoints in the hub's layout, honest arithmetic, nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generic_export.weights.checkpoint import open_checkpoint
from t2n_llm.reporter import Reporter
from tests.load_script import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_export.py"


bench = load_script("bench_export")
llama = load_script("random_llama")
TINY = llama.SHAPES["tiny"]


def outcome(**changes: Any) -> Any:
    """Return an invented outcome of two repeats."""
    runs = tuple(
        bench.ChildRun(
            seconds,
            8.0,
            2.0,
            peak,
            (
                bench.TimedStage("Capturing the graph", seconds / 2, seconds / 4, peak),
                bench.TimedStage("Translating the graph", 1.0, 0.5, peak),
                bench.TimedStage("Writing model.nnef.tar", seconds / 10, seconds / 5, peak),
                bench.TimedStage("Flushing to the disk", 0.5, 0.25, peak),
            ),
        )
        for seconds, peak in ((10.0, 900.0), (20.0, 1100.0))
    )
    copies = (bench.Copy(1.0, 0.5), bench.Copy(3.0, 1.5))
    return bench.Outcome(
        **(
            {"size": "1B", "dtype": "f16", "archive": "tar", "compress": None, "checkpoint_bytes": 2_471_000_000}
            | {"baseline_mib": 400.0, "copies": copies, "exports": runs}
            | changes
        )
    )


@pytest.mark.parametrize(("size", "parameters"), [("1B", 1_235_814_400), ("3B", 3_212_749_824), ("8B", 8_030_261_248)])
def test_shapes_have_the_parameters_of_the_published_models(size: str, parameters: int) -> None:
    tensors = llama.tensors_of(llama.SHAPES[size])
    assert sum(int(np.prod(sizes)) for sizes in tensors.values()) == parameters


def test_the_clock_is_a_reporter() -> None:
    told = {name for name in vars(Reporter) if not name.startswith("_")}
    assert told <= set(dir(bench.StageClock(0.0)))


def test_8b_is_sharded_in_four_files_of_5_gb() -> None:
    tensors = llama.tensors_of(llama.SHAPES["8B"])
    shards = llama.shards_of(tensors, llama.SHARD_BYTES).filename_to_tensors.values()
    assert [name for names in shards for name in names] == list(tensors)
    assert len(shards) == 4
    assert all(sum(2 * int(np.prod(tensors[name])) for name in names) <= 5_000_000_000 for names in shards)


def test_transformers_loads_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    written = llama.write_checkpoint(tmp_path / "model", TINY)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    assert written == sum(file.stat().st_size for file in (tmp_path / "model").iterdir())


def test_shards_and_index_agree(tmp_path: Path) -> None:
    llama.write_checkpoint(tmp_path / "model", TINY, shard_bytes=70_000)
    checkpoint = open_checkpoint(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(checkpoint.files) > 2
    assert all(file.stat().st_size < 72_000 for file in checkpoint.files)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == llama.tensors_of(TINY)
    assert index["metadata"]["total_size"] == checkpoint.total_bytes


@pytest.mark.parametrize("nbytes", [2, 6, 8, 4096, (1 << 24) + 2])
def test_random_values_are_sane_and_come_in_chunks(nbytes: int) -> None:
    chunks = list(llama.random_bf16(nbytes, np.random.Generator(np.random.SFC64(0))))
    assert max(map(len, chunks)) <= 1 << 24
    values = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.bfloat16).float()
    assert values.numel() * 2 == nbytes
    assert ((values.abs() >= 2**-7) & (values.abs() < 2**-5)).all()
    if nbytes > 1_000_000:
        assert len(values.unique()) == 512  # two signs, two exponents, 128 mantissas


def test_medians_and_budgets() -> None:
    record = outcome().asdict()
    assert (record["cp_seconds"], record["sync_seconds"], record["export_seconds"]) == (2.0, 1.0, 15.0)
    assert (record["graph_seconds"], record["weights_seconds"], record["weights_ratio"]) == (8.5, 2.0, 1.0)
    assert record["graph_within_budget"] and record["weights_within_budget"]
    assert record["extra_mib"] == 600.0 and record["memory_within_budget"]
    late = outcome(copies=(bench.Copy(1.0, 0.0),), baseline_mib=-100.0).asdict()
    assert not late["weights_within_budget"] and not late["memory_within_budget"]


def test_the_table_says_whether_the_budgets_hold() -> None:
    text = bench.table(outcome())
    assert "2.0 s (3.2 s of processor), 1.00 x cp" in text
    assert "compressed over" not in text
    assert "weights <= 1.5 x cp      yes" in text
    assert "<= 15 s                  yes" in text
    assert "600 MiB (1000 - 400)" in text
    assert "Capturing the graph" in text
    compressed = bench.table(outcome(compress="q4_0", plain=outcome().exports[:1]))
    assert "1.5 s (2.2 s of processor)" in compressed
    assert "1.33 x (1.44 x of processor)" in compressed
    assert "<= 3 x                   yes" in compressed
    over = bench.table(outcome(baseline_mib=-100.0))
    assert "<= 0.8 GiB               no" in over


@pytest.mark.nightly
def test_tiny_end_to_end_leaves_nothing(tmp_path: Path) -> None:
    work = tmp_path / "made" / "when missing"
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--archive", "dir,tar", "--work", str(work), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    folder, record = map(json.loads, done.stdout.splitlines())
    assert (folder["archive"], record["archive"]) == ("dir", "tar")
    assert record["weights_seconds"] > 0 and record["graph_seconds"] > 0
    assert record["export_seconds"] > record["exports"][0]["user"] * 0.1 > 0
    assert 0 < record["extra_mib"] < 1024
    titles = [stage["title"] for stage in record["exports"][0]["stages"]]
    assert titles[2:5] == ["Capturing the graph", "Translating the graph", "Writing model.nnef.tar"]
    assert "Flushing to the disk" in titles
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.nightly
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: int) -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--work", str(tmp_path), "--repeat", "50"]
    # A background job (nohup, CI) may have been started with Ctrl-C ignored, and so would its children.
    heard = signal.signal(number, signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(number, heard)
    assert process.stderr is not None
    for line in process.stderr:
        if "export" in line:
            break
    time.sleep(0.5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.strip().endswith("error: interrupted; nothing was left behind.")
    assert not list(tmp_path.iterdir())


def test_a_work_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert bench.main(["--size", "tiny", "--work", str(tmp_path / "file" / "below")]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("archives", ["zip", "tar,", ""])
def test_unknown_forms_are_refused(archives: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--size", "tiny", "--archive", archives])
    assert "expected some of tar, dir, tgz" in capsys.readouterr().err


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9})())
    with pytest.raises(bench.BenchError, match="GB are needed"):
        bench.measure("1B", "f16", ["tar"], tmp_path, 1)
    assert not list(tmp_path.iterdir())
