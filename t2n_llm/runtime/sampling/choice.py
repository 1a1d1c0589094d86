"""How the next token is chosen, once it is settled who says what.

In: settings by transformers' names, logits. Out: tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.runtime.sampling.rules import NEVER, Said, ScoreRule, rules_of
from t2n_llm.runtime.sampling.settings import SETTINGS_FILE, end_tokens

_TOP_K = 50  # what transformers' generate() takes where nobody says it

_SMALLEST = 1e-100  # below it a division could overflow, and the largest scores alone have a probability anyway


@dataclass(frozen=True)
class TokenChoice:
    """How the next token is chosen.

    Attributes:
        rules: changes of its scores, in order.
        warpers: further ones of a token that is sampled; None takes the likeliest.
        ends: tokens that end a text.
        stops: texts that end one.
        seed: of the random choice; None differs from run to run.
    """

    rules: tuple[ScoreRule, ...] = ()
    warpers: tuple[Warper, ...] | None = None
    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    seed: int | None = None

    @staticmethod
    def of(
        settings: Mapping[str, Any], *, sampled: bool, stops: tuple[str, ...] = (), seed: int | None = None
    ) -> TokenChoice:
        """Return what settings ask for.

        Args:
            settings: by transformers' names; what they do not say is as in its `generate()`.
            sampled: whether a token is drawn.
            stops: texts that end an answer, beside those of the settings.
            seed: of the draws.

        Raises:
            OptionError: a setting is out of range, or no number.
        """
        ends = end_tokens(settings)
        try:
            return TokenChoice(
                rules=rules_of(settings, ends),
                warpers=_warpers(settings) if sampled else None,
                ends=frozenset(ends),
                stops=(*stops, *_texts(settings.get("stop_strings"))),
                seed=seed,
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"{SETTINGS_FILE} has a setting that is none: {error}.", "Correct the file.") from error

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; else the likeliest is taken."""
        return self.warpers is not None

    def random(self) -> np.random.Generator:
        """Return what the draws of a text, or of a chat, come from."""
        return np.random.default_rng(self.seed)

    def scores(self, logits: np.ndarray, said: Said) -> np.ndarray:
        """Return the scores [vocab] of the next token, float64, after the rules and the warpers."""
        scores = logits.astype(np.float64)
        for rule in self.rules:
            scores = rule.applied(scores, said)
        for warper in self.warpers or ():
            scores = warper.warped(scores)
        return scores

    def next_token(self, logits: np.ndarray, said: Said, random: np.random.Generator) -> int:
        """Return the next token.

        Args:
            logits: [vocab].
            said: the tokens before it.
            random: one draw is taken of it where tokens are sampled.
        """
        scores = self.scores(logits, said)
        if not self.samples or not np.isfinite(scores.max()):  # a penalty may be so large that scores overflow
            return int(scores.argmax())
        tokens = np.flatnonzero(scores > -np.inf)
        likely = probabilities(scores[tokens])
        tokens, likely = tokens[likely > 0], likely[likely > 0]
        reached = np.cumsum(likely)
        return int(tokens[np.searchsorted(reached[:-1], random.random() * reached[-1], side="right")])


def _warpers(said: Mapping[str, Any]) -> tuple[Warper, ...]:
    """Return what settings ask for, in the order of transformers' `generate()`."""
    temperature, top_k = float(said.get("temperature", 1)), int(said.get("top_k", _TOP_K))
    top_p, min_p = float(said.get("top_p", 1)), float(said.get("min_p", 0))
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"temperature {temperature:g}, top_k {top_k}, top_p {top_p:g}, min_p {min_p:g}")
    warpers: list[Warper] = [Temperature(temperature)] if temperature != 1 else []
    warpers += [TopK(top_k)] if top_k else []
    warpers += [TopP(top_p)] if top_p < 1 else []
    warpers += [MinP(min_p)] if min_p else []
    return tuple(warpers)


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


class Warper(Protocol):
    """One change of scores before sampling."""

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """Return new scores [vocab], float64; those given stay as they are."""
        ...


@dataclass(frozen=True)
class Temperature:
    """Divides the scores: below 1 the likely tokens become likelier, above 1 all become alike."""

    temperature: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        if self.temperature < _SMALLEST:
            return np.where(scores < scores.max(), NEVER, scores)
        return scores / self.temperature


@dataclass(frozen=True)
class TopK:
    """Leaves the likeliest tokens, so many of them, and those as likely as the last of these (Fan et al. 2018, section 5.4)."""

    count: int

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        count = min(self.count, len(scores))
        return np.where(scores < np.partition(scores, -count)[-count], NEVER, scores)


@dataclass(frozen=True)
class TopP:
    """Leaves the fewest tokens that together have this probability, likely ones first (Holtzman et al. 2020, section 3.1)."""

    probability: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        likely = probabilities(scores)
        # All that is less likely than this is less likely together than what is left out: it need not be sorted.
        few = np.flatnonzero(likely >= (1 - self.probability) / len(scores))
        rising = few[np.argsort(scores[few], kind="stable")]
        below = max(0.0, 1 - likely[few].sum())
        left_out = rising[:-1][below + np.cumsum(likely[rising[:-1]]) <= 1 - self.probability]
        warped = np.where(likely < (1 - self.probability) / len(scores), NEVER, scores)
        warped[left_out] = NEVER
        return warped


@dataclass(frozen=True)
class MinP:
    """Leaves the tokens that are at least so likely, measured by the likeliest (Nguyen et al. 2024, section 3)."""

    probability: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        likely = probabilities(scores)
        return np.where(likely < self.probability * likely.max(), NEVER, scores)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of scores."""
    weights = np.exp(scores - scores.max())
    normalised: np.ndarray = weights / weights.sum()
    return normalised


__all__ = ["MinP", "Temperature", "TokenChoice", "TopK", "TopP", "probabilities"]
