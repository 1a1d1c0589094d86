"""`ExampleRun`: what PyTorch answers on example inputs, as arrays that an engine's answer is compared with.

In: a module and the arguments of one call. Out: flat inputs and outputs, in the order of the graph's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.torch_graph.nested import FlatCall, named_outputs


@dataclass(frozen=True)
class ExampleRun:
    """One run of the PyTorch module, to compare an engine with.

    Attributes:
        inputs: input arrays, in the order of the graph's inputs.
        outputs: what PyTorch answered, in the order of the graph's outputs.
        output_names: names of the outputs, for messages.
    """

    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    output_names: Sequence[str]

    @staticmethod
    def from_tensors(
        inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], output_names: Sequence[str]
    ) -> ExampleRun:
        """Copy tensors of any device into arrays (bf16 widened to f32)."""
        return ExampleRun([as_array(t) for t in inputs], [as_array(t) for t in outputs], tuple(output_names))

    @staticmethod
    def of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> ExampleRun:
        """Run a module as it is and keep what went in and what came out.

        Raises:
            OptionError: the forward does not take such arguments.
            CaptureError: it returns something else than tensors.
        """
        call, result = call_example(model, args, kwargs or {})
        names, outputs = named_outputs(result)
        return ExampleRun.from_tensors(call.tensors, outputs, names)


def call_example(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FlatCall, Any]:
    """Run the module on copies of its arguments, which a forward may write to."""
    call = FlatCall.of(model, args, kwargs)
    copied_args, copied_kwargs = call.arguments([tensor.clone() for tensor in call.tensors])
    with torch.no_grad():
        return call, model(*copied_args, **copied_kwargs)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of any device as an array: bf16 widened to f32, quantised numbers as what they stand for."""
    plain = tensor.detach().cpu()
    plain = plain.dequantize() if plain.is_quantized else plain
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).contiguous().numpy()


__all__ = ["ExampleRun", "as_array", "call_example"]
