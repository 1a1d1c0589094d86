"""How the next token is chosen, once it is settled who says what.

In: settings by transformers' names, logits. Out: tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.sampling.rules import Said, ScoreRule, rules_of
from t2n_llm.sampling.settings import SETTINGS_FILE, end_tokens
from t2n_llm.sampling.warpers import MinP, Temperature, TopK, TopP, Warper, probabilities

_TOP_K = 50  # what transformers' generate() takes where nobody says it


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
            raise OptionError(f"{SETTINGS_FILE} has an invalid setting: {error}.", "Correct the file.") from error

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


__all__ = ["TokenChoice"]
