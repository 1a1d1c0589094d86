"""What may be said next is what transformers' own logits processors leave."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor, WhisperTimeStampLogitsProcessor

from generic_export.errors import OptionError
from t2n_llm.tasks.seq2seq.token_rules import Timestamps, TokenRules

_VOCABULARY, _END, _WITHOUT, _BEGIN = 30, 9, 19, 20
_SAID = st.lists(st.integers(0, _VOCABULARY - 1), max_size=8)
_SEEDS = st.integers(0, 1 << 16)


def _logits(seed: int) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal(_VOCABULARY)


def _same(left: np.ndarray, right: torch.Tensor) -> None:
    np.testing.assert_array_equal(np.isneginf(left), np.isneginf(right[0].double().numpy()))
    kept = ~np.isneginf(left)
    np.testing.assert_allclose(left[kept], right[0].double().numpy()[kept], rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(said=_SAID, seed=_SEEDS, latest=st.sampled_from([None, 0, 4]))
def test_timestamps(said: list[int], seed: int, latest: int | None) -> None:
    config = SimpleNamespace(
        no_timestamps_token_id=_WITHOUT, eos_token_id=_END, bos_token_id=None, max_initial_timestamp_index=latest
    )
    own = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    ids = torch.tensor([[0, 1, *said]])
    logits = _logits(seed)
    _same(Timestamps(_BEGIN, _END, latest, _WITHOUT).applied(logits, said), own(ids, torch.from_numpy(logits)[None]))


@settings(max_examples=100, deadline=None)
@given(said=_SAID, seed=_SEEDS, size=st.integers(1, 3), penalty=st.sampled_from([0.7, 1.0, 1.5]))
def test_repetition(said: list[int], seed: int, size: int, penalty: float) -> None:
    rules = TokenRules.of({"no_repeat_ngram_size": size, "repetition_penalty": penalty}, start=5)
    logits, ids = _logits(seed), torch.tensor([[5, *said]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.from_numpy(logits)[None])
    _same(rules.applied(logits, said), NoRepeatNGramLogitsProcessor(size)(ids, expected))


def test_first_and_never() -> None:
    rules = TokenRules.of({"suppress_tokens": [3, 99], "begin_suppress_tokens": [4]}, start=0)
    assert np.isneginf(rules.applied(np.zeros(6), [])).tolist() == [False, False, False, True, True, False]
    assert np.isneginf(rules.applied(np.zeros(6), [1])).tolist() == [False, False, False, True, False, False]


def test_a_speech_model_is_told_what_it_knows() -> None:
    settings_ = {
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "lang_to_id": {"<|en|>": 3, "<|de|>": 4},
        "task_to_id": {"transcribe": 5, "translate": 6},
        "no_timestamps_token_id": 7,
    }
    rules = TokenRules.of(settings_, 0)
    assert rules.told(settings_, "de", None, timestamps=False).start == (1, 4, 5, 7)
    assert rules.told(settings_, "en", "translate", timestamps=True).start == (1, 3, 6)
    assert rules.told(settings_, "en", None, timestamps=True).timestamps == Timestamps(8, 2, None, 7)
    with pytest.raises(OptionError, match="not support the language 'fr'"):
        rules.told(settings_, "fr", None, timestamps=False)
    with pytest.raises(OptionError, match="does not return timestamps"):
        TokenRules.of({}, 0).told({}, None, None, timestamps=True)
