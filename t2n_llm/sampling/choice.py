"""How the next token is chosen: what a user wishes over what the model's folder says, over what transformers does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid
from t2n_llm.sampling.rules import Said, ScoreRule, rules_of
from t2n_llm.sampling.settings import SETTINGS_FILE, end_tokens
from t2n_llm.sampling.warpers import MinP, Temperature, TopK, TopP, Warper, probabilities

_TOP_K = 50  # what transformers' generate() takes where nobody says it
_PROBABILITIES = ("top_p", "min_p")


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
        if not self.samples or np.isneginf(scores.max()):
            return int(scores.argmax())
        kept = np.flatnonzero(scores > -np.inf)
        reached = np.cumsum(probabilities(scores[kept]))
        return int(kept[np.searchsorted(reached[:-1], random.random() * reached[-1], side="right")])


@dataclass(frozen=True)
class Sampling:
    """What a user wishes; None leaves it to the model's `generation_config.json`.

    Raises:
        OptionError: a value is out of range, or two contradict each other.
    """

    greedy: bool = option(False, "Take the likeliest token, whatever the model's settings say.", Panel.SAMPLING)
    temperature: float | None = option(
        None, "0: the likeliest token; higher: more varied.", Panel.SAMPLING, metavar="T", minimum=0
    )
    top_k: int | None = option(
        None, "Sample among the K likeliest tokens; 0: among all.", Panel.SAMPLING, metavar="K", minimum=0
    )
    top_p: float | None = option(
        None, "Sample among the likeliest tokens of this total probability.", Panel.SAMPLING, metavar="P"
    )
    min_p: float | None = option(
        None, "Leave out tokens less likely than P times the likeliest.", Panel.SAMPLING, metavar="P"
    )
    repetition_penalty: float | None = option(
        None, "Above 1: tokens that occur already become less likely.", Panel.SAMPLING, metavar="X"
    )
    seed: int | None = option(None, "The same seed gives the same text again.", Panel.SAMPLING, metavar="N", minimum=0)
    stop: tuple[str, ...] = option((), "End before this text; may be given several times.", metavar="TEXT")

    def __post_init__(self) -> None:
        refuse_invalid(self)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}.", "Use a probability above 0, at most 1.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p is {self.min_p}.", "Use a probability from 0 to 1.")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise OptionError(f"repetition_penalty is {self.repetition_penalty}.", "Use more than 0; 1 for none.")
        if "" in self.stop:
            raise OptionError("a stop text is empty.", "Give the text to stop at, or leave --stop out.")
        if self.greedy and (self.temperature or self._asks_for_variety(("top_k", "top_p", "min_p"))):
            raise OptionError("greedy takes the likeliest token; there is nothing to sample.", "Leave one of them out.")

    def choice(self, settings: Mapping[str, Any]) -> TokenChoice:
        """Return how the next token is chosen.

        Args:
            settings: of the model, as of `settings.generation_settings`.

        Raises:
            OptionError: a setting is out of range, or no number.
        """
        wished = {name: getattr(self, name) for name in ("temperature", "top_k", *_PROBABILITIES, "repetition_penalty")}
        said = {**settings, **{name: value for name, value in wished.items() if value is not None}}
        ends = end_tokens(settings)
        try:
            return TokenChoice(
                rules=rules_of(said, ends),
                warpers=_warpers(said) if self._samples(said) else None,
                ends=frozenset(ends),
                stops=(*self.stop, *_texts(settings.get("stop_strings"))),
                seed=self.seed,
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"{SETTINGS_FILE} has a setting that is none: {error}.", "Correct the file.") from error

    def _samples(self, said: Mapping[str, Any]) -> bool:
        if self.greedy or said.get("temperature") == 0:
            return False
        return bool(said.get("do_sample")) or self._asks_for_variety(("temperature", "top_k", *_PROBABILITIES))

    def _asks_for_variety(self, names: tuple[str, ...]) -> bool:
        return any(getattr(self, name) is not None for name in names)


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


__all__ = ["Sampling", "TokenChoice"]
