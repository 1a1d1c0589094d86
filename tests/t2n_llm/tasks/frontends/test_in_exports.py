"""An export with a front end: one archive more, verified, validated, described and left out as the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForMultimodalLM, WhisperFeatureExtractor

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.export.against_source import compare_with_source
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.pipeline import ExportResult, export_llm, plan_llm_export
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.export.verify import verify_export
from t2n_llm.graph.interface import recorded_states
from t2n_llm.tasks.frontends.waveforms import chirp
from t2n_llm.tasks.multimodal.check import Prompt, answers_of
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.running import open_pipeline
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from tests.families import COMMON, leave_neutral_start
from tests.t2n_llm.command_line import call, strict_json
from tests.t2n_llm.tasks.multimodal.test_multimodal import CONFIGS

_CONFIG: dict[str, Any] = {
    "audio_config": {
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "initializer_range": 0.12,
    },
    "text_config": {"model_type": "qwen2", **COMMON, "num_hidden_layers": 1},
    "audio_token_id": 150,
}
_READ_WEIGHTS = ("embed", "audio", "decoder")
_EXTRACTOR = {"feature_size": 8, "chunk_length": 1, "hop_length": 666, "n_fft": 200}  # 24 frames


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-Audio with its extractor."""
    folder = tmp_path_factory.mktemp("listener") / "source"
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model("qwen2_audio", **_CONFIG), dtype=torch.float32)
    leave_neutral_start(model)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(**_EXTRACTOR).save_pretrained(folder)
    return folder


def _exported(source: Path, target: Path, **options: Any) -> ExportResult:
    chosen = {"task": AUDIO_TEXT_TO_TEXT, "require_tokenizer": False, "dtype": "f32"} | options
    return export_llm(str(source), target, options=ExportOptions.of(**chosen))


@pytest.fixture(scope="module")
def export(listener: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export, checked."""
    result = _exported(listener, tmp_path_factory.mktemp("out") / "export")
    assert result.validation is not None and result.validation.passed
    names = [check.name for check in result.validation.checks]
    assert [name.startswith("log-mel of ") for name in names] == [True] * 3 + [False] * 3
    return result.output_dir


def test_a_waveform_is_answered_as_transformers_answers_it(export: Path, listener: Path) -> None:
    recording = chirp(np.random.default_rng(3), 9_001, 16_000)
    extractor = WhisperFeatureExtractor.from_pretrained(listener)
    given = extractor(recording, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    model = AutoModelForMultimodalLM.from_pretrained(listener, dtype=torch.float32)
    family, manifest = family_of(model.config), read_manifest(export)
    with open_archive_session(export / "frontend.nnef.tar") as front:
        features, mask = front.answer([recording[None], np.array([9_001])])
    ids = (5, *[150] * family.rows_of(int(mask.sum())), 7, 8)
    inputs = {"input_features": given["input_features"], "feature_attention_mask": given["attention_mask"]}
    with torch.no_grad():
        said = model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1]
        deaf = model(input_ids=torch.tensor([ids]), **inputs | {"input_features": torch.zeros(1, 8, 24)}).logits[0, -1]
    archives = {role: export / f"{role}.nnef.tar" for role in _READ_WEIGHTS}
    with open_pipeline(archives, family, recorded_states(manifest)) as pipeline:
        (answer,) = answers_of(pipeline, Prompt("", ids, features, frames=(int(mask.sum()),)), ())
    np.testing.assert_allclose(answer, said.numpy(), atol=1e-4)
    assert (said - deaf).abs().max() > 1e-2


def test_the_manifest_describes_it_and_counts_no_parameter_of_it(export: Path, listener: Path, tmp_path: Path) -> None:
    manifest = read_manifest(export)
    assert manifest["multimodal"]["order"] == list(manifest["archives"]) == ["frontend", "embed", "audio", "decoder"]
    front = manifest["frontend"]
    assert (front["kind"], front["sampling_rate"], front["features"]) == ("log-mel", 16_000, [8, 24])
    assert manifest["archives"]["frontend"]["graph"]["inputs"] == list(front["inputs"]) == ["waveform", "lengths"]
    assert manifest["archives"]["frontend"]["graph"]["outputs"] == front["outputs"]
    assert manifest["archives"]["frontend"]["graph"]["dtype"] == "f32"
    assert set(manifest["archives"]["frontend"]["tensors"]) >= {"window", "mel_filters"}
    without = _exported(listener, tmp_path / "out", frontend=False, check=False)
    assert not (without.output_dir / "frontend.nnef.tar").exists() and "frontend" not in without.manifest
    assert without.manifest["multimodal"]["order"] == ["embed", "audio", "decoder"]
    assert without.manifest["model"] == manifest["model"]


def test_it_is_verified_and_validated_as_the_others(export: Path, listener: Path) -> None:
    assert verify_export(export).passed
    compared = compare_with_source(export, str(listener))
    assert not compared.findings and compared.same_graph
    report = validate_folder(export, str(listener))
    assert report.passed and len(report.checks) == 6


def test_damage_to_it_is_found(listener: Path, tmp_path: Path) -> None:
    folder = _exported(listener, tmp_path / "out", check=False).output_dir
    archive = folder / "frontend.nnef.tar"
    content = bytearray(archive.read_bytes())
    content[content.index(b"mel_filters.dat") + 600] ^= 1
    archive.write_bytes(content)
    assert [finding.name for finding in verify_export(folder).findings] == ["mel_filters"]


@pytest.mark.parametrize(
    "options",
    [{"dtype": "f16", "activations": "f16"}, pytest.param({"dtype": "f16"}, marks=pytest.mark.nightly)],
)
def test_f16_leaves_it_in_f32(options: dict[str, str], listener: Path, tmp_path: Path) -> None:
    result = _exported(listener, tmp_path / "out", **options)
    assert result.validation is not None and result.validation.passed
    record = strict_json(call("inspect", result.archives["frontend"], "--json").out)
    assert {share["dtype"] for share in record["dtypes"]} == {"f32"}


def test_the_command_line_leaves_it_out(listener: Path, tmp_path: Path) -> None:
    words = (
        "export",
        listener,
        "-o",
        tmp_path / "x",
        "--task",
        AUDIO_TEXT_TO_TEXT,
        "--no-tokenizer",
        "--dtype",
        "f32",
        "--dry-run",
        "--json",
    )
    assert "frontend.nnef.tar" in call(*words).out
    assert "frontend.nnef.tar" not in call(*words, "--no-frontend").out


def test_a_folder_without_its_config_is_still_validated(export: Path, listener: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(listener, bare)
    (bare / "preprocessor_config.json").unlink()
    report = validate_folder(export, str(bare))
    assert report.passed and len(report.checks) == 3


def test_a_dry_run_measures_it(export: Path, listener: Path, tmp_path: Path) -> None:
    options = ExportOptions.of(task=AUDIO_TEXT_TO_TEXT, require_tokenizer=False, dtype="f32")
    plan = plan_llm_export(str(listener), tmp_path / "x", options=options)
    sizes = {archive.name: archive.bytes for archive in plan.archives}
    assert sizes["frontend.nnef.tar"] == (export / "frontend.nnef.tar").stat().st_size


_SEERS = {
    "smolvlm": ("SmolVLM", {"max_image_size": {"longest_edge": 16}}, None),
    "qwen2_5_vl": (
        "Qwen2VL",
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 16, "longest_edge": 4096}},
        24,
    ),
}


@pytest.mark.parametrize("family", _SEERS)
def test_pixels_go_into_the_encoder_as_they_come(family: str, tmp_path: Path) -> None:
    processor, settings, image_size = _SEERS[family]
    source = tmp_path / "source"
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]), dtype=torch.float32)
    leave_neutral_start(model)
    model.save_pretrained(source)
    getattr(transformers, f"{processor}ImageProcessorPil")(**settings).save_pretrained(source)
    result = _exported(source, tmp_path / "out", task=IMAGE_TEXT_TO_TEXT, image_size=image_size)
    assert result.validation is not None and result.validation.passed and len(result.validation.checks) == 5
    assert result.manifest["multimodal"]["order"] == ["frontend", "embed", "vision", "decoder"]
    side = result.manifest["frontend"]["resize"]["height"]
    pixels = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    with (
        open_archive_session(result.archives["frontend"]) as front,
        open_archive_session(result.archives["vision"]) as vision,
    ):
        (rows,) = vision.answer(front.answer([pixels]))
        (others,) = vision.answer(front.answer([255 - pixels]))
    assert rows.reshape(-1, rows.shape[-1]).shape[0] == result.manifest["multimodal"]["rows_per_image"]
    assert np.abs(rows - others).max() > 1e-3
