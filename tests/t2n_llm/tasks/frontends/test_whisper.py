"""A waveform becomes Whisper's log-mel features in the engine, as transformers' own extractor makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.waveforms import chirp
from tests.frontend_archives import FrontEndArchive, written

_FEATURES = "input_features"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> FrontEndArchive:
    """The front end of Whisper itself: 30 seconds, 80 bands."""
    return written(tmp_path_factory.mktemp("whisper"), WhisperFeatureExtractor(), "whisper", _FEATURES)


def test_recordings_of_several_lengths(whisper: FrontEndArchive) -> None:
    checks = check_frontend(whisper.path, whisper.front, "f32")
    assert len(checks) == 3
    assert all(check.passed and check.max_abs_error < 1e-4 for check in checks)


def test_a_batch_is_what_each_recording_is_alone(whisper: FrontEndArchive) -> None:
    generator = np.random.default_rng(1)
    waveform = np.stack([chirp(generator, 9_000, 16_000), 0.01 * chirp(generator, 9_000, 16_000)])
    with open_archive_session(whisper.path) as answerer:
        (together,) = answerer.answer([waveform])
        alone = [answerer.answer([row[None]])[0][0] for row in waveform]
    assert together.shape == (2, 80, 3000)
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "frames"),
    [
        ({"feature_size": 128, "chunk_length": 2}, 200),  # large-v3's bands
        ({"chunk_length": 1, "hop_length": 150, "n_fft": 320}, 106),  # a length that the hop does not divide
    ],
)
def test_other_sizes(settings: dict[str, int], frames: int, tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(**settings)
    archive = written(tmp_path, extractor, "whisper", _FEATURES)
    checks = check_frontend(archive.path, archive.front, "f32")
    assert all(check.passed for check in checks)
    assert archive.front.described()["features"] == [extractor.feature_size, frames]


def test_models_that_hide_what_follows_a_recording_are_told_its_length(tmp_path: Path) -> None:
    archive = written(tmp_path, WhisperFeatureExtractor(chunk_length=2), "qwen2_audio", _FEATURES)
    assert archive.front.output_names == (_FEATURES, "feature_attention_mask")
    assert all(check.passed for check in check_frontend(archive.path, archive.front, "f32"))
    with open_archive_session(archive.path) as answerer:
        _, mask = answerer.answer([np.ones((2, 16_000), np.float32), np.array([16_000, 4_001])])
    assert mask.sum(axis=1).tolist() == [100, 26]


def test_f16_is_rounded_once(tmp_path: Path) -> None:
    archive = written(
        tmp_path, WhisperFeatureExtractor(chunk_length=2), "whisper", _FEATURES, dtype="f16", activations="f16"
    )
    (case, *_) = archive.front.cases(np.random.default_rng(0))
    with open_archive_session(archive.path) as answerer:
        (features,) = answerer.answer(case.inputs)
    exact = torch.from_numpy(case.expected[0]).half().float().numpy()
    assert np.array_equal(features, features.astype(np.float16))
    np.testing.assert_allclose(features, exact, atol=2e-3)
    assert all(check.passed for check in check_frontend(archive.path, archive.front, "f16"))


def test_a_wrong_archive_is_found(tmp_path: Path) -> None:
    archive = written(tmp_path, WhisperFeatureExtractor(chunk_length=2), "whisper", _FEATURES)
    other = written(tmp_path, WhisperFeatureExtractor(chunk_length=2, n_fft=320), "whisper", _FEATURES)
    assert not any(check.passed for check in check_frontend(archive.path, other.front, "f32"))


def test_an_extractor_that_adds_noise_has_no_graph(tmp_path: Path) -> None:
    from t2n_llm.tasks.frontends.frontend import frontend_of
    from tests.frontend_archives import source_with

    assert (
        frontend_of(source_with(tmp_path, WhisperFeatureExtractor(dither=0.1), "whisper"), GraphOptions(), _FEATURES)
        is None
    )
