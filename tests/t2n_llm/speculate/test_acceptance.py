"""What stays of a draft is distributed as the target's own tokens are: computed, and drawn many times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2n_llm.sampling.choice import TokenChoice, certain, drawn
from t2n_llm.sampling.rules import Said
from t2n_llm.speculate.acceptance import acceptance_probability, accepted_or_drawn, expected_tokens, residual

_VOCAB = 6
_weights = st.lists(st.integers(0, 20), min_size=_VOCAB, max_size=_VOCAB).filter(any)
_logits = st.lists(st.floats(-8, 8), min_size=_VOCAB, max_size=_VOCAB)
_settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.integers(0, _VOCAB),
        "top_p": st.sampled_from([0.4, 0.8, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
    }
)


def _normal(weights: list[int]) -> np.ndarray:
    return np.asarray(weights, np.float64) / sum(weights)


def _outcome(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Return how likely each token is to be said: over all drafted tokens, that it stays or stands in the place of one."""
    said = np.zeros_like(target)
    for token in np.flatnonzero(draft):
        stays = acceptance_probability(target, draft, int(token))
        said[token] += draft[token] * stays
        said += draft[token] * (1 - stays) * residual(target, draft)
    return said


@given(_weights, _weights)
def test_the_targets_distribution_comes_out_exactly(target: list[int], draft: list[int]) -> None:
    p, q = _normal(target), _normal(draft)
    np.testing.assert_allclose(_outcome(p, q), p, atol=1e-12)


@given(_weights, st.integers(0, _VOCAB - 1))
def test_it_does_for_a_guess_without_doubt(target: list[int], token: int) -> None:
    p = _normal(target)
    np.testing.assert_allclose(_outcome(p, certain(token, _VOCAB)), p, atol=1e-12)


@given(_logits, _logits, _settings, st.lists(st.integers(0, _VOCAB - 1), min_size=1, max_size=5))
def test_it_does_behind_the_same_processors(
    target: list[float], draft: list[float], settings: dict[str, float], before: list[int]
) -> None:
    choice, said = TokenChoice.of(settings, sampled=True), Said(before, 1)
    p, q = (choice.distribution(np.asarray(logits, np.float32), said) for logits in (target, draft))
    np.testing.assert_allclose(_outcome(p, q), p, atol=1e-9)


def test_a_rejected_token_is_never_drawn_again() -> None:
    p, q = _normal([1, 2, 3, 0, 0, 4]), _normal([5, 1, 1, 1, 0, 1])
    assert residual(p, q)[0] == 0 and residual(p, q)[3] == 0
    np.testing.assert_array_equal(residual(p, p), p)


def test_draws_have_the_targets_frequencies() -> None:
    p, q = _normal([1, 5, 3, 0, 8, 3]), _normal([6, 1, 1, 4, 4, 4])
    random, count = np.random.default_rng(7), 40_000
    said = np.bincount([accepted_or_drawn(p, q, drawn(q, random), random) for _ in range(count)], minlength=_VOCAB)
    assert said[3] == 0
    expected = p * count
    statistic = float(((said - expected)[p > 0] ** 2 / expected[p > 0]).sum())
    assert statistic < 18.5, said  # chi-squared, 4 degrees of freedom: p 0.001


@pytest.mark.parametrize(("acceptance", "drafted", "tokens"), [(0, 4, 1), (1, 4, 5), (0.5, 2, 1.75)])
def test_expected_tokens(acceptance: float, drafted: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafted) == tokens
