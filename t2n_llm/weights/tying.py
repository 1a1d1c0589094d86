"""Tied weights that a checkpoint contradicts: the config says that two parameters are one, the files hold two.

In: a model's source. Out: the source as transformers loads it: parameters of different values stay two, whatever the config says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import nn

from generic_export.weights.source import FileTensor, TensorSource
from generic_export.weights.values import value_pieces
from t2n_llm.source.empty_model import tied_names
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.names import match_parameters

_TIES = "tie_word_embeddings"
_PIECE = 1 << 20


def as_loaded(
    source: ModelSource, network: Callable[[ModelSource], nn.Module], tell: Callable[[str], None]
) -> ModelSource:
    """Return the source with a config that ties what transformers ties.

    transformers ties two that are both in the checkpoint only where they are equal (`PreTrainedModel.tie_weights`, 5.23).

    Args:
        source: the model.
        network: makes its transformers model without weights.
        tell: told what the config says wrongly.

    Raises:
        WeightError, CorruptCheckpointError: its weights cannot be opened or read.
    """
    configs = source.config, source.config.get_text_config(decoder=True)
    if not any(getattr(config, _TIES, False) for config in configs):
        return source
    model = network(source)
    tied = tied_names(model)
    tensors = match_parameters(model, source.checkpoint().tensors).tensors if tied else {}
    pair = next(_contradictions(tied, tensors), None)
    if pair is None:
        return source
    name, owner = pair
    tell(
        f"config.json ties {name} to {owner}, but the checkpoint has two tensors with different values: they "
        f"are exported separately, as transformers loads them. Set {_TIES}: false in the config."
    )
    config = copy.deepcopy(source.config)
    for each in (config, config.get_text_config(decoder=True)):
        setattr(each, _TIES, False)
    return replace(source, config=config)


def _contradictions(tied: Mapping[str, str], tensors: Mapping[str, TensorSource]) -> Iterator[tuple[str, str]]:
    """Yield the names of tied parameters that are two tensors of different values."""
    for name, owner in tied.items():
        if name in tensors and owner in tensors and not _equal(tensors[name], tensors[owner]):
            yield name, owner


def _equal(one: TensorSource, other: TensorSource) -> bool:
    if one.shape != other.shape:
        return False
    if isinstance(one, FileTensor) and isinstance(other, FileTensor) and _place(one) == _place(other):
        return True  # of a PyTorch file, which has both names for one storage
    return all(
        first is not None and second is not None and torch.equal(first.float(), second.float())
        for first, second in zip_longest(_pieces(one), _pieces(other))
    )


def _place(tensor: FileTensor) -> tuple[object, ...]:
    return tensor.path, tensor.offset, tensor.dtype


def _pieces(source: TensorSource) -> Iterator[torch.Tensor]:
    """Yield the values in pieces that are equally long for any two sources of one shape."""
    rest = torch.empty(0)
    for piece in value_pieces(source):
        rest = torch.cat([rest.to(piece.dtype), piece]) if len(rest) else piece
        while len(rest) >= _PIECE:
            yield rest[:_PIECE]
            rest = rest[_PIECE:]
    if len(rest):
        yield rest


__all__ = ["as_loaded"]
