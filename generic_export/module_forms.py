"""What `export_model_to_nnef` takes in place of a plain f32 module: an `ExportedProgram`, a wrapped or a bfloat16 module.

Also encoders whose fast path skips padding, which captures do not take.

In: a program, or a module and an element type. Out: a module that can be captured, with its example and dynamic axes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from generic_export.compat import compiled_module, forward_hooks_of
from generic_export.errors import OptionError
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import AxisSymbol

_TYPES = (torch.float32, torch.float16)


@dataclass(frozen=True)
class ProgramCall:
    """A program as a module, and how it is called.

    Attributes:
        module: its graph.
        args, kwargs: of the example.
        dynamic_axes: those that the program has; equal ones, and bounds, as it has them.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_axes: Mapping[str, Mapping[int, AxisSymbol]]


def call_of(program: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ProgramCall:
    """Return a program as a module.

    Args:
        program: of torch.export.
        args, kwargs: an example; none takes the program's own.

    Raises:
        OptionError: there is no example.
    """
    if not args and not kwargs:
        if program.example_inputs is None:
            raise OptionError("the program has no example inputs.", "Pass args, or kwargs.")
        args, kwargs = program.example_inputs
    module = program.module(check_guards=False)
    call = FlatCall.of(module, args, kwargs)
    return ProgramCall(module, tuple(args), dict(kwargs), _axes_of(program, call))


def _axes_of(program: ExportedProgram, call: FlatCall) -> dict[str, dict[int, AxisSymbol]]:
    names = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    symbols: dict[sympy.Symbol, AxisSymbol] = {}
    found: dict[str, dict[int, AxisSymbol]] = {}
    for name, tensor in zip(call.names, tensors, strict=True):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                symbol = size.node.expr
                own = symbols.setdefault(symbol, _dim(f"{identifier(name)}_{axis}".upper(), program, symbol))
                found.setdefault(name, {})[axis] = own
    return found


def _dim(name: str, program: ExportedProgram, symbol: sympy.Symbol) -> AxisSymbol:
    """Return a symbol with the largest size that a program has for it; PyTorch's own smallest one (2) means nothing."""
    known = program.range_constraints.get(symbol)
    most = int(known.upper) if known is not None and known.upper.is_Integer else None
    return Dim(name) if most is None else Dim(name, max=most)


def unwrapped_module(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which compute what it computes.

    Its inputs and parameters have their own names, which a wrapper hides. A wrapper with hooks of its own stays.
    """
    inner = model.module if isinstance(model, _PARALLEL) else compiled_module(model)
    return model if inner is None or forward_hooks_of(model) else unwrapped_module(inner)


_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


# A module that computes in another element type for the length of a block: bfloat16, which tract does not have, as f32
# or f16.
# In: a module and example arguments. Out: the module with its floats cast, and the arguments likewise.
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


PADDING_SKIPPED = (
    "In eval mode nn.TransformerEncoder skips the positions that src_key_padding_mask leaves out, and returns 0 there; the archive "
    "computes them. Call torch.backends.mha.set_fastpath_enabled(False), or make the encoder with enable_nested_tensor=False, "
    "and PyTorch computes what the archive does. Or do not read those positions."
)


def skips_padding(model: nn.Module) -> bool:
    """Say whether a module has PyTorch's fast path for padded batches, which captures do not take."""
    return bool(_encoders_that_skip(model))


def _encoders_that_skip(model: nn.Module) -> list[nn.TransformerEncoder]:
    if not torch.backends.mha.get_fastpath_enabled():
        return []
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    return [encoder for encoder in encoders if encoder.enable_nested_tensor]


@contextmanager
def told_of_skipped_padding(model: nn.Module) -> Iterator[None]:
    """Warn where an encoder that skips padding is captured with a mask: an example without padding shows no difference."""
    masked: list[bool] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        masked.append((args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")) is not None)

    with ExitStack() as stack:
        for encoder in _encoders_that_skip(model):
            stack.callback(encoder.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield
    if any(masked):
        warnings.warn(PADDING_SKIPPED, stacklevel=4)


__all__ = ["ProgramCall", "call_of", "computing_in", "skips_padding", "told_of_skipped_padding", "unwrapped_module"]
