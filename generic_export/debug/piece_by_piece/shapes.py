"""Sizes: which axes of a value move between calls, and from which sizes of the inputs those of an output follow.

In: values or shapes, call by call. Out: dynamic axes in the nest of a value; functions that make a tensor of an output's shape.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from generic_export.compat import pytree
from generic_export.debug.record.axes import Form, Symbols
from generic_export.debug.record.leaves import take_apart
from generic_export.errors import CaptureError

_NESTS = (list, tuple, dict)
_INDEX = "_output_index"

ShapeFunction = Callable[..., Any]
"""`fct(_output_index, *args, **kwargs)`: a tensor like that output, its sizes, or None where they are to be learnt. A function
without `_output_index` is called with the input tensors once, and gives all outputs (or the only one)."""

ShapeFunctions = Mapping[str, ShapeFunction]
"""By class of a module, or name of its operator."""


# --- axes that move ---------------------------------------------------------------------------------


def moving_axes(values: Sequence[Any], where: str) -> Any:
    """Return the dynamic axes of one value, seen once per call, in the nest of the value.

    Raises:
        CaptureError: the value has another type, rank, length or keys in some call.
    """
    flat = [pytree.tree_flatten(value, lambda inner: not isinstance(inner, _NESTS)) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        raise CaptureError(f"{where}: a value has another type, length or keys in some calls.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_moving(column, where) for column in columns], flat[0][1])


def moving_arguments(
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], of_values: Callable[..., Any], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the dynamic axes of the positional and of the keyword arguments of some calls.

    Raises:
        CaptureError: there is no call, or the calls have other arguments.
    """
    if not calls:
        raise CaptureError(f"{where} was not called.")
    if len({(len(args), *sorted(kwargs)) for args, kwargs in calls}) != 1:
        raise CaptureError(f"{where} was called with other arguments in some calls.")
    first_args, first_kwargs = calls[0]
    positional = tuple(of_values(*(args[index] for args, _ in calls)) for index in range(len(first_args)))
    return positional, {name: of_values(*(kwargs[name] for _, kwargs in calls)) for name in first_kwargs}


def _moving(values: Sequence[Any], where: str) -> Any:
    """Return the dynamic axes of a value that is no nest."""
    kinds = {f"tensor of {v.ndim} axes" if isinstance(v, torch.Tensor) else type(v).__name__ for v in values}
    if len(kinds) != 1:
        raise CaptureError(f"{where}: a value is {', '.join(sorted(kinds))} in different calls.")
    if isinstance(values[0], torch.Tensor):
        return _axes([tuple(value.shape) for value in values])
    tensors = [list(take_apart([("state", value)], keep_states=False)[1].tensors.values()) for value in values]
    if not any(tensors):
        return None
    if len({len(found) for found in tensors}) != 1:
        raise CaptureError(f"{where}: a state has another number of tensors in some calls.")
    return [_axes([tuple(tensor.shape) for tensor in column]) for column in zip(*tensors, strict=True)]


def _axes(shapes: Sequence[tuple[int, ...]]) -> dict[int, Any]:
    columns = enumerate(zip(*shapes, strict=True))
    return {axis: Dim.DYNAMIC for axis, sizes in columns if len(set(sizes)) > 1 or set(sizes) == {0}}


# --- shapes of outputs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputShape:
    """What the shape of one output follows from.

    Attributes:
        like: number of the input that has the same shape and element type in every call; None when none has.
        forms: each size in symbols.
        origins: for each of the symbols, an input and an axis that have its size.
        dtype: element type.
    """

    like: int | None
    forms: tuple[Form, ...]
    origins: Mapping[str, tuple[int, int]]
    dtype: torch.dtype

    @property
    def sources(self) -> int | tuple[int, ...]:
        """The input of that shape, or the inputs that its sizes come from."""
        return tuple(sorted({number for number, _ in self.origins.values()})) if self.like is None else self.like

    def made(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that shape for other inputs, symbolic sizes included."""
        if self.like is not None:
            return torch.empty_like(inputs[self.like])
        known: dict[str, Any] = {name: inputs[number].shape[axis] for name, (number, axis) in self.origins.items()}
        return inputs[0].new_empty([form.value(known) for form in self.forms], dtype=self.dtype)


class Shapes:
    """Shapes of outputs as functions of shapes of inputs, learnt from several calls.

    Args:
        inputs: the inputs' shapes, call by call.
        dtypes: their element types.
        name: of the module, for errors.

    Raises:
        CaptureError: the inputs of some calls are more, or of other ranks, than those of others.
    """

    def __init__(
        self, inputs: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype | None], name: str
    ) -> None:
        if len({tuple(map(len, shapes)) for shapes in inputs}) != 1:
            raise CaptureError(f"{name} is called with more tensors, or ones of other ranks, in some calls.")
        self._inputs, self._dtypes = inputs, dtypes
        self._symbols = Symbols(names=[])
        self._origins: dict[str, tuple[int, int]] = {}
        for number, shape in enumerate(inputs[0]):
            for axis in range(len(shape)):
                sizes = [(call, shapes[number][axis]) for call, shapes in enumerate(inputs)]
                if self._symbols.form(sizes) is None:
                    self._origins[self._symbols.add(dict(sizes))] = number, axis

    def of(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, name: str) -> OutputShape:
        """Return what an output's shape follows from.

        Raises:
            CaptureError: a size follows from no input; a shape function has to be given.
        """
        if len(set(map(len, shapes))) != 1:
            raise CaptureError(f"{name}: an output has another rank in some calls.")
        forms = []
        for axis in range(len(shapes[0])):
            form = self._symbols.form([(call, shape[axis]) for call, shape in enumerate(shapes)])
            if form is None:
                sizes = ", ".join(str(shape[axis]) for shape in shapes)
                raise CaptureError(
                    f"{name}: axis {axis} of an output is {sizes}, which follows from no input.",
                    "Give shape_functions={class or operator name: function of the inputs}.",
                )
            forms.append(form)
        symbols = {symbol for form in forms for term, _ in form.terms for symbol in term.split("*")}
        columns = zip(self._dtypes, zip(*self._inputs, strict=True), strict=True)
        same = (n for n, (kind, seen) in enumerate(columns) if kind is dtype and list(seen) == list(shapes))
        return OutputShape(next(same, None), tuple(forms), {name: self._origins[name] for name in symbols}, dtype)


@dataclass(frozen=True)
class OutputMaker:
    """Makes a tensor like one output of a module from its input tensors: as the user's function says, else as learnt.

    Attributes:
        index: of the output.
        dtype: its element type.
        learnt: what was learnt of its shape, or why that failed.
        given: the user's function.
    """

    index: int
    dtype: torch.dtype
    learnt: OutputShape | CaptureError
    given: ShapeFunction | None = None

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Return it for the tensors of a call, as positionals and keywords.

        Raises:
            CaptureError: the user's function leaves to us what could not be learnt.
        """
        inputs = (*args, *kwargs.values())
        made = None if self.given is None else _asked(self.given, self.index, args, kwargs)
        if isinstance(made, torch.Tensor):
            return made
        if made is not None:
            return inputs[0].new_empty(tuple(made), dtype=self.dtype)
        return self.shape.made(*inputs)

    @property
    def shape(self) -> OutputShape:
        """What was learnt.

        Raises:
            CaptureError: nothing was.
        """
        if isinstance(self.learnt, CaptureError):
            raise self.learnt
        return self.learnt


def _asked(function: ShapeFunction, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Ask the user's function for one output; see `ShapeFunction`."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # a function made in C, as torch.empty_like
        parameters = inspect.signature(function).parameters
    wanted = parameters.get(_INDEX)
    if wanted is not None and wanted.kind is not wanted.KEYWORD_ONLY:
        return function(index, *args, **kwargs)
    if wanted is not None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(*args, **{_INDEX: index}, **kwargs)
    made = function(*args, *kwargs.values())
    return made[index] if isinstance(made, (tuple, list)) else made


__all__ = ["OutputMaker", "OutputShape", "ShapeFunction", "ShapeFunctions", "Shapes", "moving_arguments", "moving_axes"]
