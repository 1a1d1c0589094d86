"""Statistics kept between exports: used instead of a calibration, and refused or warned of where they do not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import ArchiveError, OptionError, WeightError
from generic_export.nnef.dat import read_block_dat
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.values import read_tensor
from quant.imatrix import Imatrix, ImatrixQuantizer, load_imatrix, save_imatrix
from quant.packing import unpack_q4_0
from quant.protocol import InputStatistics
from t2n_llm.compress.calibrate import collect_statistics
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.statistics import model_key, read_statistics, tokenizer_key, write_statistics
from t2n_llm.compress.text import calibration_ids
from t2n_llm.export.pipeline import ExportResult, export_llm
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import open_source
from tests.quant.test_imatrix import write_dat, write_gguf
from tests.trained_model import REAL_MODEL

LABEL = "model.layers.1.mlp.down_proj.weight"
SAVED = "stats.imatrix.safetensors"


class Warnings(Reporter):
    """Remembers what was warned of, and the stages."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stages: list[str] = []

    def stage(self, title: str) -> None:
        self.stages.append(title)

    def progress(self, progress: Any) -> None:
        del progress

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text to calibrate on."""
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text((REAL_MODEL / "calib.txt").read_text()[:12_000])
    return file


@pytest.fixture(scope="module")
def calibrated(text: Path, short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportResult, Path]:
    """An export that was calibrated, and the statistics it left."""
    folder = tmp_path_factory.mktemp("calibrated")
    saved = folder / SAVED
    result = export_llm(
        str(short_model),
        folder / "export",
        compress="q4_0:imatrix",
        calibration=str(text),
        save_imatrix=saved,
        check=False,
        archive="dir",
    )
    return result, saved


def exported(source: Path, target: Path, reporter: Reporter, **options: Any) -> ExportResult:
    defaults: dict[str, Any] = {"compress": "q4_0:imatrix", "check": False, "archive": "dir", "reporter": reporter}
    return export_llm(str(source), target, **(defaults | options))


def test_saved_statistics_give_the_same_blocks_without_a_calibration(
    calibrated: tuple[ExportResult, Path], short_model: Path, tmp_path: Path
) -> None:
    first, saved = calibrated
    seen = Warnings()
    again = exported(short_model, tmp_path / "again", seen, imatrix=saved)
    assert not seen.warnings and not any("Calibrating" in stage for stage in seen.stages)
    blocks = list(first.archive.rglob("*_proj.weight.dat"))
    assert len(blocks) == 2 * 7
    for file in blocks:
        assert file.read_bytes() == (again.archive / file.relative_to(first.archive)).read_bytes()
    records = {record["label"]: record for record in again.manifest["compression"]["tensors"]}
    assert records[LABEL]["algorithm"] == "imatrix" and not records[LABEL]["replaced"]
    assert 0 < records[LABEL]["relative_error"] < 0.02
    recorded = again.manifest["options"]["compression"]["imatrix"]
    assert recorded["name"] == SAVED and len(recorded["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(again.manifest["options"])


def test_the_blocks_are_those_of_the_weighted_search(calibrated: tuple[ExportResult, Path], short_model: Path) -> None:
    result, saved = calibrated
    weight = read_tensor(open_checkpoint(short_model).tensors[LABEL]).float()
    expected = ImatrixQuantizer().quantize(weight, load_imatrix(saved).statistics[LABEL])
    found = unpack_q4_0(read_block_dat(result.archive / f"{LABEL}.dat").data)
    assert torch.equal(found.dequantize().reshape(weight.shape), expected.dequantize())


@pytest.mark.parametrize("form", ["dat", "gguf"])
def test_files_of_llama_cpp(
    calibrated: tuple[ExportResult, Path], short_model: Path, tmp_path: Path, form: str
) -> None:
    result, saved = calibrated
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    entries = {}
    for name, entry in load_imatrix(saved).statistics.items():
        _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
        entries[f"blk.{layer}.{names[kind]}.weight"] = entry.mean_square
    file = tmp_path / f"imatrix.{form}"
    if form == "dat":
        write_dat(file, entries)
    else:
        write_gguf(file, entries, {key: [4.0] for key in entries})
    seen = Warnings()
    again = exported(short_model, tmp_path / "again", seen, imatrix=file)
    assert not seen.warnings
    weight = read_tensor(open_checkpoint(short_model).tensors[LABEL]).float()
    power = load_imatrix(saved).statistics[LABEL].mean_square
    ours, theirs = (
        unpack_q4_0(read_block_dat(each.archive / f"{LABEL}.dat").data).dequantize().reshape(weight.shape)
        for each in (again, result)
    )
    errors = [float(((values - weight).square() * power).sum()) for values in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)  # rounding of the file's sums moves a few levels


def test_statistics_of_other_weights_or_another_tokenizer_are_warned_of(
    calibrated: tuple[ExportResult, Path], short_model: Path, tmp_path: Path
) -> None:
    _, saved = calibrated
    model = Path(shutil.copytree(short_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    save_file({name: values * 1.01 for name, values in tensors.items()}, model / "model.safetensors")
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    seen = Warnings()
    exported(model, tmp_path / "again", seen, imatrix=saved)
    assert [word for word in ("other weights", "another tokenizer") if any(word in w for w in seen.warnings)] == [
        "other weights",
        "another tokenizer",
    ]


def test_tensors_without_statistics_get_the_search_and_are_told(
    calibrated: tuple[ExportResult, Path], short_model: Path, tmp_path: Path
) -> None:
    _, saved = calibrated
    some = load_imatrix(saved)
    without = {name: entry for name, entry in some.statistics.items() if name != LABEL}
    save_imatrix(Imatrix(without, some.model, some.tokenizer), tmp_path / SAVED)
    seen = Warnings()
    result = exported(short_model, tmp_path / "again", seen, imatrix=tmp_path / SAVED)
    assert len(seen.warnings) == 1 and LABEL in seen.warnings[0] and "1 tensors" in seen.warnings[0]
    records = {record["label"]: record["algorithm"] for record in result.manifest["compression"]["tensors"]}
    assert records[LABEL] == "search"


def test_statistics_of_another_model_are_refused(tiny_llama: Path, calibrated: tuple[ExportResult, Path]) -> None:
    _, saved = calibrated
    source = open_source(str(tiny_llama), require_tokenizer=False)
    with pytest.raises(OptionError, match="no entry matches"):
        read_statistics(saved, source, {LABEL: (64, 96)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "q4_0", "imatrix": Path("x.imatrix.safetensors")}, "no tensor uses it"),
        ({"name": "q4_0:gptq", "imatrix": Path("x.imatrix.safetensors")}, "no tensor uses it"),
        ({"name": "q4_0", "save_imatrix": Path("x.imatrix.safetensors")}, "requires a calibrated recipe"),
        ({"name": "q4_0:imatrix", "save_imatrix": Path("x.dat")}, "must end in"),
        ({"name": "q4_0:imatrix", "save_imatrix": Path("absent/x.imatrix.safetensors")}, "no such folder"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompressionOptions(**options)


def test_only_what_no_file_gives_is_calibrated() -> None:
    assert CompressionOptions("q4_0:imatrix").calibrates()
    assert not CompressionOptions("q4_0:imatrix", imatrix=REAL_MODEL / "config.json").calibrates()


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    source = open_source(str(REAL_MODEL))
    with pytest.raises(WeightError, match="cannot be read"):
        read_statistics(tmp_path / SAVED, source, {})
    folder = tmp_path / f"folder{SAVED}"
    folder.mkdir()
    with pytest.raises(ArchiveError, match="cannot be written"):
        write_statistics(folder, source, {LABEL: InputStatistics(torch.ones(704), 3)})
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_keys_follow_weights_and_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    copy = open_source(str(shutil.copytree(REAL_MODEL, tmp_path / "copy")))
    source = open_source(str(REAL_MODEL))
    assert model_key(copy) == model_key(source) and tokenizer_key(copy) == tokenizer_key(source)


def test_saved_statistics_are_those_of_the_original_model(
    calibrated: tuple[ExportResult, Path], short_model: Path, text: Path
) -> None:
    _, saved = calibrated
    found = collect_statistics(short_model, calibration_ids(str(text), open_source(str(short_model))))
    stored = load_imatrix(saved).statistics
    assert set(stored) < set(found) and "lm_head.weight" in found
    for name, entry in stored.items():  # the original model's, behind quantised layers too
        torch.testing.assert_close(found[name].mean_square, entry.mean_square)
