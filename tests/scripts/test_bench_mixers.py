"""The families that scripts/bench_mixers.py measures."""

from __future__ import annotations

import pytest
import torch

from tests.load_script import load_script

bench_mixers = load_script("bench_mixers")


@pytest.mark.parametrize("name", list(bench_mixers.configs()))
def test_the_models_are_about_as_large(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(bench_mixers.configs()[name]())
    assert 6e7 < sum(parameter.numel() for parameter in model.parameters()) < 4e8


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_mixers.parsed(["--models", "llama,lama"])
    assert "unknown model 'lama'" in capsys.readouterr().err
