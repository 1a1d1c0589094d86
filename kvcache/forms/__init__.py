"""How a model takes its states and gives them back: transformers' `Cache` for most, a file here where a family differs.

In: a model. Out: a `StateForm`, which the skeleton runs with explicit tensors, and the PyTorch reference with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Protocol

import torch
from torch import nn

from kvcache.forms.cache import CacheForm
from kvcache.forms.minimax import MiniMaxForm
from kvcache.forms.recurrent_gemma import RecurrentGemmaForm
from kvcache.forms.rwkv import RwkvForm
from kvcache.forms.xlstm import XlstmForm
from kvcache.states import States


class Conversation(Protocol):
    """A model and its own states, untouched transformers: what was said before is remembered."""

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits [B, kept, vocab] of new tokens [B, S]."""

    def states(self) -> States:
        """Return the states after the last answer."""


class StateForm(Protocol):
    """The way in and out for a family's states."""

    def run(self, model: nn.Module, past: States | None, **inputs: Any) -> tuple[torch.Tensor, States]:
        """Run a model from given states, any number of positions, without writing into them.

        Args:
            model: the causal LM.
            past: states before the call; None for none.
            inputs: further arguments of its forward.

        Returns:
            Logits, and the states after the call.
        """

    def conversation(self, model: nn.Module, *, windowed: bool) -> Conversation:
        """Start a conversation.

        Args:
            model: the causal LM.
            windowed: sliding layers drop what they no longer see, as `generate()` has it; else they keep all positions.
        """


_FORMS: Mapping[str, Callable[[], StateForm]] = {
    "minimax": MiniMaxForm,
    "recurrent_gemma": RecurrentGemmaForm,
    "rwkv": RwkvForm,
    "xlstm": XlstmForm,
}
"""Families that do not keep their states in a `Cache` of standard layers, by `model_type`."""


def state_form(model: nn.Module) -> StateForm:
    """Return the form of a model's family."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    return _FORMS.get(model_type, CacheForm)()


def accepts(model: nn.Module, argument: str) -> bool:
    """Say whether a model's forward has an argument of that name."""
    return argument in signature(model.forward).parameters


__all__ = ["Conversation", "StateForm", "accepts", "state_form"]
