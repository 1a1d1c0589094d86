"""A module that computes in another element type for the length of a block: bfloat16, which tract does not have, as f32 or f16.

In: a module and example arguments. Out: the module with its floats cast, and the arguments likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from generic_export.errors import OptionError
from generic_export.torch_graph.nested import FlatCall

_TYPES = (torch.float32, torch.float16)


@contextmanager
def computing_in(
    dtype: torch.dtype | None, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cast what a module computes with, and yield its arguments cast; afterwards its tensors are what they were, bit for bit.

    Args:
        dtype: f32 or f16, that parameters, buffers and arguments of floats get; None casts nothing.
        model: the module.
        args, kwargs: example arguments.

    Raises:
        OptionError: another element type.
    """
    if dtype is None:
        yield args, dict(kwargs)
        return
    if dtype not in _TYPES:
        raise OptionError(f"dtype is {dtype}.", "Use torch.float32 or torch.float16; tract computes in these.")
    call = FlatCall.of(model, args, kwargs)
    cast_args, cast_kwargs = call.arguments([_cast(tensor, dtype) for tensor in call.tensors])
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    kept = [(tensor, tensor.data) for tensor in tensors.values() if tensor.dtype.is_floating_point]
    try:
        for tensor, data in kept:
            tensor.data = _cast(data, dtype)
        yield tuple(cast_args), cast_kwargs
    finally:
        for tensor, data in kept:
            tensor.data = data


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


__all__ = ["computing_in"]
