"""Every supported family, tiny random weights: all four checks in the real engine, window left behind, greedy tokens equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from t2n_llm import export_llm
from tests.families import FAMILIES, WINDOW, save_tiny_model
from tests.t2n_llm.zoo.attention_families import nightly_unless

MAX_ABS_ERROR = 1e-4
DECODE_STEPS = 16

# Others are made of what these have. Gemma 3's decoder is exported in test_multimodal.py too, Qwen's in test_heads.py.
EVERY_TIME = {
    "llama": "tied weights",
    "llama3_rope": "scaled rotary frequencies, biases",
    "mistral": "a window",
    "gemma2": "caps of scores and logits, windows of some layers",
    "gpt2": "learned positions, projections stored transposed",
}


@pytest.mark.parametrize("family", nightly_unless(EVERY_TIME, FAMILIES))
def test_family_in_f32(family: str, tmp_path: Path) -> None:
    source = save_tiny_model(family, tmp_path / "model")
    result = export_llm(
        str(source), tmp_path / "export", dtype="f32", decode_steps=DECODE_STEPS, require_tokenizer=False
    )
    report = result.validation
    assert report is not None
    assert report.passed
    assert [check.name for check in report.checks] == ["prefill", "chunked prefill", "decode", "greedy"]
    steps = {check.name: len(check.steps) for check in report.checks}
    assert steps["decode"] == DECODE_STEPS
    assert steps["greedy"] == DECODE_STEPS >= 16
    for check in report.checks:
        assert check.max_abs_error <= MAX_ABS_ERROR, check.name
        assert check.same_top1_count == len(check.steps), check.name
    # The logits must be worth comparing.
    assert max(step.scale for check in report.checks for step in check.steps) > 1.5
    if result.manifest["model"]["sliding_window"] == WINDOW:
        assert PROMPT_AND_DECODE >= 3 * WINDOW


PROMPT_AND_DECODE = 12 + DECODE_STEPS


@pytest.mark.parametrize("family", nightly_unless(["gemma2"], ["llama", "gemma2", "gpt2", "phi3"]))
def test_family_in_f16(family: str, tmp_path: Path) -> None:
    import torch

    source = save_tiny_model(family, tmp_path / "model", dtype=torch.bfloat16)
    result = export_llm(str(source), tmp_path / "export", dtype="f16", decode_steps=16, require_tokenizer=False)
    assert result.validation is not None
    assert result.validation.passed


def test_a_forgotten_window_would_be_seen(tmp_path: Path) -> None:
    """The reference and the plan can tell a sliding window from full attention: the check is able to fail."""
    import numpy as np
    from transformers import AutoConfig

    from t2n_llm.check.reference import plan_check, run_reference

    source = save_tiny_model("mistral", tmp_path / "model")
    config = AutoConfig.from_pretrained(source)
    windowed = run_reference(source, plan_check(config, None, 8))
    config.sliding_window = None
    plan = windowed.plan
    config.save_pretrained(source)
    full = run_reference(source, plan)
    assert len(plan.text_ids) > 3 * WINDOW
    assert np.abs(windowed.text_logits[:WINDOW] - full.text_logits[:WINDOW]).max() < 1e-5
    assert np.abs(windowed.text_logits[-1] - full.text_logits[-1]).max() > 0.05
