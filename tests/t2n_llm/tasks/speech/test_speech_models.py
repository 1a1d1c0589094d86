"""Speech models: the waveform of the archives is that of transformers' own model for the same random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from generic_export.errors import OptionError, SourceError, UnknownArchitectureError
from generic_export.inference_target.tract.releases.install import find_tract_cli
from t2n_llm import export_llm
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.source.hub import open_vocoder
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.names import TEXT_TO_AUDIO
from t2n_llm.tasks.speech.arrays import Draws, frames_of_tokens, typical_speaker
from t2n_llm.tasks.speech.families import family_of
from t2n_llm.tasks.speech.plan import Durations, SpeechPlan
from t2n_llm.tasks.speech.running import open_speech
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model, save_tiny_vocoder
from tests.shared_folders import SharedFolders

_VITS, _FAST, _WITH_VOCODER, _SPEECHT5 = (
    *("vits", "fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "speecht5"),
)
_TOKENS = 12  # neither of the two lengths of the check, nor the traced one
_STEPS = 30


@dataclass(frozen=True)
class Exported:
    """A tiny model and its export in f32."""

    model: Path
    vocoder: Path | None
    folder: Path


@pytest.fixture(scope="session")
def exported(shared_folders: SharedFolders) -> Callable[[str], Exported]:
    """Returns the export of a model type, checked."""

    def make(kind: str) -> Exported:
        models = shared_folders(f"tiny-{kind}-speech", lambda folder: _save(kind, folder))
        vocoder = models / "vocoder" if (models / "vocoder").is_dir() else None
        options = {"dtype": "f32", "require_tokenizer": False, "vocoder": str(vocoder) if vocoder else None}
        folder = shared_folders(
            f"exported-{kind}-speech", lambda target: export_llm(models / "model", target, **options)
        )
        return Exported(models / "model", vocoder, folder)

    return make


def _save(kind: str, folder: Path) -> None:
    model = build_tiny_model(kind, task=TEXT_TO_AUDIO)
    if kind == _SPEECHT5:  # random weights say stop at once
        with torch.no_grad():
            model.speech_decoder_postnet.prob_out.bias.fill_(-4.0)
    save_tiny_model(model, folder / "model", TEXT_TO_AUDIO, kind)
    save_tiny_vocoder(model, folder / "vocoder", TEXT_TO_AUDIO)


@pytest.mark.parametrize("kind", [_VITS, _WITH_VOCODER, _SPEECHT5])
def test_the_waveform_is_that_of_transformers(kind: str, exported: Callable[[str], Exported]) -> None:
    made = exported(kind)
    manifest = read_manifest(made.folder)
    plan = SpeechPlan.of_record(manifest["speech"])  # type: ignore[arg-type]
    vocoder = open_vocoder(SourceRef(str(made.vocoder))) if made.vocoder is not None else None
    model = build_tiny_model(kind, task=TEXT_TO_AUDIO)
    model = type(model).from_pretrained(made.model, attn_implementation="eager").eval()
    family = family_of(model.config, vocoder)
    assert family.plan == plan
    ids = np.random.default_rng(5).integers(9, family.vocabulary, size=(1, _TOKENS))
    speaker = typical_speaker(plan)
    voice = torch.from_numpy(speaker) if speaker is not None else None
    with torch.no_grad():
        wanted = family.spoken(model, torch.from_numpy(ids), voice, Draws(7)).made["waveform"]
    archives = {role: made.folder / part["archive"] for role, part in manifest["archives"].items()}
    with open_speech(archives, plan) as speech:
        got = speech.spoken(ids, speaker, Draws(7))
        other = speech.spoken(ids, speaker, Draws(8))
    assert wanted.std() > 0.01
    assert got["waveform"].shape == wanted.shape
    np.testing.assert_allclose(got["waveform"], wanted, atol=2e-4)
    assert bool(plan.noise) == (not np.array_equal(got["waveform"], other["waveform"]))


@pytest.mark.parametrize("kind", [_VITS, _WITH_VOCODER, _SPEECHT5])
def test_every_export_is_checked_at_two_lengths(kind: str, exported: Callable[[str], Exported]) -> None:
    validation = read_manifest(exported(kind).folder)["validation"]
    assert validation is not None and validation["passed"]
    names = [check["name"] for check in validation["checks"]]
    assert [name for name in names if name.startswith("waveform")] == ["waveform of 7 tokens", "waveform of 21 tokens"]


def test_a_vocoder_beside_the_model(exported: Callable[[str], Exported]) -> None:
    made = exported(_SPEECHT5)
    manifest = read_manifest(made.folder)
    assert list(manifest["archives"]) == ["text", "step", "spectrogram", "waveform"]
    assert manifest["source"]["model_type"] == "speecht5"
    assert manifest["vocoder"] == {"name": "vocoder", "revision": None, "architecture": "SpeechT5HifiGan"}
    with pytest.raises(SourceError, match="local vocoder"):
        validate_folder(made.folder, str(made.model))
    assert validate_folder(made.folder, str(made.model), options=ValidateOptions.of(vocoder=str(made.vocoder))).passed


def test_the_command_line_engine_agrees_too(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    made = exported(_SPEECHT5)
    options = {"require_tokenizer": False, "vocoder": str(made.vocoder), "check": False}
    folder = export_llm(made.model, tmp_path / "out", **options).output_dir  # caches in f16, which no npz file holds
    with_command = ValidateOptions.of(vocoder=str(made.vocoder), engine="cli")
    assert validate_folder(folder, str(made.model), options=with_command).passed


def test_a_model_of_spectrograms_needs_a_vocoder(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    made = exported(_SPEECHT5)
    with pytest.raises(OptionError, match="no vocoder was given") as caught:
        export_llm(made.model, tmp_path / "out", require_tokenizer=False)
    assert "--vocoder microsoft/speecht5_hifigan" in str(caught.value.hint)


def test_a_model_of_waveforms_has_no_vocoder(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    vocoder, made = str(exported(_SPEECHT5).vocoder), exported(_VITS)
    with pytest.raises(OptionError, match="makes waveforms itself"):
        export_llm(made.model, tmp_path / "out", require_tokenizer=False, vocoder=vocoder)
    with pytest.raises(OptionError, match="--vocoder applies to the task 'text-to-audio'"):
        export_llm(made.model, tmp_path / "out", task="fill-mask", vocoder=vocoder)
    with pytest.raises(UnknownArchitectureError, match="VitsModel is no vocoder"):
        export_llm(made.model, tmp_path / "out", require_tokenizer=False, vocoder=str(made.model))


def test_options_without_a_meaning_are_refused(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    model = exported(_VITS).model
    for options, message in (
        ({"batch": True}, "one text at a time"),
        ({"dtype": "f16", "activations": "f16"}, "computes in f32"),
        ({"compress": "q4_0:gptq"}, "calibration"),
        ({"adapter": "somewhere"}, "adapters"),
    ):
        with pytest.raises(OptionError, match=message):
            export_llm(model, tmp_path / "out", require_tokenizer=False, **options)


def test_a_model_of_several_speakers_and_plain_durations(tmp_path: Path) -> None:
    model = build_tiny_model(_VITS, task=TEXT_TO_AUDIO)
    config = model.config
    config.num_speakers, config.speaker_embedding_size, config.use_stochastic_duration_prediction = 3, 8, False
    torch.manual_seed(0)
    type(model)(config).save_pretrained(tmp_path / "model")
    result = export_llm(tmp_path / "model", tmp_path / "out", require_tokenizer=False, dtype="f32")
    assert result.validation is not None and result.validation.passed
    speech = json.loads((tmp_path / "out" / "export.json").read_text())["speech"]
    assert speech["speaker"] == {"input": "speaker_id", "count": 3, "width": None}
    assert list(speech["noise"]) == ["noise"]


def test_other_speech_models_are_refused() -> None:
    from transformers import BarkConfig

    with pytest.raises(UnknownArchitectureError, match="'bark'") as caught:
        family_of(BarkConfig())
    assert "vits" in str(caught.value.hint)


def test_durations_become_frames() -> None:
    up = Durations("up", 0.5)
    assert frames_of_tokens(up, np.array([0.1, 2.0, 4.2], np.float32)).tolist() == [1, 1, 3]
    nearest = Durations("nearest", 1.5)
    assert frames_of_tokens(nearest, np.array([-0.7, 0.5, 1.5, 2.6], np.float32)).tolist() == [0, 0, 3, 4]
    assert frames_of_tokens(nearest, np.array([-0.7, 0.2], np.float32)).tolist() == [
        1,
        1,
    ]  # else there would be no frame
