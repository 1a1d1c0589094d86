"""Axes that a user declares dynamic: read into one form, and held against the tensors that they speak of.

In: `{name: {axis: symbol}}` or `{name: [axis, ...]}` for inputs and outputs. Out: `DynamicAxes`, an error, or a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
from torch.export import Dim

from generic_export.errors import OptionError
from generic_export.torch_graph.dims import dim_symbol, floor_div
from generic_export.torch_graph.ir import TensorVariable
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.request import (
    AutoSize,
    AxisSymbol,
    DynamicAxes,
    DynamicSize,
    declared_sizes,
    symbol_name,
)

AnyDynamicAxes = Mapping[str, Mapping[int, AxisSymbol] | Sequence[int]]
"""Dynamic axes as they may be given: a list of axes gives each a symbol of its own, named after tensor and axis."""

_HINT = "Use {name: {axis: symbol}}, or {name: [axis, ...]}."


def dynamic_axes_of(given: AnyDynamicAxes | None) -> DynamicAxes:
    """Return dynamic axes in the one form that is used inside; None declares none.

    Raises:
        OptionError: neither a mapping nor a list of axes, or an axis that is no position from 0 on.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"dynamic_axes is a {type(given).__name__}.", _HINT)
    symbols = [symbol for axes in given.values() if isinstance(axes, Mapping) for symbol in axes.values()]
    taken = {
        symbol_name(symbol) if isinstance(symbol, str | DynamicSize | AutoSize) else getattr(symbol, "__name__", "")
        for symbol in symbols
    }
    read = {name: _axes_of(name, axes, taken) for name, axes in given.items()}
    declared = declared_sizes(read)  # holds wherever the name stands
    return {
        name: {
            axis: declared.get(symbol, symbol) if isinstance(symbol, str) else symbol for axis, symbol in axes.items()
        }
        for name, axes in read.items()
    }


def _axes_of(name: str, axes: Any, taken: set[str]) -> dict[int, AxisSymbol]:
    if not isinstance(name, str):
        raise OptionError(f"dynamic_axes has the name {name!r}.", _HINT)
    if isinstance(axes, Mapping):
        return {
            _position(name, axis): AutoSize(_own_symbol(name, axis, taken)) if symbol == Dim.AUTO else symbol
            for axis, symbol in axes.items()
        }
    if isinstance(axes, (str, bytes)) or not isinstance(axes, Collection):
        raise OptionError(f"the dynamic axes of {name!r} are {axes!r}.", _HINT)
    return {_position(name, axis): _own_symbol(name, axis, taken) for axis in axes}


def _position(name: str, axis: Any) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise OptionError(
            f"{axis!r} is not an axis of {name!r}.", "Axes are counted from 0; negative numbers are not supported."
        )
    return axis


def _own_symbol(name: str, axis: int, taken: set[str]) -> str:
    """Return the symbol of an axis that was declared without one: `X_0` for the first axis of `x`."""
    symbol = f"{identifier(name)}_{axis}".upper()
    while symbol in taken:
        symbol += "_"
    taken.add(symbol)
    return symbol


def check_names(axes: DynamicAxes, inputs: Sequence[str], outputs: Sequence[str] | None) -> None:
    """Check that each name is an input or output; `outputs` is None while nobody knows their names.

    Raises:
        OptionError: naming the one that is neither.
    """
    unknown = [name for name in axes if name not in inputs and (outputs is not None and name not in outputs)]
    if unknown:
        known = f"Inputs: {', '.join(inputs)}." + (f" Outputs: {', '.join(outputs)}." if outputs else "")
        raise OptionError(f"dynamic axes are declared for {unknown[0]!r}, which is not an input or output.", known)


def check_ranks(axes: DynamicAxes, names: Sequence[str], shapes: Sequence[Sequence[Any]]) -> None:
    """Check that each declared axis of the tensors with these names is there.

    Raises:
        OptionError: naming the tensor, its shape and the axis.
    """
    for name, shape in zip(names, shapes, strict=True):
        for axis in axes.get(name, {}):
            if axis >= len(shape):
                sizes = ", ".join(map(str, shape))
                raise OptionError(
                    f"axis {axis} of {name!r} is declared dynamic, but its shape is [{sizes}].",
                    f"It has {len(shape)} axes, counted from 0.",
                )


def check_outputs(axes: DynamicAxes, inputs: Sequence[str], outputs: Mapping[str, TensorVariable]) -> None:
    """Hold what was declared of outputs against what was captured; sizes follow from the inputs, whatever was declared.

    Raises:
        OptionError: a name is neither an input's nor an output's, or an output has no such axis.
    """
    check_names(axes, inputs, tuple(outputs))
    check_ranks(axes, tuple(outputs), [variable.shape for variable in outputs.values()])
    symbols = {symbol_name(symbol) for name in inputs for symbol in axes.get(name, {}).values()}
    whole = _whole_sizes(axes)
    for name, variable in outputs.items():
        for axis, symbol in () if name in inputs else axes.get(name, {}).items():
            size, wanted = sympy.sympify(variable.shape[axis]).xreplace(whole), symbol_name(symbol)
            if not sympy.sympify(size).free_symbols:
                warnings.warn(
                    f"axis {axis} of output {name!r} is declared dynamic, but it is always {size}.", stacklevel=2
                )
            elif wanted in symbols and size != sympy.Symbol(wanted) and str(size) != wanted:
                warnings.warn(
                    f"axis {axis} of output {name!r} is declared as {wanted}, but it is {size}.", stacklevel=2
                )


def _whole_sizes(axes: DynamicAxes) -> dict[sympy.Basic, sympy.Basic]:
    """Return what to read for S/8 in a size, where S is a multiple of 8 by declaration."""
    return {
        sympy.sympify(floor_div(dim_symbol(size.name), size.multiple_of)): dim_symbol(size.name) / size.multiple_of
        for size in declared_sizes(axes).values()
        if size.multiple_of > 1
    }


__all__ = [
    "AnyDynamicAxes",
    "check_names",
    "check_outputs",
    "check_ranks",
    "dynamic_axes_of",
]
