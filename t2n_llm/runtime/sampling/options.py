"""What a user wishes of the choice of tokens: over what the model's folder says, over what transformers does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid

if TYPE_CHECKING:
    from t2n_llm.runtime.sampling.choice import TokenChoice

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # who gives one wants tokens to be drawn


@dataclass(frozen=True)
class Sampling:
    """What a user wishes; None leaves it to the model's `generation_config.json`.

    Raises:
        OptionError: a value is out of range, or two contradict each other.
    """

    greedy: bool = option(False, "Always take the most likely token.", Panel.SAMPLING)
    temperature: float | None = option(None, "Randomness; 0 is greedy.", Panel.SAMPLING, metavar="T", minimum=0)
    top_k: int | None = option(
        None, "Sample from the K most likely tokens; 0: all.", Panel.SAMPLING, metavar="K", minimum=0
    )
    top_p: float | None = option(None, "Sample from the tokens with total probability P.", Panel.SAMPLING, metavar="P")
    min_p: float | None = option(
        None, "Minimum probability relative to the most likely token.", Panel.SAMPLING, metavar="P"
    )
    repetition_penalty: float | None = option(
        None, "Above 1: repeated tokens become less likely.", Panel.SAMPLING, metavar="X"
    )
    seed: int | None = option(None, "Random seed.", Panel.SAMPLING, metavar="N", minimum=0)
    stop: tuple[str, ...] = option((), "Stop before this text; repeatable.", metavar="TEXT")

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
        if self.greedy and (self.temperature or self._asks_for(_SAMPLED[1:])):
            raise OptionError("greedy takes the likeliest token; there is nothing to sample.", "Leave one of them out.")

    def choice(self, settings: Mapping[str, Any]) -> TokenChoice:
        """Return how the next token is chosen.

        Args:
            settings: of the model, as of `settings.generation_settings`.

        Raises:
            OptionError: a setting is out of range, or no number.
        """
        from t2n_llm.runtime.sampling.choice import (
            TokenChoice,  # numpy; the command line reads this file to print its help
        )

        wished = {name: getattr(self, name) for name in (*_SAMPLED, "repetition_penalty")}
        said = {**settings, **{name: value for name, value in wished.items() if value is not None}}
        return TokenChoice.of(said, sampled=self._samples(said), stops=self.stop, seed=self.seed)

    def _samples(self, said: Mapping[str, Any]) -> bool:
        if self.greedy or said.get("temperature") == 0:
            return False
        return bool(said.get("do_sample")) or self._asks_for(_SAMPLED)

    def _asks_for(self, names: tuple[str, ...]) -> bool:
        return any(getattr(self, name) is not None for name in names)


__all__ = ["Sampling"]
