"""Attention within blocks of recordings of any length: as transformers' branches, and one graph for all lengths in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.tasks.multimodal.encoder import EncoderModule
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model

# Frames, for blocks of 20: less than one, whole ones, and one more or less.
LENGTHS = (1, 7, 19, 20, 21, 40, 53)


@pytest.fixture(scope="module", params=["granite_speech", "granite_speech_plus"])
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny_model(request.param, task=AUDIO_TEXT_TO_TEXT)


def test_one_graph_hears_recordings_of_every_length(model: Any, tmp_path: Path) -> None:
    family = family_of(model.config, task=AUDIO_TEXT_TO_TEXT)
    assert family.row_count == "3*((T+5)/6)"
    archive = export_model_to_nnef(
        EncoderModule(model, family.encoder(model)),
        (torch.randn(family.pixel_shape),),
        tmp_path / "audio",
        TractNNEF(dynamic_axes={"input_features": {1: "T"}}),
        input_names=["input_features"],
        compression_level=None,
    )
    with TractWheel().load(archive) as engine:
        for length in LENGTHS:
            recording = torch.randn(1, length, family.pixel_shape[-1])
            with torch.no_grad():
                wanted = model.get_audio_features(recording.clone(), return_dict=True).pooler_output
            (found,) = engine.run([recording.numpy()])
            assert wanted.shape[1] == family.rows_of_image(recording.shape)
            torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=0.0)
