"""A real recording through the front end in the engine: Whisper hears in it what it hears through its own extractor.

scripts/fetch_whisper.py fetches OpenAI's tiny.en and eleven seconds of a speech into ~/.cache/t2n-llm/models/whisper-tiny.en.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

from t2n_llm.check.answers import open_answerer
from t2n_llm.measure.sources.sound import read_waveform
from tests.frontend_archives import written

FOLDER = Path.home() / ".cache" / "t2n-llm" / "models" / "whisper-tiny.en"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "jfk.wav").is_file(), reason=f"no Whisper in {FOLDER}: scripts/fetch_whisper.py"
)


def test_a_speech_is_understood(tmp_path: Path) -> None:
    extractor = AutoFeatureExtractor.from_pretrained(FOLDER)
    waveform = read_waveform(FOLDER / "jfk.wav", extractor.sampling_rate)
    archive = written(tmp_path, extractor, "whisper", "input_features")
    with open_answerer(archive.path) as answerer:
        (features,) = answerer.answer([waveform[None]])
    own = extractor(waveform, sampling_rate=extractor.sampling_rate, return_tensors="np").input_features
    np.testing.assert_allclose(features, own, atol=1e-4)
    model = WhisperForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    said = AutoTokenizer.from_pretrained(FOLDER).decode(model.generate(torch.from_numpy(features))[0])
    assert "ask not what your country can do for you" in said
