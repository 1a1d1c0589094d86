"""Which drafted tokens stay: such that the text is distributed as if the target alone had said it.

In: two distributions over the same tokens, and a token drawn from the second. Out: a token drawn from the first.
Rejection sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2).
"""

from __future__ import annotations

import numpy as np

from t2n_llm.sampling.choice import drawn


def acceptance_probability(target: np.ndarray, draft: np.ndarray, token: int) -> float:
    """Return how likely a drafted token is to stay: min(1, p/q).

    Args:
        target: p, how likely the target finds each token [vocab].
        draft: q, what the token was drawn from [vocab].
        token: one that q finds possible.
    """
    return float(min(1.0, target[token] / draft[token]))


def residual(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Return what a token is drawn from after one was rejected: max(0, p - q), normalised; p where nothing is left of it.

    Args:
        target: p [vocab].
        draft: q [vocab].
    """
    left: np.ndarray = np.maximum(target - draft, 0.0)
    total = left.sum()
    # Without anything left p is q, and nothing is rejected; but p and q sum up to 1 in floats only.
    return left / total if total > 0 else target


def accepted_or_drawn(target: np.ndarray, draft: np.ndarray, token: int, random: np.random.Generator) -> int:
    """Return a drafted token, or the one that stands in its place; distributed as `target` is.

    Args:
        target: p [vocab].
        draft: q [vocab], what the token was drawn from.
        token: the drafted one.
        random: one draw is taken of it, and another where the token is rejected.
    """
    if random.random() < acceptance_probability(target, draft, token):
        return token
    return drawn(residual(target, draft), random)


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return how many tokens a run of the target gives on average (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: share of drafted tokens that stay, each judged alone.
        drafted: tokens of a run.
    """
    return float(drafted + 1) if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


__all__ = ["acceptance_probability", "accepted_or_drawn", "expected_tokens", "residual"]
