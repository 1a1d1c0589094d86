"""Kaldi's filter banks in the engine, normalised as three families do it, beside transformers' own extractors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ASTFeatureExtractor, SeamlessM4TFeatureExtractor, Speech2TextFeatureExtractor

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from t2n_llm.tasks.frontends.waveforms import chirp
from tests.frontend_archives import source_with, written

_FEATURES = "input_features"


@pytest.mark.parametrize(
    ("extractor", "name"),
    [
        (ASTFeatureExtractor(max_length=200), "input_values"),
        (ASTFeatureExtractor(max_length=64, num_mel_bins=40, do_normalize=False), "input_values"),
        pytest.param(Speech2TextFeatureExtractor(), _FEATURES, marks=pytest.mark.nightly),  # below, of 30 seconds
        (Speech2TextFeatureExtractor(num_mel_bins=40, normalize_vars=False), _FEATURES),
        (Speech2TextFeatureExtractor(do_ceptral_normalize=False), _FEATURES),
        pytest.param(SeamlessM4TFeatureExtractor(), _FEATURES, marks=pytest.mark.nightly),  # below
    ],
)
def test_recordings_of_several_lengths(extractor: Any, name: str, tmp_path: Path) -> None:
    archive = written(tmp_path, extractor, "speech_to_text", name)
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 3
    assert all(check.passed and check.max_abs_error < 1e-4 * check.scale for check in checks), checks


def test_an_odd_frame_is_filled_up(tmp_path: Path) -> None:
    extractor = SeamlessM4TFeatureExtractor()
    archive = written(tmp_path, extractor, "seamless_m4t", _FEATURES)
    generator = np.random.default_rng(0)
    with open_archive_session(archive.path) as answerer:
        for frames in (10, 11):
            waveform = chirp(generator, 400 + (frames - 1) * 160 + 5, 16_000)
            features, mask = answerer.answer([waveform[None], np.array([len(waveform)])])
            wanted = extractor(waveform, sampling_rate=16_000, return_tensors="np")
            np.testing.assert_allclose(features, wanted["input_features"], atol=2e-4)
            assert mask.tolist() == wanted["attention_mask"].tolist()


def test_long_recordings_lose_nothing_to_rounding(tmp_path: Path) -> None:
    extractor = Speech2TextFeatureExtractor()
    archive = written(tmp_path, extractor, "speech_to_text", _FEATURES)
    waveform = chirp(np.random.default_rng(0), 30 * 16_000, 16_000)
    with open_archive_session(archive.path) as answerer:
        features, _ = answerer.answer([waveform[None], np.array([len(waveform)])])
    wanted = extractor(waveform, sampling_rate=16_000, return_tensors="np")["input_features"]
    np.testing.assert_allclose(features, wanted, atol=2e-4)


def test_an_extractor_that_adds_noise_has_no_graph(tmp_path: Path) -> None:
    source = source_with(tmp_path, Speech2TextFeatureExtractor(dither=1.0), "speech_to_text")
    assert frontend_of(source, GraphOptions(), _FEATURES) is None
