"""Scores of the next token are those of transformers' own logits processors, alone and together in its own order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from t2n_llm.runtime.sampling.choice import MinP, Temperature, TopK, TopP
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.runtime.sampling.rules import NoRepeatNGram, RepetitionPenalty, Said

_VOCABULARY = 24
_TOKENS = st.lists(st.integers(0, _VOCABULARY - 1), min_size=1, max_size=12)
_SCALES = st.sampled_from([0.1, 1.0, 5.0])
_SEEDS = st.integers(0, 1 << 16)
_PROBABILITIES = st.floats(0.01, 0.99)


def _logits(seed: int, scale: float = 3.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(_VOCABULARY)


def _same(ours: np.ndarray, theirs: torch.Tensor) -> None:
    expected = theirs[0].double().numpy()
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    kept = ~np.isneginf(ours)
    np.testing.assert_allclose(ours[kept], expected[kept], rtol=1e-6)


@settings(max_examples=150, deadline=None)
@given(seed=_SEEDS, scale=_SCALES, temperature=st.floats(0.05, 5), count=st.integers(1, 40), part=_PROBABILITIES)
def test_warpers(seed: int, scale: float, temperature: float, count: int, part: float) -> None:
    logits, ids = _logits(seed, scale), torch.zeros((1, 1), dtype=torch.int64)
    pairs = [
        (Temperature(temperature), TemperatureLogitsWarper(temperature)),
        (TopK(count), TopKLogitsWarper(count)),
        (TopP(part), TopPLogitsWarper(part)),
        (MinP(part), MinPLogitsWarper(part)),
    ]
    for ours, theirs in pairs:
        _same(ours.warped(logits), theirs(ids, torch.from_numpy(logits)[None]))


def test_equally_likely_tokens_stay_together() -> None:
    logits = np.array([1.0, 2.0, 2.0, 0.0])
    _same(TopK(1).warped(logits), TopKLogitsWarper(1)(torch.zeros((1, 1)), torch.from_numpy(logits)[None]))


@settings(max_examples=150, deadline=None)
@given(said=_TOKENS, seed=_SEEDS, penalty=st.floats(0.3, 3), size=st.integers(1, 4))
def test_what_was_said(said: list[int], seed: int, penalty: float, size: int) -> None:
    logits, ids = _logits(seed), torch.tensor([said])
    tokens = Said(said, 1)
    scores = torch.from_numpy(logits)[None]
    _same(RepetitionPenalty(penalty).applied(logits, tokens), RepetitionPenaltyLogitsProcessor(penalty)(ids, scores))
    _same(NoRepeatNGram(size).applied(logits, tokens), NoRepeatNGramLogitsProcessor(size)(ids, scores))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return LlamaForCausalLM(config)


def _theirs(model: LlamaForCausalLM, said: list[int], given: int, file: dict[str, Any]) -> LogitsProcessorList:
    """Return the processors that transformers itself makes of a generation config."""
    model.generation_config = GenerationConfig(**file)
    config, _ = model._prepare_generation_config(None)
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=given, device="cpu", model_kwargs={})


# transformers refuses a token that is forced and suppressed
_SUPPRESSED = st.lists(st.integers(0, 19) | st.integers(24, 30), min_size=1, max_size=4)
_FILE = st.fixed_dictionaries(
    {"eos_token_id": st.sampled_from([2, [2, 5]])},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.floats(0.2, 3),
        "top_k": st.integers(0, 30),
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0, 0.9),
        "repetition_penalty": st.floats(0.5, 2),
        "no_repeat_ngram_size": st.integers(0, 3),
        "bad_words_ids": st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=2), min_size=1, max_size=3),
        "sequence_bias": st.lists(
            st.tuples(st.lists(st.integers(0, 23), min_size=1, max_size=2), st.floats(-3, 3)).map(list),
            min_size=1,
            max_size=2,
            unique_by=lambda pair: tuple(pair[0]),
        ),
        "min_length": st.integers(0, 12),
        "min_new_tokens": st.integers(0, 6),
        "forced_bos_token_id": st.integers(20, 23),
        "suppress_tokens": _SUPPRESSED,
        "begin_suppress_tokens": _SUPPRESSED,
    },
)


@settings(max_examples=300, deadline=None)
@given(file=_FILE, said=_TOKENS, new=st.integers(0, 4), seed=_SEEDS)
def test_a_generation_config_means_what_it_means_to_transformers(
    model: LlamaForCausalLM, file: dict[str, Any], said: list[int], new: int, seed: int
) -> None:
    given = max(1, len(said) - new)
    logits = _logits(seed)
    choice = Sampling().choice(file)
    assert choice.samples is bool(file.get("do_sample"))
    theirs = _theirs(model, said, given, file)(torch.tensor([said]), torch.from_numpy(logits)[None])
    _same(choice.scores(logits, Said(said, given)), theirs)


@settings(max_examples=50, deadline=None)
@given(seed=_SEEDS, temperature=st.floats(0.2, 3), top_p=st.floats(0.05, 1))
def test_what_nobody_says_is_what_transformers_takes(
    model: LlamaForCausalLM, seed: int, temperature: float, top_p: float
) -> None:
    wide = 4 * np.random.default_rng(seed).standard_normal(80)
    file = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    expected = _theirs(model, [1], 1, file)(torch.tensor([[1]]), torch.from_numpy(wide)[None])
    _same(Sampling(temperature=temperature, top_p=top_p).choice({}).scores(wide, Said([1], 1)), expected)
