"""Waveforms normalised in the engine, with and without a mask, as transformers' own extractor does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import SpeechT5FeatureExtractor, Wav2Vec2FeatureExtractor

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from t2n_llm.tasks.frontends.waveforms import chirp
from tests.frontend_archives import source_with, written

_VALUES = "input_values"


@pytest.mark.parametrize(
    "extractor",
    [
        Wav2Vec2FeatureExtractor(),
        Wav2Vec2FeatureExtractor(return_attention_mask=True),
        Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False),
        SpeechT5FeatureExtractor(do_normalize=True),
    ],
)
def test_recordings_of_several_lengths(extractor: Any, tmp_path: Path) -> None:
    archive = written(tmp_path, extractor, "wav2vec2", _VALUES)
    assert archive.front.output_names == (_VALUES, "attention_mask")[: 1 + extractor.return_attention_mask]
    assert all(check.passed for check in check_frontend(archive.path, archive.front, "f32"))


def test_recordings_with_a_channel(tmp_path: Path) -> None:
    extractor_class = getattr(transformers, "OmniASRFeatureExtractor", None)
    if extractor_class is None:
        pytest.skip("needs transformers with OmniASR")
    archive = written(tmp_path, extractor_class(), "omniasr_ctc", _VALUES)
    assert archive.front.output_names == (_VALUES, "padding_mask")
    assert all(check.passed for check in check_frontend(archive.path, archive.front, "f32"))


@pytest.mark.parametrize("masked", [False, True])
def test_long_recordings_lose_nothing_to_rounding(masked: bool, tmp_path: Path) -> None:
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=masked)
    archive = written(tmp_path, extractor, "wav2vec2", _VALUES)
    waveform = chirp(np.random.default_rng(0), 30 * 16_000, 16_000)[None] + np.float32(0.2)
    with open_archive_session(archive.path) as answerer:
        values, *_ = answerer.answer([waveform, np.array([waveform.shape[1]])][: 1 + masked])
    exact = waveform.astype(np.float64)
    np.testing.assert_allclose(values, (exact - exact.mean()) / np.sqrt(exact.var() + 1e-7), atol=1e-4)


def test_what_is_after_the_end_of_a_recording_counts_for_nothing(tmp_path: Path) -> None:
    archive = written(tmp_path, Wav2Vec2FeatureExtractor(return_attention_mask=True), "wav2vec2", _VALUES)
    waveform = chirp(np.random.default_rng(0), 4_000, 16_000)[None].repeat(2, axis=0)
    waveform[1, 3_000:] = 5.0
    with open_archive_session(archive.path) as answerer:
        values, mask = answerer.answer([waveform, np.array([4_000, 3_000])])
        (alone, _) = answerer.answer([waveform[1:, :3_000], np.array([3_000])])
    np.testing.assert_allclose(values[1, :3_000], alone[0], atol=1e-5)
    assert not values[1, 3_000:].any() and mask.sum(axis=1).tolist() == [4_000, 3_000]


def test_an_extractor_that_changes_nothing_has_no_graph(tmp_path: Path) -> None:
    source = source_with(tmp_path, Wav2Vec2FeatureExtractor(do_normalize=False), "wav2vec2")
    assert frontend_of(source, GraphOptions(), _VALUES) is None
