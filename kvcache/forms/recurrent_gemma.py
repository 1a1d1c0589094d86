"""RecurrentGemma: recurrent layers keep their states in the modules, and forget them when more than one token comes.

Attention layers use transformers' `Cache`; here the recurrent ones do too (Griffin, De et al. 2024, section 2.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from kvcache.compat import cache_in, cache_keyword, takes_cache
from kvcache.forms.cache import CacheConversation
from kvcache.forms.form import StateForm
from kvcache.recurrent import LastRead
from kvcache.recurrent.loop import over_time, swap_time
from kvcache.recurrent.short_conv import summed_taps
from kvcache.states.tensors import Slot, States


class RecurrentGemmaForm(StateForm):
    """See `kvcache.forms.StateForm`."""

    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """See `StateForm.keywords`."""
        from kvcache.states.explicit_cache import ExplicitCache

        return inputs | {cache_keyword(model.forward): ExplicitCache(model.config, past, last_read), "use_cache": True}

    @contextmanager
    def replacements(self, module: nn.Module, last_read: LastRead) -> Iterator[None]:
        """See `StateForm.replacements`; of a part of the model nothing is replaced, since its blocks do not know their number."""
        with ExitStack() as stack:
            for index, block in _recurrent_blocks(module):
                running = _Running(index)
                scan = partial(_linear_unit, running)
                stack.enter_context(mock.patch.object(block, "forward", partial(_block, block, running)))
                stack.enter_context(mock.patch.object(block.rg_lru, "_rnn_scan", scan))
                stack.enter_context(mock.patch.object(block.rg_lru, "recurrent_states", None))
            yield

    def states(self, keywords: dict[str, Any]) -> States:
        """See `StateForm.states`."""
        found: States = cache_in(keywords).states()
        return found

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
    for index, layer in enumerate(getattr(getattr(model, "model", model), "layers", ())):
        if hasattr(layer.temporal_block, "rg_lru"):
            yield index, layer.temporal_block


@dataclass
class _Running:
    """A recurrent block, and the cache of its call while there is one: its recurrence is not handed it."""

    layer: int
    cache: Any = None


@takes_cache
def _block(
    block: Any,
    running: _Running,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRecurrentBlock.forward`, the convolution seeing the columns before these positions."""
    gate = block.act_fn(block.linear_y(input_states))
    columns = block.linear_x(input_states).transpose(1, 2)
    columns = cache.update_conv_state(columns, running.layer, conv_kernel_size=block.conv1d_width - 1)
    columns = summed_taps(columns, block.conv_1d.weight.squeeze(1), block.conv_1d.bias)
    with mock.patch.object(running, "cache", cache):
        hidden = block.rg_lru(columns.transpose(1, 2), position_ids)
    return block.linear_out(hidden * gate), None


def _linear_unit(
    running: _Running,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRglru._rnn_scan` over any number of positions.

    Args:
        running: where the state [B, W] f32 is; without a cache it starts from nothing.
        hidden_states, recurrent_gate: [B, S, W].
        reset: bool [B, S, 1], where the state is forgotten.
    """
    past = None if running.cache is None else running.cache.get_recurrent_state(running.layer)
    if past is None:
        past = hidden_states.new_zeros(hidden_states[:, 0].shape, dtype=torch.float32)
    decay = (recurrent_gate * ~reset).float()
    sequences = [swap_time(tensor) for tensor in (decay, hidden_states.float())]
    state, outputs = over_time(_step, [past], sequences)
    if running.cache is not None:
        running.cache.update_recurrent_state(state, running.layer)
    return swap_time(outputs).to(hidden_states.dtype), None


def _step(state: torch.Tensor, decay: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Everything [B, W]."""
    state = decay * state + x
    return state, state.clone()
