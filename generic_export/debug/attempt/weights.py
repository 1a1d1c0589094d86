"""The numbers of a piece: made up where there are none, and widened for a second opinion on PyTorch's own rounding.

In: a module, which is changed (in a worker process, that is nobody else's). Out: the same module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from generic_export.compat import buffers_of


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Let a module compute in float64 for a block; its own tensors are put back after it."""
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    buffers = [(inner, name, buffer) for inner in module.modules() for name, buffer in buffers_of(inner).items()]
    try:
        module.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for inner, name, buffer in buffers:
            buffers_of(inner)[name] = buffer


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def fill_with_random(module: nn.Module) -> None:
    """Give a module on the meta device random weights of the usual size."""
    was_meta = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta}
    values = {name: tensor for name, tensor in module.named_buffers() if not tensor.is_meta}
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in values:
            tensor.copy_(values[name])
        elif name in was_meta:
            fan_in = tensor.shape[-1] if tensor.ndim > 1 else 1
            fresh = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) / fan_in**0.5
            tensor.data.copy_(fresh if tensor.ndim > 1 else 1.0 + 0.1 * fresh)


__all__ = ["fill_with_random", "in_float64", "random_like"]
