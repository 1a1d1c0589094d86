"""xLSTM: the states of each layer's mLSTM are tuples in an `xLSTMCache`: matrix, normaliser and exponent.

(Beck et al. 2024, section 2.3.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from kvcache.compat import cache_in, cache_keyword, cache_of
from kvcache.forms.form import StateForm
from kvcache.recurrent import LastRead
from kvcache.recurrent.loop import over_time
from kvcache.states.tensors import Slot, States

_KIND = "recurrent_state"
_PARTS = 3
_CHUNK = "max_inference_chunksize"


class XlstmForm(StateForm):
    """See `kvcache.forms.StateForm`."""

    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """See `StateForm.keywords`; every layer is handed its states."""
        config: Any = model.config
        states = _no_states(model, inputs["input_ids"].shape[0]) if past is None else past
        layers = {
            layer: tuple(StateCell(states[Slot(_KIND, layer, index)]) for index in range(_PARTS))
            for layer in range(config.num_hidden_layers)
        }
        return inputs | {cache_keyword(model.forward): Cells(layers), "use_cache": True}

    @contextmanager
    def replacements(self, module: nn.Module, last_read: LastRead) -> Iterator[None]:
        """See `StateForm.replacements`."""
        parts: list[Any] = list(module.modules())
        configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        with ExitStack() as stack:
            for kind in {type(part) for part in parts if type(part).__name__ == "xLSTMBackend"}:
                stack.enter_context(mock.patch.object(kind, "forward", matrix_memory))
            for config in (config for config in configs.values() if hasattr(config, _CHUNK)):
                # Longer inputs would be taken in pieces, a Python loop over a size that is not known.
                stack.enter_context(mock.patch.object(config, _CHUNK, sys.maxsize))
            yield

    def states(self, keywords: dict[str, Any]) -> States:
        """See `StateForm.states`."""
        layers = cache_in(keywords).rnn_state
        return {
            Slot(_KIND, layer, index): cell.tensor
            for layer, cells in layers.items()
            for index, cell in enumerate(cells)
        }

    def conversation(self, model: nn.Module, *, windowed: bool) -> XlstmConversation:
        """See `StateForm.conversation`; there is no window."""
        return XlstmConversation(model)


class XlstmConversation:
    """xLSTM with transformers' own cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache: Any = None

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `Conversation.answer`; logits of all positions, the model gives no fewer."""
        result = self._model(input_ids=ids, **{cache_keyword(self._model.forward): self._cache}, use_cache=True)
        self._cache = cache_of(result)
        logits: torch.Tensor = result.logits
        return logits

    def states(self) -> States:
        """See `Conversation.states`."""
        layers: dict[int, Sequence[torch.Tensor]] = {} if self._cache is None else self._cache.rnn_state
        return {
            Slot(_KIND, layer, index): tensor for layer, parts in layers.items() for index, tensor in enumerate(parts)
        }


class StateCell:
    """A state that the model writes with `copy_`: the new tensor takes the old one's place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def copy_(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class Cells:
    """Stands for an `xLSTMCache`.

    Attributes:
        rnn_state: the three cells of each layer.
        seqlen_offset: counted by the model, read by nobody.
    """

    rnn_state: dict[int, tuple[StateCell, ...]]
    seqlen_offset: int = 0


def _no_states(model: nn.Module, batch: int) -> States:
    config: Any = model.config
    device = next(model.parameters()).device
    heads, key, value = config.num_heads, config.qk_head_dim, config.v_head_dim
    shapes = ((batch, heads, key, value), (batch, heads, key), (batch, heads, 1))
    return {
        Slot(_KIND, layer, index): torch.zeros(shape, dtype=torch.float32, device=device)
        for layer in range(config.num_hidden_layers)
        for index, shape in enumerate(shapes)
    }


def matrix_memory(
    backend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    c_initial: StateCell,
    n_initial: StateCell,
    m_initial: StateCell,
    **_: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run the mLSTM over any number of positions, as `xLSTMBackend.forward` of transformers.

    Args:
        backend: the module, for its epsilon.
        query, key: [B, H, S, K].
        value: [B, H, S, V].
        igate, fgate: [B, H, S], before their activation.
        c_initial, n_initial, m_initial: the states [B, H, K, V], [B, H, K] and [B, H, 1].

    Returns:
        [B, H, S, V], and the states.
    """
    scale = query.shape[-1] ** -0.5
    gates = (igate.float(), functional.logsigmoid(fgate.float()))
    rows = (query.float() * scale, key.float(), value.float())
    sequences = [tensor.movedim(2, 0) for tensor in (*rows, *(gate.unsqueeze(-1) for gate in gates))]
    states = [cell.tensor.float() for cell in (c_initial, n_initial, m_initial)]
    *after, numerator, denominator = over_time(_step, states, sequences)
    result = numerator / (denominator + backend.config.eps)
    return result.movedim(0, 2).to(query.dtype), tuple(after)


def _step(
    memory: torch.Tensor,
    norm: torch.Tensor,
    exponent: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    enter: torch.Tensor,
    forget: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """memory [B, H, K, V]; norm, q and k [B, H, K]; v [B, H, V]; exponent and gates [B, H, 1]."""
    decayed = forget + exponent
    top = torch.maximum(decayed, enter)
    old, new = torch.exp(decayed - top), torch.exp(enter - top)
    memory = old.unsqueeze(-1) * memory + (new * k).unsqueeze(-1) * v.unsqueeze(-2)
    norm = old * norm + new * k
    numerator = (q.unsqueeze(-1) * memory).sum(dim=-2)
    denominator = torch.maximum((q * norm).sum(dim=-1, keepdim=True).abs(), torch.exp(-top))
    return memory, norm, top, numerator, denominator
