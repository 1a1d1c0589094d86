"""A model with the values that a calibration stores, and how far it is from another one."""

from __future__ import annotations

from typing import Any

import torch

from generic_export.weights.values import read_tensor
from quant.packing import unpack_q4_0
from t2n_llm.compress.result import CalibrationResult


def with_stored_values(model: Any, result: CalibrationResult) -> Any:
    """Return the model, in which quantised and folded tensors are now what the result stores."""
    state = model.state_dict()
    for name, source in result.packed.items():
        state[name].copy_(unpack_q4_0(read_tensor(source)).dequantize())
    for name, source in result.changed.items():
        state[name].copy_(read_tensor(source))
    return model


def mean_divergence(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the mean KL divergence of two sets of logits [..., vocab]."""
    ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())
