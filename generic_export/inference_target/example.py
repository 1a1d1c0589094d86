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
from generic_export.torch_graph.state import state_kept


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
        answered = call_example(model, args, kwargs or {})
        return ExampleRun.from_tensors(answered.call.tensors, answered.outputs, answered.output_names)


@dataclass(frozen=True)
class ExampleCall:
    """What a module was given, and what it answered.

    Attributes:
        call: the arguments.
        output_names, outputs: the tensors of the result, which share no memory with the module.
    """

    call: FlatCall
    output_names: tuple[str, ...]
    outputs: tuple[torch.Tensor, ...]


def call_example(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleCall:
    """Run the module on copies of its arguments, which a forward may write to; the module is left as it was.

    Raises:
        OptionError: the forward does not take such arguments.
        CaptureError: it returns something else than tensors.
    """
    call = FlatCall.of(model, args, kwargs)
    copied_args, copied_kwargs = call.arguments([tensor.clone() for tensor in call.tensors])
    with torch.no_grad(), state_kept(model):
        names, outputs = named_outputs(model(*copied_args, **copied_kwargs))
        return ExampleCall(call, names, tuple(output.clone() for output in outputs))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of any device as an array: bf16 widened to f32, quantised numbers as what they stand for."""
    plain = tensor.detach().cpu()
    plain = plain.dequantize() if plain.is_quantized else plain
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).contiguous().numpy()


__all__ = ["ExampleCall", "ExampleRun", "as_array", "call_example"]
