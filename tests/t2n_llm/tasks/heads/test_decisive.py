"""Models whose code decides by values of their buffers: those of the checkpoint count, not those of a new model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from t2n_llm.export.pipeline import export_llm
from t2n_llm.tasks.names import UNIVERSAL_SEGMENTATION
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model


@pytest.mark.parametrize("shares", [(0.0, 1.0), pytest.param((0.0, 0.0), marks=pytest.mark.nightly)])
def test_layers_mask_as_the_checkpoint_says(shares: tuple[float, float], tmp_path: Path) -> None:
    model = build_tiny_model("eomt", 0, UNIVERSAL_SEGMENTATION)
    model.attn_mask_probs.copy_(torch.tensor(shares))
    save_tiny_model(model, tmp_path / "model", UNIVERSAL_SEGMENTATION)
    result = export_llm(
        str(tmp_path / "model"),
        tmp_path / "out",
        task=UNIVERSAL_SEGMENTATION,
        archive="dir",
        require_tokenizer=False,
        dtype="f32",
    )
    assert result.validation is not None and result.validation.passed
    text = next((tmp_path / "out").glob("**/graph.nnef")).read_text()
    assert text.count("= select(") == sum(map(bool, shares))
