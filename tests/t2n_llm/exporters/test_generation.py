"""`export_for_generation`: programs that transformers' own `generate` calls in the place of the model."""

import copy
import functools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.exporters import ExportedModel

from t2n_llm.exporters import TractConfig, TractExporter

STEPS = 5


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 12)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def exported(model: Any, folder: Path, config: TractConfig, **options: Any) -> ExportedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # axes that are static
        found = TractExporter().export_for_generation(model, prompt(), config, **options)
    found.save_pretrained(folder)
    return ExportedModel.from_pretrained(folder)


def generated(model: Any, config: GenerationConfig | None, runners: Any = None) -> list[int]:
    """Return the tokens that `generate` chooses, the model's forward being that of runners where these are given."""
    settings = copy.deepcopy(config or model.generation_config)
    settings.update(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    calls: list[str] = []

    @functools.wraps(model.forward)
    def forward(**kwargs: Any) -> Any:
        calls.append("decode" if calls else "prefill")
        return runners[calls[-1]](**kwargs)

    with mock.patch.object(model, "forward", model.forward if runners is None else forward):
        return model.generate(**prompt(), generation_config=settings)[0].tolist()


@pytest.mark.parametrize("multi_token_decode", [False, True])
def test_a_growing_cache(model: Any, tmp_path: Path, multi_token_decode: bool) -> None:
    found = exported(model, tmp_path, TractConfig(dynamic=True), multi_token_decode=multi_token_decode)
    assert generated(model, None, found.runners) == generated(model, None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cache_of_one_size(model: Any, tmp_path: Path, dynamic: bool) -> None:
    settings = GenerationConfig(cache_implementation="static", max_cache_len=24)
    found = exported(model, tmp_path, TractConfig(dynamic=dynamic), generation_config=copy.deepcopy(settings))
    assert generated(model, settings, found.runners) == generated(model, settings)
