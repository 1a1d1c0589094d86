"""Which token may come next, as `generation_config.json` has it: what is never said, what is forced, what Whisper does with time.

In: logits and what has been said. Out: logits with minus infinity where a token may not be. The rules are those of
transformers' `generate()`; of timestamps, those of Radford et al. 2022 (Whisper), section 4.5 and its published decoder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import OptionError

_SETTINGS = ("config.json", "generation_config.json")  # the second one has the last word
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
        never, not_first: tokens that are not said, or not as the first one.
        first: the token that a text begins with; None for any.
        ngram: no sequence of so many tokens occurs twice; 0 for no such rule.
        repetition: what the logits of tokens that occur already are divided by, or multiplied with where they are negative.
        timestamps: None where time is not told.
        beams: how many texts `generate()` follows at a time.
        length_penalty: of a text's score, which is divided by its length to that power.
        early_stopping: a search ends as soon as there are `beams` whole texts.
    """

    start: tuple[int, ...]
    ends: frozenset[int]
    never: frozenset[int] = frozenset()
    not_first: frozenset[int] = frozenset()
    first: int | None = None
    ngram: int = 0
    repetition: float = 1.0
    timestamps: Timestamps | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def applied(self, logits: np.ndarray, said: Sequence[int]) -> np.ndarray:
        """Return logits [vocab], minus infinity where a token may not come after those that were said."""
        allowed = logits.astype(np.float64)
        known = [*self.start, *said]
        if self.repetition != 1.0:
            seen = sorted(set(known))
            allowed[seen] = np.where(
                allowed[seen] < 0, allowed[seen] * self.repetition, allowed[seen] / self.repetition
            )
        allowed[_ending(known, self.ngram)] = _NEVER
        allowed[[token for token in self.never if token < len(allowed)]] = _NEVER
        if not said:
            allowed[[token for token in self.not_first if token < len(allowed)]] = _NEVER
            if self.first is not None:
                allowed[np.arange(len(allowed)) != self.first] = _NEVER
        return self.timestamps.applied(allowed, said) if self.timestamps is not None else allowed

    @staticmethod
    def of(settings: Mapping[str, Any], start: int) -> TokenRules:
        """Read them of what `generation_config.json` and `config.json` say.

        Args:
            settings: by transformers' names.
            start: what the decoder starts with where they do not say.
        """
        bad = settings.get("bad_words_ids") or ()
        ends = settings.get("eos_token_id")
        begin = settings.get("decoder_start_token_id")
        forced = settings.get("forced_bos_token_id")
        return TokenRules(
            start=(start if begin is None else _first(begin),),
            ends=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
            never=frozenset(settings.get("suppress_tokens") or ()) | {each[0] for each in bad if len(each) == 1},
            not_first=frozenset(settings.get("begin_suppress_tokens") or ()),
            first=None if forced is None else int(forced),
            ngram=int(settings.get("no_repeat_ngram_size") or 0),
            repetition=float(settings.get("repetition_penalty") or 1.0),
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


def generation_settings(folder: Path) -> dict[str, Any]:
    """Return what a model's folder says of generation, by transformers' names; nothing of what it does not say."""
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if (folder / name).is_file():
            settings |= json.loads((folder / name).read_text(encoding="utf-8"))
    return settings


def languages_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the languages that a speech model knows, by code; none where it knows one only."""
    tokens = settings.get("lang_to_id") or {} if settings.get("is_multilingual", True) else {}
    return {name.strip("<|>"): int(token) for name, token in tokens.items()}


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _known(names: Mapping[str, int]) -> str:
    return f"It knows {', '.join(sorted(names))}." if names else "Leave the option out."


def _ending(known: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would end a sequence of `size` tokens which occurs already."""
    if size < 1 or len(known) < size:
        return []
    before = tuple(known[len(known) - size + 1 :])
    return [known[at + size - 1] for at in range(len(known) - size + 1) if tuple(known[at : at + size - 1]) == before]


__all__ = ["Timestamps", "TokenRules", "generation_settings", "languages_of"]
