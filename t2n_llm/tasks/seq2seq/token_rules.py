"""Which token may come next, as `generation_config.json` has it: what is never said, what is forced, what Whisper does with time.

In: logits and what has been said. Out: logits with minus infinity where a token may not be. The rules are those of
transformers' `generate()` (`t2n_llm/runtime/sampling`); of timestamps, those of Radford et al. 2022 (Whisper), section 4.5 and its
published decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.runtime.sampling.rules import Said, ScoreRule, rules_of
from t2n_llm.runtime.sampling.settings import end_tokens

_NEVER = -np.inf
_SECONDS_A_STEP = 0.02


@dataclass(frozen=True)
class Timestamps:
    """Tokens that say when: they come in pairs, around what is said between them, and never go back.

    Attributes:
        begin: the token of 0.00 s; each further one is 0.02 s later.
        end: the token that ends a text.
        latest_first: how many steps after the beginning the first one may be; None for any.
        without: the token that asks for none.
    """

    begin: int
    end: int
    latest_first: int | None
    without: int

    def seconds(self, token: int) -> float:
        """Return the time that a token stands for, from the start of the window."""
        return (token - self.begin) * _SECONDS_A_STEP

    def applied(self, logits: np.ndarray, said: Sequence[int]) -> np.ndarray:
        """Return logits [vocab] in which only what the rules allow is left."""
        allowed = logits.astype(np.float64)
        allowed[self.without] = _NEVER
        last = bool(said) and said[-1] >= self.begin
        before = len(said) < 2 or said[-2] >= self.begin
        if last and before:
            allowed[self.begin :] = _NEVER
        elif last:
            allowed[: self.end] = _NEVER
        times = [token for token in said if token >= self.begin]
        if times:
            allowed[self.begin : times[-1] + (0 if last and not before else 1)] = _NEVER
        if not said:
            allowed[: self.begin] = _NEVER
            if self.latest_first is not None:
                allowed[self.begin + self.latest_first + 1 :] = _NEVER
        weights = np.exp(allowed - allowed.max())
        if weights[self.begin :].sum() > weights[: self.begin].max():
            allowed[: self.begin] = _NEVER
        return allowed


@dataclass(frozen=True)
class TokenRules:
    """What decides beside the logits.

    Attributes:
        start: what the decoder reads first.
        ends: tokens that end a text.
        rules: what changes the logits, in order.
        timestamps: None where time is not told.
        beams: how many texts `generate()` follows at a time.
        length_penalty: of a text's score, which is divided by its length to that power.
        early_stopping: a search ends as soon as there are `beams` whole texts.
    """

    start: tuple[int, ...]
    ends: frozenset[int]
    rules: tuple[ScoreRule, ...] = ()
    timestamps: Timestamps | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def applied(self, logits: np.ndarray, said: Sequence[int]) -> np.ndarray:
        """Return logits [vocab], minus infinity where a token may not come after those that were said."""
        allowed = logits.astype(np.float64)
        whole = Said((*self.start, *said), len(self.start))
        for rule in self.rules:
            allowed = rule.applied(allowed, whole)
        return self.timestamps.applied(allowed, said) if self.timestamps is not None else allowed

    @staticmethod
    def of(settings: Mapping[str, Any], start: int) -> TokenRules:
        """Read them of what `generation_config.json` and `config.json` say.

        Args:
            settings: by transformers' names.
            start: what the decoder starts with where they do not say.
        """
        ends = end_tokens(settings)
        begin = settings.get("decoder_start_token_id")
        return TokenRules(
            start=(start if begin is None else _first(begin),),
            ends=frozenset(ends),
            rules=rules_of(settings, ends),
            beams=int(settings.get("num_beams") or 1),
            length_penalty=float(1.0 if settings.get("length_penalty") is None else settings["length_penalty"]),
            early_stopping=settings.get("early_stopping") is True,
        )

    def told(
        self, settings: Mapping[str, Any], language: str | None, purpose: str | None, *, timestamps: bool
    ) -> TokenRules:
        """Return the rules of a speech model that is told a language, what to do, and whether to say when (Whisper).

        Args:
            settings: as of `of`.
            language: a code such as `en`; None leaves it open, see `languages_of`.
            purpose: `transcribe` or `translate`.
            timestamps: whether to say when.

        Raises:
            OptionError: the model has no such choice.
        """
        start = self.start[:1]
        languages = languages_of(settings)
        if language is not None:
            if language not in languages:
                raise OptionError(f"the model knows no language {language!r}.", _known(languages))
            start += (languages[language],)
        purposes = settings.get("task_to_id") or {}
        if purpose is not None and purpose not in purposes:
            raise OptionError(f"the model does not {purpose}.", _known(purposes))
        if purposes and languages:
            start += (int(purposes[purpose or "transcribe"]),)
        without = settings.get("no_timestamps_token_id")
        if without is None and timestamps:
            raise OptionError("the model does not say when something is said.", "Leave --timestamps out.")
        if without is None:
            return replace(self, start=start)
        if not timestamps:
            return replace(self, start=(*start, int(without)))
        latest = settings.get("max_initial_timestamp_index")
        times = Timestamps(int(without) + 1, min(self.ends), None if latest is None else int(latest), int(without))
        return replace(self, start=start, timestamps=times)


def languages_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the languages that a speech model knows, by code; none where it knows one only."""
    tokens = settings.get("lang_to_id") or {} if settings.get("is_multilingual", True) else {}
    return {name.strip("<|>"): int(token) for name, token in tokens.items()}


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _known(names: Mapping[str, int]) -> str:
    return f"It knows {', '.join(sorted(names))}." if names else "Leave the option out."


__all__ = ["Timestamps", "TokenRules", "languages_of"]
