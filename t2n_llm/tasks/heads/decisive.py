"""Values of small buffers that a model's code decides by: those of the checkpoint, or the model's own where it saves none.

In: a network, the buffers that were taken from it, its source. Out: values by name, for `generic_export`'s `decided_by`. EoMT has
in a buffer which of its layers mask: 1 in a new model, 0 once it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from generic_export.errors import WeightError
from generic_export.torch_graph.capture.known_buffers import MOST_VALUES
from generic_export.weights.values import read_tensor
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.names import match_parameters


def decisive_values(
    network: nn.Module, buffers: Mapping[str, torch.Tensor], source: ModelSource | None
) -> dict[str, torch.Tensor]:
    """Return the values of a network's small buffers.

    Args:
        network: on the meta device.
        buffers: the values that it computes itself.
        source: has the saved ones; None, or a source without weights, leaves the network's own.
    """
    found = {name: value for name, value in buffers.items() if value.numel() <= MOST_VALUES}
    saved = found.keys() & network.state_dict().keys()
    return found | (_stored(network, source, saved) if saved and source is not None else {})


def _stored(network: nn.Module, source: ModelSource, names: set[str]) -> dict[str, torch.Tensor]:
    try:
        checkpoint = source.checkpoint()
    except WeightError:  # a config alone
        return {}
    tensors = match_parameters(network, checkpoint.tensors).tensors
    own = network.state_dict()
    return {name: read_tensor(tensors[name], own[name].dtype) for name in sorted(names & tensors.keys())}


__all__ = ["decisive_values"]
