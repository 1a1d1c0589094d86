"""Log-mel features of NeMo and of Gemma, and CLAP's decibels, in the engine, beside transformers' own extractors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    ClapFeatureExtractor,
    Gemma3nAudioFeatureExtractor,
    Gemma4AudioFeatureExtractor,
    NemotronAsrStreamingFeatureExtractor,
    ParakeetFeatureExtractor,
)

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.gemma import gemma_4_log_mel
from tests.frontend_archives import written

_SHORT = {"max_length_s": 1, "sampling_rate": 24_000, "frequency_max": 10_000}


@pytest.mark.parametrize(
    "extractor",
    [
        pytest.param(ParakeetFeatureExtractor(), marks=pytest.mark.nightly),  # Nemotron's has its emphasis too
        ParakeetFeatureExtractor(feature_size=128, preemphasis=None),
        NemotronAsrStreamingFeatureExtractor(),
        NemotronAsrStreamingFeatureExtractor(mel_filters_dtype="bfloat16", n_fft=400),
        Gemma3nAudioFeatureExtractor(),
        Gemma3nAudioFeatureExtractor(preemphasis=0.0, fft_overdrive=False, input_scale_factor=2.0),
        Gemma4AudioFeatureExtractor(),
        Gemma4AudioFeatureExtractor(
            feature_size=64, preemphasis=0.9, per_bin_mean=[0.5] * 64, per_bin_stddev=[2.0] * 64
        ),
        ClapFeatureExtractor(truncation="rand_trunc", **_SHORT),
        ClapFeatureExtractor(truncation="fusion", padding="repeat", **_SHORT),
        ClapFeatureExtractor(truncation="fusion", padding="pad", **_SHORT),
    ],
    ids=lambda extractor: type(extractor).__name__,
)
def test_recordings_of_several_lengths(extractor: Any, tmp_path: Path) -> None:
    archive = written(tmp_path, extractor, "clap", "input_features")
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 3 and all(check.passed for check in checks), checks
    assert archive.front.described()["inputs"].keys() == {"waveform", "lengths"}


@pytest.mark.parametrize("settings", [{"dither": 1e-4}, {"preemphasis": 0.9, "preemphasis_htk_flavor": False}])
def test_other_settings_have_no_front_end(settings: dict[str, Any]) -> None:
    assert gemma_4_log_mel(Gemma4AudioFeatureExtractor(**settings), None, GraphOptions()) is None
