"""NeMo's log-mel features and CLAP's decibels in the engine, beside transformers' own extractors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import ClapFeatureExtractor, NemotronAsrStreamingFeatureExtractor, ParakeetFeatureExtractor

from t2n_llm.tasks.frontends.check import check_frontend
from tests.frontend_archives import written

_SHORT = {"max_length_s": 1, "sampling_rate": 24_000, "frequency_max": 10_000}


@pytest.mark.parametrize(
    "extractor",
    [
        pytest.param(ParakeetFeatureExtractor(), marks=pytest.mark.nightly),  # Nemotron's has its emphasis too
        ParakeetFeatureExtractor(feature_size=128, preemphasis=None),
        NemotronAsrStreamingFeatureExtractor(),
        NemotronAsrStreamingFeatureExtractor(mel_filters_dtype="bfloat16", n_fft=400),
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
