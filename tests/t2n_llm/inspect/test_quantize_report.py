"""What compression costs, measured on exports in the engine."""

from __future__ import annotations

import builtins
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generic_export.errors import ArchiveError, OptionError, SourceError
from t2n_llm.cli.report_plot import plot_report, require_plotting
from t2n_llm.export.pipeline import export_llm
from t2n_llm.inspect.quantize_report import QuantizeReport, quantize_report
from tests.families import save_tiny_model
from tests.shared_folders import SharedExport, SharedFolders
from tests.t2n_llm.command_line import call
from tests.trained_model import REAL_MODEL

SHORT: dict[str, Any] = {"tokens": 120, "window": 41}


@pytest.fixture(scope="module")
def exports(short_model: Path, shared_export: SharedExport, shared_folders: SharedFolders) -> dict[str, Path]:
    """Two trained layers: plain with all logits, compressed with the last logits, and with channels scaled."""
    text = str(shared_folders("short-text", _short_text) / "calib.txt")
    choices: dict[str, dict[str, Any]] = {
        "f16": {"num_logits_to_keep": 0},
        "q4": {"compress": "q4_0+embeddings:min_max", "archive": "dir"},
        "q4-all": {"compress": "q4_0+embeddings:min_max", "num_logits_to_keep": 0},
        "imatrix": {"compress": "q4_0:imatrix", "num_logits_to_keep": 0, "calibration": text},
        "awq": {"compress": "q4_0:awq", "num_logits_to_keep": 0, "calibration": text},
    }
    return {name: shared_export(short_model, check=False, **options) for name, options in choices.items()}


def _short_text(folder: Path) -> None:
    folder.mkdir()
    (folder / "calib.txt").write_text((REAL_MODEL / "calib.txt").read_text()[:6000])


@pytest.fixture(scope="module")
def reports(exports: dict[str, Path], short_model: Path) -> dict[str, QuantizeReport]:
    return {name: quantize_report(folder, str(short_model), **SHORT) for name, folder in exports.items()}


def test_compression_shows_and_f16_does_not(reports: dict[str, QuantizeReport]) -> None:
    plain, q4 = reports["f16"], reports["q4"]
    assert plain.quality.positions == q4.quality.positions == 120
    assert plain.quality.mean_kl_divergence < 1e-4 < q4.quality.mean_kl_divergence < 0.1
    assert plain.quality.same_top1_share > 0.98
    assert q4.quality.mean_kl_divergence < q4.quality.p99_kl_divergence <= q4.quality.max_kl_divergence
    assert q4.quality.perplexity == pytest.approx(q4.quality.reference_perplexity, rel=0.1)
    assert plain.bits_per_weight == 16 and 4.5 <= q4.bits_per_weight < 4.6


def test_one_run_or_many_give_the_same(reports: dict[str, QuantizeReport]) -> None:
    many, one = reports["q4"], reports["q4-all"]
    assert one.quality.mean_kl_divergence == pytest.approx(many.quality.mean_kl_divergence, rel=0.02)
    assert one.quality.perplexity == pytest.approx(many.quality.perplexity, rel=0.002)
    assert "one run" in one.reading and "40 runs" in many.reading and "--num-logits-to-keep 0" in many.reading


def test_errors_of_tensors_are_those_that_streaming_measured(
    reports: dict[str, QuantizeReport], exports: dict[str, Path]
) -> None:
    report = reports["q4"]
    manifest = json.loads((exports["q4"] / "export.json").read_text())
    recorded = {record["label"]: record["relative_error"] for record in manifest["compression"]["tensors"]}
    quantized = [tensor for tensor in report.tensors if tensor.quantized]
    assert len(quantized) == 2 * 7 + 1
    for tensor in quantized:
        assert tensor.relative_error == pytest.approx(recorded[tensor.label], rel=1e-3)
        assert tensor.snr_db == pytest.approx(-10 * math.log10(recorded[tensor.label]), abs=0.01)
        assert (tensor.scheme, tensor.algorithm, tensor.bits) == ("q4_0", "min_max", 4.5)
    assert {tensor.layer for tensor in quantized} == {0, 1, None}
    assert {tensor.kind for tensor in quantized if tensor.layer == 1} >= {"mlp.down_proj", "self_attn.v_proj"}


def test_scaled_weights_are_not_compared_one_by_one(reports: dict[str, QuantizeReport]) -> None:
    weighed, scaled = ([tensor for tensor in reports[name].tensors if tensor.quantized] for name in ("imatrix", "awq"))
    assert all(0 < (tensor.relative_error or 0) < 0.02 for tensor in weighed)
    assert all(tensor.relative_error is None and tensor.snr_db is None for tensor in scaled)
    assert all(0 < (tensor.output_error or 0) < 0.05 for tensor in [*weighed, *scaled])


def test_another_export_as_the_reference(exports: dict[str, Path], reports: dict[str, QuantizeReport]) -> None:
    report = quantize_report(exports["q4-all"], str(exports["f16"]), **SHORT)
    assert report.reference.startswith(f"{exports['f16'].name} (f16, ")
    assert report.quality.mean_kl_divergence == pytest.approx(reports["q4-all"].quality.mean_kl_divergence, rel=0.02)
    theirs = {tensor.label: tensor.relative_error for tensor in reports["q4-all"].tensors}
    for tensor in report.tensors:
        assert tensor.relative_error == pytest.approx(theirs[tensor.label], rel=1e-2)
    same = quantize_report(exports["q4"], str(exports["q4"]), **SHORT)
    assert same.quality.mean_kl_divergence == 0.0 and same.quality.same_top1_share == 1.0
    assert all(tensor.relative_error == 0.0 and tensor.snr_db == math.inf for tensor in same.tensors)


def test_a_reference_that_is_another_model(exports: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="vocabulary"):
        quantize_report(exports["q4"], str(save_tiny_model("llama", tmp_path / "llama")), **SHORT)
    gpt2 = save_tiny_model("gpt2", tmp_path / "gpt2")
    export_llm(str(gpt2), tmp_path / "other", check=False, require_tokenizer=False)
    with pytest.raises(OptionError, match="model of type"):
        quantize_report(exports["q4"], str(tmp_path / "other"), **SHORT)


def test_folders_and_texts_that_are_not_there(exports: dict[str, Path], short_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"no export\.json"):
        quantize_report(tmp_path)
    with pytest.raises(SourceError, match="local folder"):
        quantize_report(exports["q4"])
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(OptionError, match="a window takes 41"):
        quantize_report(exports["q4"], str(short_model), text=short, **SHORT)


# --- the command -----------------------------------------------------------------------------------


def arguments(folder: Path, reference: Path, *more: object) -> list[object]:
    common = ["--reference", reference, "--tokens", 60, "--window", 31, "--text", REAL_MODEL / "eval.txt"]
    return ["quantize-report", folder, *common, *more]


def test_the_limit_decides_the_exit_code(exports: dict[str, Path], short_model: Path) -> None:
    good = call(*arguments(exports["q4-all"], short_model, "--max-kl", 1, "--json"))
    assert good.code == 0, good.err
    record = json.loads(good.out)
    assert record["quality"]["positions"] == 60 and record["text"] == "eval.txt"
    assert {"snr_db", "relative_error", "bits"} <= record["tensors"][0].keys()
    bad = call(*arguments(exports["q4-all"], short_model, "--max-kl", 1e-9, "--quiet"))
    assert bad.code == 1 and "above 1e-09" in bad.err and not bad.out


def test_tables_for_people_and_a_picture(exports: dict[str, Path], short_model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "error.png"
    outcome = call(*arguments(exports["q4-all"], short_model, "--plot", picture))
    assert outcome.code == 0, outcome.err
    for word in ("KL divergence", "perplexity", "mlp.down_proj", "largest errors", "dB"):
        assert word in outcome.out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_an_export_without_compression_has_a_picture_too(reports: dict[str, QuantizeReport], tmp_path: Path) -> None:
    plot_report(reports["f16"], tmp_path / "plain.png")
    assert (tmp_path / "plain.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArchiveError, match="cannot be written"):
        plot_report(reports["f16"], tmp_path / "absent" / "plain.png")


@pytest.mark.parametrize("name", ["f16", "q4", "awq"])
def test_a_page_needs_no_matplotlib(
    reports: dict[str, QuantizeReport], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "report.html"
    require_plotting(page)
    plot_report(replace(reports[name], folder="<b>bold</b>"), page)
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;bold&lt;/b&gt;" in text and "<b>bold</b>" not in text
    for told in ("mean KL divergence", "layers.1.mlp.down_proj", "by decoder layer" if name != "f16" else "16.00"):
        assert told in text
    assert text.count('<tr class="row') == len(reports[name].tensors)
    with pytest.raises(ArchiveError, match="cannot be written"):
        plot_report(reports[name], tmp_path / "absent" / "report.html")


def test_pictures_that_cannot_be_drawn_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no kind of picture"):
        require_plotting(tmp_path / "error.docx")
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptionError, match="matplotlib") as raised:
        require_plotting(tmp_path / "error.png")
    assert "t2n-llm[plot]" in raised.value.hint
