"""RecurrentGemma: recurrent layers keep their states in the modules, and forget them when more than one token comes.

Attention layers use transformers' `Cache`; here the recurrent ones do too (Griffin, De et al. 2024, section 2.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from kvcache.forms.cache import CacheConversation
from kvcache.recurrent.loop import over_time, time_first, time_second
from kvcache.states import Slot, States


class RecurrentGemmaForm:
    """See `kvcache.forms.StateForm`."""

    def run(self, model: nn.Module, past: States | None, **inputs: Any) -> tuple[torch.Tensor, States]:
        """See `StateForm.run`."""
        from kvcache.explicit_cache import ExplicitCache

        cache = ExplicitCache(model.config, past)
        with _states_in(cache, model):
            logits = model(past_key_values=cache, use_cache=True, **inputs).logits
        return logits, cache.states()

    def conversation(self, model: nn.Module, *, windowed: bool) -> RecurrentGemmaConversation:
        """See `StateForm.conversation`."""
        return RecurrentGemmaConversation(model, windowed)


class RecurrentGemmaConversation(CacheConversation):
    """The model as it is; a new conversation starts at position 0, where it forgets what its modules hold."""

    def states(self) -> States:
        """See `Conversation.states`."""
        found = super().states()
        for layer, block in _recurrent_blocks(self._model):
            found[Slot("conv_state", layer)] = block.conv1d_state
            found[Slot("recurrent_state", layer)] = block.rg_lru.recurrent_states
        return found


def _recurrent_blocks(model: Any) -> Iterator[tuple[int, Any]]:
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.temporal_block, "rg_lru"):
            yield index, layer.temporal_block


@contextmanager
def _states_in(cache: Any, model: nn.Module) -> Iterator[None]:
    """Let the recurrent layers read and write a cache for the length of the block."""
    with ExitStack() as stack:
        for index, block in _recurrent_blocks(model):
            stack.enter_context(mock.patch.object(block, "forward", partial(_block, block, cache, index)))
            stack.enter_context(mock.patch.object(block.rg_lru, "_rnn_scan", partial(_linear_unit, cache, index)))
            stack.enter_context(mock.patch.object(block.rg_lru, "recurrent_states", None))
        yield


def _block(
    block: Any, cache: Any, layer: int, input_states: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRecurrentBlock.forward`, the convolution seeing the columns before these positions."""
    gate = block.act_fn(block.linear_y(input_states))
    columns = block.linear_x(input_states).transpose(1, 2)
    columns = cache.update_conv_state(columns, layer, conv_kernel_size=block.conv1d_width - 1)
    weight, bias = block.conv_1d.weight, block.conv_1d.bias
    columns = functional.conv1d(columns, weight, bias, groups=weight.shape[0])
    hidden = block.rg_lru(columns.transpose(1, 2), position_ids)
    return block.linear_out(hidden * gate), None


def _linear_unit(
    cache: Any,
    layer: int,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRglru._rnn_scan` over any number of positions.

    Args:
        cache, layer: where the state [B, W] f32 is.
        hidden_states, recurrent_gate: [B, S, W].
        reset: bool [B, S, 1], where the state is forgotten.
    """
    past = cache.get_recurrent_state(layer)
    if past is None:
        past = hidden_states.new_zeros(hidden_states[:, 0].shape, dtype=torch.float32)
    decay = (recurrent_gate * ~reset).float()
    sequences = [time_first(tensor) for tensor in (decay, hidden_states.float())]
    state, outputs = over_time(_step, [past], sequences)
    cache.update_recurrent_state(state, layer)
    return time_second(outputs).to(hidden_states.dtype), None


def _step(state: torch.Tensor, decay: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Everything [B, W]."""
    state = decay * state + x
    return state, state.clone()


__all__ = ["RecurrentGemmaConversation", "RecurrentGemmaForm"]
