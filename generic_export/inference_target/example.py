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
        inputs: input arrays, in the order of the graph's inputs; a complex one is pairs, as in the archive.
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
        """Copy tensors of any device into arrays, see `as_array`."""
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

    def input_tensors(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return the inputs as the module took them, in the element types that it took them in."""
        return [as_tensor(array, dtype) for array, dtype in zip(self.inputs, dtypes, strict=True)]


class ExampleCall(list[Any]):
    """The positional arguments of a call, with its keyword arguments and what PyTorch answered, if it was asked already."""

    def __init__(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, example: ExampleRun | None = None
    ) -> None:
        super().__init__(args)
        self.kwargs = dict(kwargs or {})
        self.example = example


@dataclass(frozen=True)
class AnsweredCall:
    """What a module was given, and what it answered.

    Attributes:
        call: the arguments.
        output_names, outputs: the tensors of the result, which share no memory with the module.
    """

    call: FlatCall
    output_names: tuple[str, ...]
    outputs: tuple[torch.Tensor, ...]


def call_example(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnsweredCall:
    """Run the module on copies of its arguments, which a forward may write to; the module is left as it was.

    Raises:
        OptionError: the forward does not take such arguments.
        CaptureError: it returns something else than tensors.
    """
    call = FlatCall.of(model, args, kwargs)
    copied_args, copied_kwargs = call.arguments([tensor.clone() for tensor in call.tensors])
    with torch.no_grad(), state_kept(model):
        names, outputs = named_outputs(model(*copied_args, **copied_kwargs))
        return AnsweredCall(call, names, tuple(output.clone() for output in outputs))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of any device as an archive knows it.

    bf16 is widened to f32, quantised numbers are what they stand for, complex ones pairs on a last axis of 2.
    """
    plain = tensor.detach().cpu()
    plain = plain.dequantize() if plain.is_quantized else plain
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).contiguous().numpy()


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return what `as_array` took apart: pairs are complex numbers again."""
    tensor = torch.from_numpy(np.array(array))
    return (torch.view_as_complex(tensor) if dtype.is_complex else tensor).to(dtype)


__all__ = ["AnsweredCall", "ExampleCall", "ExampleRun", "as_array", "as_tensor", "call_example"]
