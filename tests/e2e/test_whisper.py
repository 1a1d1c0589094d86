"""A real recording through Whisper in the engine, front end and all: the text is the one that transformers' own `generate()` hears.

scripts/fetch_whisper.py fetches OpenAI's tiny.en and eleven seconds of a speech into ~/.cache/t2n-llm/models/whisper-tiny.en.
"""

from __future__ import annotations

import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

from t2n_llm import export_llm
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.runtime.from_source import GenerationOptions, SourceModel
from t2n_llm.tasks.media.sound import read_waveform
from tests.frontend_archives import written

FOLDER = Path.home() / ".cache" / "t2n-llm" / "models" / "whisper-tiny.en"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "jfk.wav").is_file(), reason=f"no Whisper in {FOLDER}: scripts/fetch_whisper.py"
)


def test_a_speech_is_understood(tmp_path: Path) -> None:
    extractor = AutoFeatureExtractor.from_pretrained(FOLDER)
    waveform = read_waveform(FOLDER / "jfk.wav", extractor.sampling_rate)
    archive = written(tmp_path, extractor, "whisper", "input_features")
    with open_archive_session(archive.path) as answerer:
        (features,) = answerer.answer([waveform[None]])
    own = extractor(waveform, sampling_rate=extractor.sampling_rate, return_tensors="np").input_features
    np.testing.assert_allclose(features, own, atol=1e-4)
    model = WhisperForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    said = AutoTokenizer.from_pretrained(FOLDER).decode(model.generate(torch.from_numpy(features))[0])
    assert "ask not what your country can do for you" in said


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper with its front end; its four checks agree."""
    result = export_llm(str(FOLDER), tmp_path_factory.mktemp("whisper") / "out", decode_steps=16)
    assert result.manifest["task"] == "automatic-speech-recognition"
    assert result.manifest["encoder_decoder"]["order"] == ["frontend", "encoder", "decoder"]
    assert result.validation is not None
    assert result.validation.passed
    return result.output_dir


def _own(recordings: list[np.ndarray], **options: Any) -> str:
    """Return what transformers' `generate()` hears."""
    extractor = AutoFeatureExtractor.from_pretrained(FOLDER)
    waveform = np.concatenate(recordings)
    long = len(waveform) > extractor.n_samples
    told = {"truncation": False, "padding": "longest", "return_attention_mask": True} if long else {}
    given = extractor(waveform, sampling_rate=extractor.sampling_rate, return_tensors="pt", **told)
    model = WhisperForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    said = model.generate(**given, return_timestamps=long, **options)
    return str(AutoTokenizer.from_pretrained(FOLDER).decode(said[0], skip_special_tokens=True))


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_waveform_becomes_the_text_that_transformers_hears(exported: Path, beams: int) -> None:
    waveform = read_waveform(FOLDER / "jfk.wav", 16_000)
    said = "".join(SourceModel.open(exported).text_of(GenerationOptions(beams=beams), audio=FOLDER / "jfk.wav"))
    assert said == _own([waveform], num_beams=beams)
    assert "ask not what your country can do for you" in said


def test_recordings_of_more_than_a_window(exported: Path, tmp_path: Path) -> None:
    speech = read_waveform(FOLDER / "jfk.wav", 16_000)
    recordings = [speech, np.zeros(8_000, np.float32), speech, np.zeros(12_000, np.float32), speech]
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((np.concatenate(recordings) * 32767).astype(np.int16).tobytes())
    said = "".join(SourceModel.open(exported).text_of(GenerationOptions(), audio=tmp_path / "long.wav"))
    assert said.split() == _own([read_waveform(tmp_path / "long.wav", 16_000)]).split()
    told = "".join(SourceModel.open(exported).text_of(GenerationOptions(timestamps=True), audio=tmp_path / "long.wav"))
    seconds = [float(second) for second in re.findall(r"\[([0-9.]+)\]", told)]
    assert len(seconds) >= 6
    assert seconds == sorted(seconds)
    assert seconds[-1] <= len(np.concatenate(recordings)) / 16_000 + 30
