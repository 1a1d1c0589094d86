"""scripts/measured_model.py: which model is measured, and that permuting it leaves what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families import save_tiny_model
from tests.load_script import load_script
from tests.trained_model import REAL_MODEL

model = load_script("measured_model")


def test_permuted_channels_compute_the_same_and_lie_in_other_groups(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = model.permuted_model(REAL_MODEL, tmp_path / "permuted")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (folder, REAL_MODEL)
    )
    ids = torch.arange(10, 60).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)
    for name in ("q_proj", "v_proj", "o_proj"):
        mine, other = (each.model.layers[0].self_attn.get_submodule(name).weight for each in (ours, theirs))
        assert not torch.equal(mine, other)
        assert torch.equal(mine.flatten().sort().values, other.flatten().sort().values)
    marked = (folder / "permuted").stat().st_mtime_ns
    assert model.permuted_model(REAL_MODEL, folder) == folder
    assert (folder / "permuted").stat().st_mtime_ns == marked


def test_another_structure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model.NoModelError, match="not a Llama-shaped model"):
        model.permuted_model(save_tiny_model("gpt2", tmp_path / "gpt2"), tmp_path / "permuted")


def test_a_folder_is_taken_as_it_is_and_no_folder_is_refused(tmp_path: Path) -> None:
    assert model.measured_model(REAL_MODEL, tmp_path, permute=False) == REAL_MODEL
    with pytest.raises(model.NoModelError, match="no model there"):
        model.measured_model(tmp_path / "none", tmp_path)
