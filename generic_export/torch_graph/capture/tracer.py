"""`TorchModuleTracer`: an `nn.Module` and example arguments in, a `TorchModuleIRGraph` of torch.export out.

The capture runs on fake tensors with symbolic sizes, so meta modules work and no weight is read. Results bear provisional names
here (`%linear_3.0`); `naming.name_results` gives them those that people read. The graph of `torch.jit.trace` is for comparison.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from generic_export.compat import JitGraph, OpOverload
from generic_export.errors import JitTraceError, OptionError, described
from generic_export.torch_graph.capture.module_capture import capture_functional, capture_graph
from generic_export.torch_graph.capture.quantised_modules import takes_quantised
from generic_export.torch_graph.capture.whole_sizes import with_whole_sizes
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.methods import as_forward
from generic_export.torch_graph.request import CaptureRequest, DynamicAxes


@dataclass(frozen=True, init=False)
class TorchModuleTracer(CaptureRequest):
    """Captures a module with `torch.export`, as it was asked for; `traced_module` is what `torch.jit.trace` makes of it.

    Args:
        module, args, kwargs, input_names, output_names, dynamic_axes, strip_prefix, keep, whole, conditional: see
            `CaptureRequest`.
        traced_module: a trace of the module that there is already; None traces it when `traced_module` is read.
        fn_name: the method that is captured; other ones than `forward` become the forward of `self.module`.

    Attributes:
        mod: the module as it was given.

    Raises:
        OptionError: there is no such method, or the trace is none.
    """

    mod: nn.Module = field(init=False, repr=False)
    fn_name: str = field(init=False)

    def __init__(
        self,
        module: nn.Module,
        traced_module: torch.jit.ScriptModule | None = None,
        fn_name: str = "forward",
        args: tuple[Any, ...] | torch.Tensor | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        strip_prefix: str = "",
        keep: Callable[[OpOverload], bool] | None = None,
        whole: Collection[type[nn.Module]] = (),
        conditional: bool = False,
    ) -> None:
        super().__init__(
            module=as_forward(module, fn_name),
            args=(args,) if isinstance(args, torch.Tensor) else tuple(args or ()),
            kwargs=dict(kwargs or {}),
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes or {},
            strip_prefix=strip_prefix,
            keep=keep,
            whole=whole,
            conditional=conditional,
        )
        vars(self).update(mod=module, fn_name=fn_name)
        if traced_module is not None:
            vars(self)["traced_module"] = checked_trace(traced_module, fn_name)

    @cached_property
    def traced_module(self) -> torch.jit.ScriptModule:
        """The module as `torch.jit.trace` sees it on the example arguments; traced once, when it is first read.

        Raises:
            JitTraceError: it cannot be traced.
        """
        return trace_of(self.mod, self.fn_name, self.args, self.kwargs)

    @property
    def torch_graph(self) -> JitGraph:
        """PyTorch's own graph of that trace: of `fn_name`, which need not be the forward.

        Raises:
            JitTraceError: it cannot be traced.
        """
        return graph_of(self.traced_module, self.fn_name)

    def trace(self) -> TorchModuleIRGraph:
        """Run torch.export and convert its graph.

        Raises:
            CaptureError: torch.export failed; the message carries its reason and the user's source line.
            SpecializedAxisError: a dynamic axis was frozen to one size by the model.
            OptionError: `input_names` or `dynamic_axes` do not match the arguments.
        """
        return with_whole_sizes(partial(capture_graph, self))

    def program(self) -> ExportedProgram:
        """Run torch.export alone; nothing is decomposed (`keep`) or converted.

        Raises:
            CaptureError, SpecializedAxisError, OptionError: as for `trace`.
        """
        return with_whole_sizes(partial(capture_functional, self))


# --- torch.jit.trace ----------------------------------------------------------------------------------


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


__all__ = ["TorchModuleTracer"]
