"""RWKV: the states are five tensors over all layers, given and returned as `state`.

Per layer: the last input of the channel mix and of the time mix, and numerator, denominator and exponent of the weighted average
of values (Peng et al. 2023, appendix D).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from kvcache.forms.form import StateForm
from kvcache.recurrent import LastRead
from kvcache.recurrent.loop import over_time, swap_time
from kvcache.states.tensors import Slot, States

# Position in transformers' list -> where we keep one layer's part of it.
_KINDS = (
    ("shift_state", 0),
    ("shift_state", 1),
    ("recurrent_state", 0),
    ("recurrent_state", 1),
    ("recurrent_state", 2),
)
_LOWEST_EXPONENT = -1e38
_AVERAGE = "rwkv_linear_attention"


class RwkvForm(StateForm):
    """See `kvcache.forms.StateForm`."""

    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """See `StateForm.keywords`; every layer is handed its states."""
        before = _no_states(model, inputs["input_ids"].shape[0]) if past is None else past
        return inputs | {"state": [OneLayerEach(before, kind, index) for kind, index in _KINDS], "use_cache": True}

    @contextmanager
    def replacements(self, module: nn.Module, last_read: LastRead) -> Iterator[None]:
        """See `StateForm.replacements`."""
        with _explicit_average(module), _rescaled(module):
            yield

    def states(self, keywords: dict[str, Any]) -> States:
        """See `StateForm.states`."""
        parts = keywords["state"]
        return {
            Slot(kind, layer, index): part.of[layer]
            for layer in parts[0].of
            for (kind, index), part in zip(_KINDS, parts, strict=True)
        }

    def conversation(self, model: nn.Module, *, windowed: bool) -> RwkvConversation:
        """See `StateForm.conversation`; there is no window."""
        return RwkvConversation(model)


class RwkvConversation:
    """RWKV with transformers' own state list."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: list[torch.Tensor] | None = None

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `Conversation.answer`."""
        result = self._model(input_ids=ids, state=self._state, use_cache=True, **options)
        self._state = result.state
        logits: torch.Tensor = result.logits
        return logits

    def states(self) -> States:
        """See `Conversation.states`."""
        state = self._state or []
        layers = state[0].shape[-1] if state else 0
        return {
            Slot(kind, layer, index): tensor[:, :, layer]
            for layer in range(layers)
            for (kind, index), tensor in zip(_KINDS, state, strict=True)
        }


class OneLayerEach:
    """Stands for a tensor [B, width, layers] of the list: `x[:, :, 3]` reads and replaces one layer's part."""

    def __init__(self, states: States, kind: str, index: int) -> None:
        self.of = {slot.layer: tensor for slot, tensor in states.items() if (slot.kind, slot.index) == (kind, index)}

    def __getitem__(self, place: tuple[slice, slice, int]) -> torch.Tensor:
        return self.of[place[2]]

    def __setitem__(self, place: tuple[slice, slice, int], value: torch.Tensor) -> None:
        self.of[place[2]] = value


def _no_states(model: nn.Module, batch: int) -> States:
    config: Any = model.config
    parameter = next(model.parameters())
    states: States = {}
    for layer in range(config.num_hidden_layers):
        for kind, index in _KINDS:
            shifted = kind == "shift_state"
            states[Slot(kind, layer, index)] = torch.zeros(
                (batch, config.hidden_size if shifted else config.attention_hidden_size),
                dtype=parameter.dtype if shifted else torch.float32,
                device=parameter.device,
            )
    return states


@contextmanager
def _explicit_average(module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for file in (sys.modules[name] for name in sorted({type(part).__module__ for part in module.modules()})):
            if hasattr(file, _AVERAGE):
                stack.enter_context(mock.patch.object(file, _AVERAGE, weighted_average))
        yield


@contextmanager
def _rescaled(module: nn.Module) -> Iterator[None]:
    """Divide what deeper layers add by a power of two, where transformers divides their stored weights.

    It does so once, in place, at the first call in evaluation mode, against overflow of f16; an archive holds the checkpoint's.
    """
    parts: list[Any] = list(module.modules())
    with ExitStack() as stack:
        for whole in (part for part in parts if hasattr(part, "layers_are_rescaled")):
            stack.enter_context(mock.patch.object(whole, "layers_are_rescaled", True))
        for block in (part for part in parts if hasattr(part, "layer_id") and hasattr(part, "feed_forward")):
            every = block.config.rescale_every
            factor = 2.0 ** -(block.layer_id // every) if every > 0 else 1.0
            for part in (block.attention.output, block.feed_forward.value) if factor != 1.0 else ():
                handle = part.register_forward_hook(_times(factor))
                stack.callback(handle.remove)
        yield


def _times(factor: float) -> Callable[..., torch.Tensor]:
    def hook(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * factor

    return hook


def weighted_average(
    time_decay: torch.Tensor,
    time_first_bonus: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Sequence[torch.Tensor] | None = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
    """Average values with weights that decay over time, as `rwkv_linear_attention` of transformers.

    Args:
        time_decay, time_first_bonus: [A].
        key, value: [B, S, A].
        state: numerator, denominator and exponent, each [B, A] f32; zeros are no past.
        return_state: return the new state when none was given.

    Returns:
        [B, S, A] in the element type of `key`, and the state.
    """
    numerator, denominator, exponent = state or [key.new_zeros(key[:, 0].shape, dtype=torch.float32)] * 3
    # After any token the denominator is at least 1.
    exponent = torch.where(denominator == 0, _LOWEST_EXPONENT, exponent)
    keys = key.float()
    sequences = [swap_time(tensor) for tensor in (keys, keys + time_first_bonus.float(), value.float())]
    decay = -torch.exp(time_decay.float())
    *after, outputs = over_time(_step, [numerator, denominator, exponent], sequences, [decay])
    kept = after if return_state or state is not None else None
    return swap_time(outputs).to(key.dtype), kept


def _step(
    numerator: torch.Tensor,
    denominator: torch.Tensor,
    exponent: torch.Tensor,
    key: torch.Tensor,
    boosted: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Everything [B, A], decay [A]."""
    top = torch.maximum(exponent, boosted)
    old, new = torch.exp(exponent - top), torch.exp(boosted - top)
    output = (old * numerator + new * value) / (old * denominator + new)
    decayed = exponent + decay
    top = torch.maximum(decayed, key)
    old, new = torch.exp(decayed - top), torch.exp(key - top)
    return old * numerator + new * value, old * denominator + new, top, output
