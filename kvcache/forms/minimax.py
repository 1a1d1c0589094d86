"""MiniMax: lightning attention keeps its state in a `MiniMaxCache` beside the keys and values of the other layers.

(Qin et al. 2024: linear attention with one fixed decay per head.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from kvcache.compat import cache_in, cache_keyword, takes_cache
from kvcache.forms.cache import CacheConversation, positions
from kvcache.forms.form import StateForm
from kvcache.recurrent import LastRead
from kvcache.recurrent.loop import over_time
from kvcache.states.tensors import Slot, States

_KIND = "recurrent_state"


class MiniMaxForm(StateForm):
    """See `kvcache.forms.StateForm`."""

    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """See `StateForm.keywords`; every layer is handed its states."""
        from kvcache.states.explicit_cache import put_states

        cache = sys.modules[type(model).__module__].MiniMaxCache()
        growing = {slot: tensor for slot, tensor in (past or {}).items() if slot.grows}
        put_states(cache, growing)
        for slot, tensor in (past or {}).items():
            if not slot.grows:
                cache.set_linear_cache(slot.layer, tensor)
        before = max((tensor.shape[2] for tensor in growing.values()), default=0)
        places = positions(inputs["input_ids"], before)
        return inputs | {cache_keyword(model.forward): cache, "position_ids": places, "use_cache": True}

    @contextmanager
    def replacements(self, module: nn.Module, last_read: LastRead) -> Iterator[None]:
        """See `StateForm.replacements`."""
        with over_any_length(module):
            yield

    def states(self, keywords: dict[str, Any]) -> States:
        """See `StateForm.states`."""
        return _states_of(cache_in(keywords))

    def conversation(self, model: nn.Module, *, windowed: bool) -> MiniMaxConversation:
        """See `StateForm.conversation`; there is no window."""
        return MiniMaxConversation(model, windowed)


@contextmanager
def over_any_length(module: nn.Module) -> Iterator[None]:
    """Let lightning attention go over positions in a loop of the graph, not over blocks of them, for the length of the block."""
    kinds = {type(part) for part in module.modules() if type(part).__name__ == "MiniMaxLightningAttention"}
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "forward", lightning_attention))
        yield


class MiniMaxConversation(CacheConversation):
    """MiniMax with transformers' own cache, positions given as `generate()` does."""

    def _own_cache(self, windowed: bool) -> Any:
        return sys.modules[type(self._model).__module__].MiniMaxCache()

    def states(self) -> States:
        """See `Conversation.states`."""
        return _states_of(self._cache)


def _states_of(cache: Any) -> States:
    from kvcache.states.explicit_cache import states_of

    linear = enumerate(cache.linear_cache)
    found = states_of(cache)
    found |= {Slot(_KIND, layer): state for layer, state in linear if isinstance(state, torch.Tensor)}
    return dict(sorted(found.items(), key=lambda item: item[0].layer))


@takes_cache
def lightning_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor | None,
    cache: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`MiniMaxLightningAttention.forward` over any number of positions, which it does not read.

    In: `attention_mask` [B, S], 0 where there is padding.
    """
    batch, steps, _width = hidden_states.shape
    heads, size = self.num_attention_heads, self.head_dim
    mixed = self.act_fn(self.qkv_proj(hidden_states)).reshape(batch, steps, heads, 3 * size)
    query, key, value = (part.float().transpose(0, 1) for part in mixed.split(size, dim=3))
    if attention_mask is not None:
        value = value.masked_fill(attention_mask.transpose(0, 1)[:, :, None, None] == 0, 0.0)
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    if not isinstance(state, torch.Tensor):
        state = query.new_zeros((batch, heads, size, size))
    state, outputs = over_time(_step, [state.float()], [query, key, value], [torch.exp(-self.slope_rate.float())])
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    result = self.norm(outputs.transpose(0, 1).reshape(batch, steps, heads * size).to(hidden_states.dtype))
    return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * result), state


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor
) -> Sequence[torch.Tensor]:
    """state [B, H, K, V]; q and k [B, H, K]; v [B, H, V]; decay [H, 1, 1]."""
    state = decay * state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return state, (q.unsqueeze(-1) * state).sum(dim=-2)
