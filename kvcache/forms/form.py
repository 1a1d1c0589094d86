"""What every way to take states has in common.

In: a model and explicit states. Out: `StateForm`: arguments of a call, what is replaced around it, the states after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from kvcache.recurrent import LastRead
from kvcache.states.tensors import States


class Conversation(Protocol):
    """A model and its own states, untouched transformers: what was said before is remembered."""

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits [B, kept, vocab] of new tokens [B, S]."""

    def states(self) -> States:
        """Return the states after the last answer."""


class StateForm(ABC):
    """The way in and out for a family's states."""

    @abstractmethod
    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """Return the arguments of a call that starts from given states and does not write into them.

        Args:
            model: the causal LM.
            past: states before the call; None for none.
            last_read: told what the layers read, for recurrences that are not handed it.
            inputs: further arguments of its forward.
        """

    @abstractmethod
    def replacements(self, module: nn.Module, last_read: LastRead) -> AbstractContextManager[None]:
        """Put our code in the place of transformers', for the length of a block around such calls.

        Args:
            module: the causal LM or a part of it.
            last_read: the one that the caches of the calls tell.
        """

    @abstractmethod
    def states(self, keywords: dict[str, Any]) -> States:
        """Return the states after a call with such arguments."""

    @abstractmethod
    def conversation(self, model: nn.Module, *, windowed: bool) -> Conversation:
        """Start a conversation.

        Args:
            model: the causal LM.
            windowed: sliding layers drop what they no longer see, as `generate()` has it; else they keep all positions.
        """

    def run(self, model: nn.Module, past: States | None, **inputs: Any) -> tuple[torch.Tensor, States]:
        """Run a model from given states, any number of positions; returns logits and the states after the call.

        Args:
            model, past, inputs: see `keywords`.
        """
        last_read = LastRead()
        keywords = self.keywords(model, past, last_read, **inputs)
        with self.replacements(model, last_read):
            result = model(**keywords)
        return result.logits, self.states(keywords)
