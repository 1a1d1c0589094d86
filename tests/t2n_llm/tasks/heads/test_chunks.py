"""A model that walks over recordings: one chunk, of any length up to the longest, is one pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.check.options import CheckingOptions
from t2n_llm.export.pipeline import export_llm
from t2n_llm.tasks.heads.model import longest_chunk
from t2n_llm.tasks.names import AUDIO_FRAME_CLASSIFICATION
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model


def test_recordings_up_to_a_chunk(tmp_path: Path) -> None:
    model = shallow_model("nemotron3_diarization", AUDIO_FRAME_CLASSIFICATION)
    longest = longest_chunk(model.config)
    assert longest == model.config.chunk_length * model.config.audio_config.subsampling_factor
    save_tiny_model(model, tmp_path / "model", AUDIO_FRAME_CLASSIFICATION)
    result = export_llm(
        str(tmp_path / "model"),
        tmp_path / "out",
        task=AUDIO_FRAME_CLASSIFICATION,
        archive="dir",
        require_tokenizer=False,
        dtype="f32",
    )
    assert result.validation is not None and result.validation.passed
    width = model.config.audio_config.num_mel_bins
    with open_archive_session(tmp_path / "out" / "model.nnef", CheckingOptions()) as engine:
        for batch, frames in ((1, 1), (2, 8), (1, 333), (1, longest)):
            sound = np.random.default_rng(frames).standard_normal((batch, frames, width)).astype(np.float32)
            with torch.no_grad():
                expected = model(torch.from_numpy(sound)).logits.numpy()
            (logits,) = engine.answer([sound])
            assert logits.shape == expected.shape
            np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    text = (tmp_path / "out" / "model.nnef" / "graph.nnef").read_text()
    assert f"tract_assert T <= {longest};" in text
