"""`t2n-llm inspect`: what it says of exports and of other archives, in every mode, damaged ones included."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import ArchiveError
from generic_export.nnef.dat import BLOCK_BITS, TRACT_VENDOR, DatHeader
from t2n_llm.export.archive_lookup import distinct_names, locate_archive
from t2n_llm.inspect.inspection import inspect_archive
from tests.t2n_llm.command_line import call, refused, run, strict_json

QUANTISED = """version 1.0;
extension tract_registry tract_core;
extension tract_symbol S;
graph net(x) -> (y) {
  x = tract_core_external(shape=[S, 64], datum_type="f32");
  w = variable<scalar>(label="w", shape=[8, 64]);
  y = tract_core_einsum([x, w], expr="sk,nk->sn", acc="f32");
}
"""


def quantised_archive(folder: Path, graph: str = QUANTISED) -> Path:
    folder.mkdir()
    (folder / "graph.nnef").write_text(graph)
    blocks = np.zeros((8 * 2, 18), np.uint8)
    blocks[:, 1] = 0x3C  # scale 1.0
    header = DatHeader((8, 64), blocks.size, 0x3040, BLOCK_BITS, TRACT_VENDOR).pack()
    (folder / "w.dat").write_bytes(header + blocks.tobytes())
    return folder


def test_an_export_in_json(real_export: Path) -> None:
    outcome = call("inspect", real_export, "--json")
    assert outcome.code == 0
    record = strict_json(outcome.out)
    assert record["format"] == "tar"
    assert record["symbols"] == ["S", "P"]
    assert record["assertions"] == ["S >= 0", "P >= 0"]
    assert record["properties"]["architecture"] == "LlamaForCausalLM"
    assert record["inputs"][:2] == [
        {"name": "input_ids", "datum_type": "i64", "shape": ["1", "S"]},
        {"name": "in_cache_key_0", "datum_type": "f16", "shape": ["1", "4", "P", "32"]},
    ]
    assert record["outputs"][:2] == ["outputs", "out_cache_key_0"]
    manifest = json.loads((real_export / "export.json").read_text())
    widths = {"f16": 2, "f32": 4}  # vectors are f32
    stored = sum(tensor["bytes"] // widths[tensor["dtype"]] for tensor in record["tensors"])
    assert stored == pytest.approx(manifest["model"]["parameters"], rel=1e-3)
    assert record["bits_per_weight"] == pytest.approx(16.01, abs=0.01)
    assert record["cache"] == {
        "tensors": 12,
        "bytes_per_token": 12 * 4 * 32 * 2,
        "max_positions": 1024,
        "peak_bytes": 12 * 4 * 32 * 2 * 1024,
    }
    assert record["operators"]["softmax"] == 6
    engine = record["engine"]
    assert engine["operators"]["DynamicKeyValueCache"] == 12
    assert engine["stateful"] and [fact["name"] for fact in engine["inputs"]] == ["input_ids"]
    assert engine["peak_rss_bytes"] > record["stored_bytes"]
    assert (record["problems"], record["unknown"], engine["refusal"]) == ([], [], None)


def test_an_export_for_people(real_export: Path) -> None:
    outcome = run("inspect", real_export, "--tensors", 3)
    assert outcome.code == 0, outcome.err
    for words in (
        "5,475,600 values with 16.01 bits",
        "model.embed_tokens.weight",
        "Softmax",
        "3.1 MB at the model's",
    ):
        assert words in outcome.out
    listed = [line for line in outcome.out.splitlines() if line.lstrip().startswith("model.layers.")]
    assert len(listed) == 2


def test_the_archive_in_an_export_knows_its_folder(real_export: Path) -> None:
    by_folder = inspect_archive(locate_archive(real_export))
    by_file = inspect_archive(locate_archive(real_export / "model.nnef.tar"))
    assert by_folder == by_file
    assert by_folder.cache is not None and by_folder.cache.max_positions == 1024


def test_a_quantised_tensor_is_counted_in_bits(tmp_path: Path) -> None:
    record = strict_json(call("inspect", quantised_archive(tmp_path / "q"), "--json").out)
    assert record["tensors"] == [{"label": "w", "shape": [8, 64], "dtype": "q4_0", "bytes": 288, "bits_per_value": 4.5}]
    assert record["bits_per_weight"] == 4.5
    assert record["cache"] is None
    assert record["engine"]["operators"]["OptMatMul"] == 1


def test_the_graph_is_printed_as_it_is_in_a_pipe_and_coloured_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = quantised_archive(tmp_path / "q")
    assert call("inspect", archive, "--graph").out == QUANTISED
    assert strict_json(call("inspect", archive, "--graph", "--json").out) == {"graph": QUANTISED}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = call("inspect", archive, "--graph").out
    assert "\x1b[" in coloured
    import re

    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == QUANTISED


def test_caches_of_an_archive_that_keeps_them_itself(half_export: Path, tmp_path: Path) -> None:
    """tract writes the graph again after the caches became state."""
    from tests.t2n_llm.command_line import run_python

    written = tmp_path / "stateful.nnef.tgz"
    run_python(
        "import sys, tract; n = tract.nnef().with_tract_transformers().with_tract_extra(); m = n.load(sys.argv[1]); "
        "m.transform('transformers_detect_all'); n.write_model_to_tar_gz(m, sys.argv[2])",
        half_export / "model.nnef.tar",
        written,
    )
    record = strict_json(call("inspect", written, "--json").out)
    assert record["format"] == "tgz"
    assert record["cache"]["bytes_per_token"] == 12 * 4 * 32 * 2
    assert record["engine"]["stateful"] is False
    assert record["engine"]["operators"]["InPlaceKvSdpa"] == 6
    assert record["unknown"] == []


# --- what is wrong with an archive ------------------------------------------------------------


def test_missing_unread_and_misshapen_tensors_are_problems(tmp_path: Path) -> None:
    archive = quantised_archive(
        tmp_path / "q", QUANTISED.replace('label="w", shape=[8, 64]', 'label="v", shape=[8, 64]')
    )
    outcome = call("inspect", archive, "--json")
    record = strict_json(outcome.out)
    assert record["problems"] == [
        "v.dat is missing, but the graph reads it.",
        "w.dat is not read by the graph, but is loaded into memory.",
    ]
    assert outcome.code == 1
    assert "No data for tensor" in record["engine"]["refusal"]
    other = quantised_archive(tmp_path / "r", QUANTISED.replace("shape=[8, 64]", "shape=[64, 8]"))
    record = strict_json(call("inspect", other, "--no-engine", "--json").out)
    assert record["problems"] == ["w: stored with shape [8, 64], but the graph declares [64, 8]."]
    assert record["engine"] is None


def test_a_refusal_is_shown_to_people_and_is_exit_code_1(tmp_path: Path) -> None:
    archive = quantised_archive(tmp_path / "q", QUANTISED.replace("tract_core_einsum", "no_such_operator"))
    outcome = run("inspect", archive)
    assert outcome.code == 1
    assert "refuses the archive" in outcome.out and "no_such_operator" in outcome.out


def test_lines_that_are_not_understood_are_shown(tmp_path: Path) -> None:
    archive = quantised_archive(tmp_path / "q", QUANTISED.replace("  y =", "  mystery ( ;\n  y ="))
    record = strict_json(call("inspect", archive, "--no-engine", "--json").out)
    assert [part["line"] for part in record["unknown"]] == [7]


@pytest.mark.parametrize("cut", [0, 1, 700, 100_000, 4_000_000])
def test_an_export_cut_short_is_refused_with_advice(real_export: Path, tmp_path: Path, cut: int) -> None:
    damaged = shutil.copytree(real_export, tmp_path / "export")
    os.truncate(damaged / "model.nnef.tar", cut)
    outcome = call("inspect", damaged)
    refused(outcome, "model.nnef.tar")
    assert "damaged" in outcome.line("hint")


def test_paths_that_hold_no_archive_are_refused(real_export: Path, tmp_path: Path) -> None:
    refused(call("inspect", tmp_path / "nowhere"), "no such folder")
    refused(call("inspect", tmp_path), "neither export.json nor graph.nnef")
    refused(call("inspect", real_export / "config.json"), "cannot be read as an archive")
    lost = tmp_path / "lost"
    lost.mkdir()
    shutil.copy(real_export / "export.json", lost)
    refused(call("inspect", lost), "the archive model.nnef.tar is missing")


def test_a_device_that_is_not_here_is_told(tmp_path: Path) -> None:
    archive = quantised_archive(tmp_path / "q")
    outcome = call("inspect", archive, "--device", "metal")
    if outcome.code:  # no Mac
        refused(outcome, "cannot compute on metal here")
    refused(call("inspect", archive, "--device", "tpu"), "'tpu' is unknown")


# --- names ------------------------------------------------------------------------------------


def test_names_tell_archives_apart(real_export: Path, tmp_path: Path) -> None:
    archive = quantised_archive(tmp_path / "net")
    with tarfile.open(tmp_path / "net.nnef.tar", "w") as tar:
        tar.add(archive, ".")
    located = [locate_archive(path) for path in (archive, tmp_path / "net.nnef.tar", real_export)]
    assert [entry.name for entry in located] == ["net", "net", "tiny-llama-real"]
    assert distinct_names(located) == ["net (1)", "net (2)", "tiny-llama-real"]


def test_somebody_elses_export_json_is_no_obstacle(tmp_path: Path) -> None:
    archive = quantised_archive(tmp_path / "net")
    (tmp_path / "export.json").write_text("[]")
    assert locate_archive(archive).name == "net"
    with pytest.raises(ArchiveError):
        locate_archive(tmp_path)
