"""What `torch.jit.trace` makes of a method of a module: for who wants PyTorch's own graph beside ours.

In: a module, a method and its arguments. Out: a traced module, and the graph of that method in it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from generic_export.compat import JitGraph
from generic_export.errors import JitTraceError, OptionError, described
from generic_export.torch_graph.capture.quantised_modules import takes_quantised


def trace_of(
    module: nn.Module, fn_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.jit.ScriptModule:
    """Trace a method of a module; a module that is a script already is given back.

    Raises:
        JitTraceError: torch.jit.trace refuses the module, or the module refuses the arguments.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module
    what = f"{type(module).__name__}.{fn_name}"
    try:
        given = _positional(getattr(module, fn_name), _as_taken(module, args), kwargs)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of what Python decides: torch.export is asked for what is exported
            traced: torch.jit.ScriptModule = torch.jit.trace_module(module, {fn_name: given}, check_trace=False)
    except Exception as error:  # RuntimeError of the tracer, and whatever the user's code raises
        raise JitTraceError(
            f"{what}: torch.jit.trace failed: {described(error)}",
            "Use arguments that the method accepts (args=), and results that are tensors or nested tensors.",
        ) from error
    return traced


def graph_of(traced: torch.jit.ScriptModule, fn_name: str) -> JitGraph:
    """Return PyTorch's graph of one method of a traced module."""
    graph: JitGraph = getattr(traced, fn_name).graph
    return graph


def checked_trace(traced: torch.jit.ScriptModule, fn_name: str) -> torch.jit.ScriptModule:
    """Return a traced module that has such a method.

    Raises:
        OptionError: it is no traced module, or has no such method.
    """
    if not isinstance(traced, torch.jit.ScriptModule):
        raise OptionError(
            f"traced_module is a {type(traced).__name__}, not what torch.jit.trace returns.",
            "Arguments go in args=, and a module that is not traced needs no traced_module.",
        )
    if not hasattr(traced, fn_name):
        raise OptionError(
            f"the traced module has no method {fn_name!r}.",
            "Trace it with torch.jit.trace_module, which takes methods.",
        )
    return traced


def _as_taken(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return floats as the quantised tensors that an int8 module takes, on the grid of their own range."""
    if not takes_quantised(module):
        return args
    return tuple(
        torch.quantize_per_tensor_dynamic(value, torch.quint8, reduce_range=False)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_quantized
        else value
        for value in args
    )


def _positional(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call by position: torch.jit.trace takes them by position, or all by name."""
    if not kwargs:
        return args
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{', '.join(bound.kwargs)} must be passed by name")
    return bound.args


__all__ = ["checked_trace", "graph_of", "trace_of"]
