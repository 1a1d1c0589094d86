"""When torch.export cannot capture a module: through TorchScript, by scripting if that works, else by tracing.

In: a module, example arguments and the error. Out: what to capture instead; or a refusal, when a trace would freeze an axis that
was declared dynamic. The user is told which was used and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.compat import TracerWarning
from generic_export.errors import CaptureAttempt, CaptureError, SpecializedAxisError, described
from generic_export.torch_graph.capture.example_numbers import example_numbers
from generic_export.torch_graph.nested import FlatCall, flat_forward, named_outputs, resize_example, signature_of
from generic_export.torch_graph.request import AxisSymbol, DynamicAxes, size_near, symbol_name
from generic_export.torch_graph.state import buffers_kept, state_kept
from generic_export.torchscript.module import interpreted

SCRIPT, TRACE, ITSELF = "torch.jit.script", "torch.jit.trace", "PyTorch"

_Resized = Callable[[int], int]
# Other sizes at which a trace is compared with its module; the module may refuse some of them.
_OTHER_SIZES: tuple[_Resized, ...] = (
    lambda n: 2 * n,
    lambda n: n + 1,
    lambda n: 3 * n,
    lambda n: 2 * n + 1,
    lambda n: n // 2,
)


@dataclass(frozen=True)
class CaptureFallback:
    """What is captured instead of a module, and how.

    Attributes:
        how: `torch.jit.script` or `torch.jit.trace`.
        module: takes the tensors of the call, in order, and returns those of the result; or the module itself.
        args, kwargs: what it takes.
        input_names, output_names: what the module calls them.
        caution: what is different from capturing the module itself ("" for nothing).
        during: entered while it is captured.
    """

    how: str
    module: nn.Module
    args: tuple[Any, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    caution: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    during: Callable[[], AbstractContextManager[None]] = nullcontext


class Around(nn.Module):
    """A module that only puts arguments and results of another one together; scripted, it is itself around the other's script."""

    def scripted(self) -> nn.Module | None:
        """Return it around the script of the other one; None where that has none."""
        raise NotImplementedError


def capture_fallbacks(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_axes: DynamicAxes,
    input_names: Sequence[str] | None = None,
    note: Callable[[CaptureAttempt], None] = lambda attempt: None,
) -> Iterator[CaptureFallback]:
    """Yield what may be captured instead of a module, best first: its script, which keeps every decision, then its trace.

    Args:
        model: a module, in eval mode, that torch.export cannot capture.
        args, kwargs: example arguments.
        dynamic_axes: axes that must not be frozen.
        input_names: names that `dynamic_axes` speaks of; None for the forward's own.
        note: called with what each way that gives nothing met.

    Raises:
        SpecializedAxisError: tracing would freeze a dynamic axis.
    """
    call = FlatCall.of(model, args, kwargs)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *call.tensors)):
        return  # without values there is nothing to compare a trace with
    with torch.no_grad(), state_kept(model):
        positional, keywords = call.arguments([tensor.clone() for tensor in call.tensors])
        try:
            names, _ = named_outputs(model(*positional, **keywords))
        except Exception as error:  # the forward is the user's; without a result there is nothing to stand in for
            note(CaptureAttempt(ITSELF, described(error)))
            return
    scripted = model.scripted() if isinstance(model, Around) else _script_called_so(model, args, kwargs, note)
    if scripted is not None:
        yield CaptureFallback(SCRIPT, scripted, call.tensors, call.names, names)
    traced, lines = _traced(model, call, note)
    if traced is None:
        return
    inputs = tuple(input_names or call.names)
    try:
        _check_other_sizes(model, traced, call, dynamic_axes, inputs)
        if not lines and not _sees_its_inputs(model, traced, call):  # what the tracer warned of is told
            note(CaptureAttempt(TRACE, "the trace contains values of the example"))
            return
    except SpecializedAxisError as frozen:
        note(CaptureAttempt(TRACE, frozen.message))
        yield from _with_numbers(model, call, args, kwargs, names, inputs, dynamic_axes)
        raise frozen
    yield CaptureFallback(TRACE, interpreted(traced), call.tensors, call.names, names, _caution(lines))
    yield from _with_numbers(model, call, args, kwargs, names, inputs, dynamic_axes)


def _with_numbers(
    model: nn.Module,
    call: FlatCall,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output_names: tuple[str, ...],
    inputs: tuple[str, ...],
    dynamic_axes: DynamicAxes,
) -> Iterator[CaptureFallback]:
    """Yield the module itself where it reads numbers from tensors, which are then those of the example."""
    numbers = example_numbers(model, call, inputs, dynamic_axes)
    if numbers is not None:
        how = "torch.export with the example's values for numbers that are read from tensors"
        yield CaptureFallback(how, model, tuple(args), call.names, output_names, numbers.caution, kwargs, numbers.given)


def _script_called_so(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], note: Callable[[CaptureAttempt], None]
) -> nn.Module | None:
    """Return the script of a module whose arguments, keywords included, are in the order of its signature; None otherwise."""
    named = (*list(signature_of(model).parameters)[: len(args)], *kwargs)
    in_order = named == tuple(signature_of(model).parameters)[: len(named)]
    if in_order:
        return script_of(model, args, kwargs, note)
    note(CaptureAttempt(SCRIPT, "arguments are not in the order of the signature"))
    return None


def script_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    note: Callable[[CaptureAttempt], None] = lambda attempt: None,
) -> nn.Module | None:
    """Return a module's script as a plain module; None where the compiler does not know it, or arguments are no tensors."""
    if not all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        note(CaptureAttempt(SCRIPT, "arguments are not all tensors"))
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script: torch.jit.ScriptModule = torch.jit.script(model)
    except Exception as error:  # the compiler raises many classes, for whatever it does not know
        note(CaptureAttempt(SCRIPT, described(error)))
        return None
    return interpreted(script)


def _traced(
    model: nn.Module, call: FlatCall, note: Callable[[CaptureAttempt], None]
) -> tuple[torch.jit.ScriptModule | None, list[str]]:
    """Trace a module with flat tensors; returns None when that fails, and the lines that the tracer warns of."""
    copies = tuple(tensor.clone() for tensor in call.tensors)
    with _recorded_warnings() as told, torch.no_grad(), buffers_kept(model), flat_forward(model, call):
        try:
            traced = torch.jit.trace(model, copies, check_trace=False)
        except Exception as error:  # user code again
            note(CaptureAttempt(TRACE, described(error)))
            return None, []
    return traced, sorted({f"{Path(w.filename).name}:{w.lineno}" for w in told if _is_tracers(w)})


@contextmanager
def _recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told


def _is_tracers(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, TracerWarning)


def _caution(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"What Python decides at {', '.join(lines)} is fixed to the example's outcome."


def _sees_its_inputs(model: nn.Module, traced: nn.Module, call: FlatCall) -> bool:
    """Say whether a trace answers like its module when the example's values change places: none of them may be in the trace."""
    tensors = [tensor.flip(tuple(range(tensor.ndim))) for tensor in call.tensors]
    expected = _results(model, *call.arguments([tensor.clone() for tensor in tensors]))
    if expected is None:
        return True
    try:
        with torch.no_grad(), buffers_kept(model):
            answered = named_outputs(traced(*tensors))[1]
    except Exception:  # a decision that other values contradict
        return False
    return len(expected) == len(answered) and all(map(_alike, expected, answered))


def _check_other_sizes(
    model: nn.Module, traced: nn.Module, call: FlatCall, dynamic_axes: DynamicAxes, names: Sequence[str]
) -> None:
    """Compare a trace with its module at sizes that it was not traced with.

    Raises:
        SpecializedAxisError: they differ, or the module runs at no other size, so that nothing is known.
    """
    if not dynamic_axes:
        return
    compared = 0
    for resized in (*_OTHER_SIZES, _one):
        tensors = [_at_sizes(t, dynamic_axes.get(n, {}), resized) for n, t in zip(names, call.tensors, strict=True)]
        expected = _results(model, *call.arguments([tensor.clone() for tensor in tensors]))
        if expected is None:
            continue
        compared += resized is not _one  # what has one position goes with everything
        answered = _results(traced, tensors, {})
        if answered is None or not all(map(_alike, expected, answered)):
            raise _frozen_by_trace(model, dynamic_axes, "the trace differs from the module at other sizes")
    if not compared:
        raise _frozen_by_trace(model, dynamic_axes, "the module does not run at any other size that was tried")


def _one(size: int) -> int:
    """Return the size that PyTorch broadcasts."""
    return 1


def _frozen_by_trace(model: nn.Module, dynamic_axes: DynamicAxes, reason: str) -> SpecializedAxisError:
    symbols = ", ".join(sorted({symbol_name(symbol) for axes in dynamic_axes.values() for symbol in axes.values()}))
    return SpecializedAxisError(
        f"specializes {symbols}: {reason}.", f"Or make {symbols} static: then the module is traced."
    )


def _at_sizes(tensor: torch.Tensor, axes: Mapping[int, AxisSymbol], resized: _Resized) -> torch.Tensor:
    sizes = enumerate(tensor.shape)
    return resize_example(
        tensor, [size_near(axes[axis], max(resized(max(size, 1)), 1)) if axis in axes else size for axis, size in sizes]
    )


def _results(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    try:
        with torch.no_grad(), state_kept(module):
            return tuple(output.clone() for output in named_outputs(module(*args, **kwargs))[1])
    except CaptureError:
        raise
    except Exception:  # whatever the module raises at a size that it does not take
        return None


def _alike(expected: torch.Tensor, answered: torch.Tensor) -> bool:
    if expected.shape != answered.shape or expected.dtype is not answered.dtype:
        return False
    return torch.allclose(expected, answered, rtol=1e-4, atol=1e-5, equal_nan=True)


__all__ = ["ITSELF", "Around", "CaptureFallback", "capture_fallbacks", "script_of"]
