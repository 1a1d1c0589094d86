"""Speech of a text from an export folder, as a WAV file."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from transformers import VitsTokenizer

from generic_export.errors import OptionError
from t2n_llm import export_llm
from t2n_llm.runtime.speech import SpeakingModel, voice_of
from t2n_llm.tasks.names import TEXT_TO_AUDIO
from t2n_llm.tasks.speech.plan import Speaker
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import call, strict_json

_LETTERS = ["<pad>", "<unk>", " ", *"abcdefghijklmnopqrstuvwxyz'"]


@pytest.fixture(scope="session")
def speaking(shared_folders: SharedFolders) -> Path:
    """A tiny VITS with letters, exported."""
    return shared_folders("speaking-vits", _export)


def _export(folder: Path) -> None:
    source = folder.with_name(f"{folder.name}-source")
    save_tiny_model(build_tiny_model("vits", task=TEXT_TO_AUDIO), source, TEXT_TO_AUDIO)
    (source / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(_LETTERS)}))
    letters = VitsTokenizer(str(source / "vocab.json"), phonemize=False, is_uroman=False)
    letters.save_pretrained(source)
    export_llm(source, folder, dtype="f32", check=False)


def _read(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()


def test_a_text_becomes_a_file(speaking: Path, tmp_path: Path) -> None:
    outcome = call("generate", speaking, "hello there", "--out", tmp_path / "speech.wav", "--seed", 3)
    assert outcome.code == 0, outcome.err
    samples, rate = _read(tmp_path / "speech.wav")
    model = SpeakingModel.open(speaking)
    waveform = model.spoken("hello there", seed=3)
    assert rate == model.plan.sampling_rate == 16_000
    assert np.abs(waveform).max() > 0.01
    np.testing.assert_allclose(samples / 32_767, np.clip(waveform, -1, 1), atol=1e-4)
    assert f"{len(samples) / rate:.2f} s at 16000 Hz" in outcome.out
    assert not np.array_equal(waveform, model.spoken("hello there", seed=4)[: len(waveform)])


def test_a_program_reads_what_was_written(speaking: Path, tmp_path: Path) -> None:
    outcome = call("generate", speaking, "hello", "-o", tmp_path / "speech.wav", "--json")
    record = strict_json(outcome.out)
    assert record["file"] == str(tmp_path / "speech.wav") and record["sampling_rate"] == 16_000
    assert len(_read(tmp_path / "speech.wav")[0]) == round(record["seconds"] * 16_000)


def test_speech_needs_a_file_and_a_text_that_the_model_knows(speaking: Path, tmp_path: Path) -> None:
    outcome = call("generate", speaking, "hello")
    assert outcome.code == 2 and "--output FILE.wav" in outcome.line("hint")
    outcome = call("generate", speaking, "hello", "-o", tmp_path / "no" / "folder.wav")
    assert outcome.code == 2 and "cannot be written" in outcome.line("error")
    outcome = call("generate", speaking, "hello", "-o", tmp_path / "speech.wav", "--speaker", 1)
    assert outcome.code == 2 and "one voice" in outcome.line("error")


def test_other_exports_write_no_speech(tiny_export: Path, tmp_path: Path) -> None:
    outcome = call("generate", tiny_export, "hello", "--output", tmp_path / "speech.wav")
    assert outcome.code == 2 and "Omit --output" in outcome.line("hint")


def test_speakers_are_numbers_or_vectors(tmp_path: Path) -> None:
    numbered, vectors = Speaker("speaker_id", count=3), Speaker("speaker_embeddings", width=4)
    assert voice_of(None, None) is None
    assert np.array_equal(voice_of(numbered, None), [0]) and np.array_equal(voice_of(numbered, "2"), [2])
    for given in ("3", "-1", "anna"):
        with pytest.raises(OptionError, match="3 speakers"):
            voice_of(numbered, given)
    np.save(tmp_path / "voice.npy", np.arange(4.0))
    np.save(tmp_path / "short.npy", np.arange(3.0))
    assert np.array_equal(voice_of(vectors, str(tmp_path / "voice.npy")), [[0, 1, 2, 3]])
    with pytest.raises(OptionError, match="none was given"):
        voice_of(vectors, None)
    with pytest.raises(OptionError, match="does not hold 4 floats"):
        voice_of(vectors, str(tmp_path / "short.npy"))
    with pytest.raises(OptionError, match="cannot be read"):
        voice_of(vectors, str(tmp_path / "none.npy"))
