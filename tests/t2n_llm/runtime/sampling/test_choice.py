"""What a user wishes over what the folder says; what is drawn, and how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.errors import ArchiveError, OptionError
from t2n_llm.runtime.sampling.choice import MinP, Temperature, TopK, TopP, probabilities
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.runtime.sampling.rules import RepetitionPenalty, Said
from t2n_llm.runtime.sampling.settings import generation_settings, not_followed

_NOTHING = Said([0], 1)


@pytest.mark.parametrize(
    ("wishes", "file", "warpers"),
    [
        ({}, {}, None),
        ({}, {"temperature": 0.6, "top_p": 0.9}, None),  # without do_sample they mean nothing
        ({}, {"do_sample": True}, (TopK(50),)),
        ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (Temperature(0.6), TopK(50), TopP(0.9))),
        ({"greedy": True}, {"do_sample": True}, None),
        ({"temperature": 0.0}, {"do_sample": True}, None),
        ({"temperature": 0.8}, {}, (Temperature(0.8), TopK(50))),
        (
            {"temperature": 0.8},
            {"temperature": 0.1, "top_k": 20, "min_p": 0.1},
            (Temperature(0.8), TopK(20), MinP(0.1)),
        ),
        ({"top_k": 0}, {}, ()),
        ({"top_p": 0.5, "top_k": 0}, {"do_sample": True, "top_p": 0.9}, (TopP(0.5),)),
        ({"seed": 3}, {}, None),
    ],
)
def test_wishes_stand_over_settings(wishes: dict[str, Any], file: dict[str, Any], warpers: Any) -> None:
    assert Sampling(**wishes).choice(file).warpers == warpers


def test_the_rest_of_a_choice() -> None:
    file = {"eos_token_id": [2, 3], "repetition_penalty": 1.1, "stop_strings": "END", "top_k": None}
    choice = Sampling(repetition_penalty=1.3, stop=("User:",), seed=4).choice(file)
    assert choice.rules == (RepetitionPenalty(1.3),)
    assert (choice.ends, choice.stops, choice.seed) == (frozenset({2, 3}), ("User:", "END"), 4)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"greedy": True, "top_p": 0.5}, "greedy"),
        ({"stop": ("",)}, "stop text is empty"),
    ],
)
def test_refusals(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Sampling(**wishes)


@pytest.mark.parametrize("file", [{"top_p": 3}, {"temperature": "hot"}, {"repetition_penalty": []}])
def test_a_file_that_says_nonsense(file: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"generation_config\.json"):
        Sampling().choice({"do_sample": True, **file})


def test_draws_follow_the_probabilities() -> None:
    logits = np.random.default_rng(0).standard_normal(8)
    choice = Sampling(temperature=0.7, top_p=0.9, seed=1).choice({})
    random = choice.random()
    drawn = np.bincount([choice.next_token(logits, _NOTHING, random) for _ in range(20_000)], minlength=8) / 20_000
    expected = probabilities(choice.scores(logits, _NOTHING))
    assert 0 in expected and drawn[expected == 0].sum() == 0
    assert np.abs(drawn - expected).max() < 0.015  # four standard deviations


@pytest.mark.parametrize("wishes", [{"temperature": 1e-320}, {"temperature": 1.0, "repetition_penalty": 1e-320}])
def test_settings_beyond_the_range_of_numbers_take_the_likeliest(wishes: dict[str, Any]) -> None:
    choice = Sampling(**wishes).choice({})
    logits = np.array([1.0, 5.0, 2.0], np.float32)
    with np.errstate(all="ignore"):
        assert choice.next_token(logits, Said([1], 1), choice.random()) == 1


def test_a_seed_repeats() -> None:
    logits = np.zeros(1000)

    def draws(seed: int | None) -> list[int]:
        choice = Sampling(top_k=0, seed=seed).choice({})
        random = choice.random()
        return [choice.next_token(logits, _NOTHING, random) for _ in range(8)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_where_the_settings_are_read(tmp_path: Path) -> None:
    config = {
        "eos_token_id": 7,
        "top_k": 3,
        "pad_token_id": None,
        "text_config": {"bos_token_id": 5, "eos_token_id": 6},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = generation_settings(tmp_path)
    assert (alone["eos_token_id"], alone["top_k"], alone["bos_token_id"]) == (7, 3, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": None}))
    assert generation_settings(tmp_path) == {"do_sample": True, "eos_token_id": 7, "bos_token_id": 5}
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(ArchiveError, match=r"generation_config\.json"):
        generation_settings(tmp_path)


def test_what_is_not_followed_is_named() -> None:
    file = {"typical_p": 0.9, "guidance_scale": 1.0, "num_beams": 4, "dola_layers": "high", "top_k": 4}
    assert not_followed(file, sampled=True, beams=False) == {"dola_layers": "high", "typical_p": 0.9, "num_beams": 4}
    assert not_followed(file, sampled=False, beams=True) == {"dola_layers": "high"}
