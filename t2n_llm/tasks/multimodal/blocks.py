"""Sound encoders whose layers attend within blocks of a recording (Granite Speech), in one expression for all lengths.

transformers fills up and masks the last block in a branch, if the length is not a multiple of a block. Here it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import pad

_MARKS = ("context_size", "rel_pos_emb", "to_kv")


@contextmanager
def blocks_filled_up(network: Any) -> Iterator[None]:
    """Let the layers of a sound encoder attend within filled up blocks, for the length of the block.

    Args:
        network: transformers' model, which reads one recording at a time.
    """
    kinds = {type(each) for each in network.modules() if all(hasattr(each, mark) for mark in _MARKS)}
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "forward", _attend))
        yield


def _attend(layer: Any, hidden_states: torch.Tensor, attention_dists: torch.Tensor) -> torch.Tensor:
    """Do for one recording [1, T, D] what the layer's own `forward` does."""
    count, size = hidden_states.shape[1], layer.context_size
    blocks = (count + size - 1) // size
    filled = pad(layer.pre_norm(hidden_states), (0, 0, 0, blocks * size - count))

    def cut(states: torch.Tensor) -> torch.Tensor:
        return states.reshape(blocks, size, layer.num_heads, -1).transpose(1, 2)

    query, key, value = map(cut, (layer.to_q(filled), *layer.to_kv(filled).chunk(2, dim=-1)))
    distances = torch.einsum("bhcd,crd->bhcr", query, layer.rel_pos_emb(attention_dists))
    scores = (query @ key.transpose(-1, -2) + distances) * layer.scale
    beyond = torch.arange(blocks * size, device=scores.device).reshape(blocks, 1, 1, size) >= count
    weights = scores.masked_fill(beyond, torch.finfo(scores.dtype).min).softmax(dim=-1)
    heard = (weights @ value).transpose(1, 2).reshape(1, blocks * size, -1)
    result: torch.Tensor = layer.to_out(heard[:, :count])
    return result


__all__ = ["blocks_filled_up"]
