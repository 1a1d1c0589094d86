"""Reshapes, so that tract can prove them: it compares volumes by their form.

In: a value, and the shape PyTorch gives it. Out: the operations that take it there, naming only the axes that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import sympy

from generic_export.compat import torch_sympy
from generic_export.nnef.graph import Argument
from generic_export.torch_graph.dims import Dim, same_dim, same_shape, simplify_dim

if TYPE_CHECKING:
    from generic_export.translate.builder import NnefBuilder, Value


def reshaped(b: NnefBuilder, value: Value, shape: Sequence[Dim]) -> Value:
    """Reshape; an axis of `T` that PyTorch knows to be a multiple of 4 is written as `4*(T/4)`, by a slice that keeps all of it."""
    if same_shape(value.shape, shape):
        return value
    written = list(shape)
    for axis, volume in _provable(value.shape, written):
        value = b.slice(value, axis, 0, volume)
    result = _emitted(b, value, written)
    for axis, (size, wanted) in enumerate(zip(written, shape, strict=True)):
        if not same_dim(size, wanted):
            result = b.slice(result, axis, 0, wanted)
    return result


def _emitted(b: NnefBuilder, value: Value, shape: Sequence[Dim]) -> Value:
    from generic_export.translate.builder import shape_argument

    start, stop_in, stop_out = _changed_axes(value.shape, shape)
    removed, added = value.shape[start:stop_in], tuple(shape[start:stop_out])
    if not added and all(same_dim(dim, 1) for dim in removed):
        return b.squeeze(value, range(start, stop_in))
    if not removed and all(same_dim(dim, 1) for dim in added):
        return b.unsqueeze(value, range(start, stop_out))
    attributes: dict[str, Argument] = {"shape": shape_argument(added)}
    if start or stop_in < value.rank:
        attributes |= {"axis_start": start, "axis_count": stop_in - start}
    return b.emit("reshape", [value], shape=shape, dtype=value.dtype, attributes=attributes)


def _provable(before: Sequence[Dim], after: list[Dim]) -> list[tuple[int, Dim]]:
    """Return the axes of `before` to cut to a provable size; merged axes of `after` get theirs in place."""
    if not any(_divides(dim) for dim in (*before, *after)):
        return []
    cuts = []
    for first_in, stop_in, first_out, stop_out in list(_groups(before, after)):
        consumed, produced = _volume(before[first_in:stop_in]), _volume(after[first_out:stop_out])
        if same_dim(consumed, produced):
            continue
        if stop_in - first_in == 1:
            cuts.append((first_in, produced))
        elif stop_out - first_out == 1:
            after[first_out] = consumed
    return cuts


def _groups(before: Sequence[Dim], after: Sequence[Dim]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of axes, in and out, of equal volume when every division is taken as exact."""
    start_in = start_out = 0
    while start_in < len(before) and start_out < len(after):
        stop_in, stop_out = start_in + 1, start_out + 1
        while (ratio := _ratio(before[start_in:stop_in], after[start_out:stop_out])) != 1:
            if stop_out < len(after) and (stop_in == len(before) or not _is_fraction(ratio)):
                stop_out += 1
            elif stop_in < len(before):
                stop_in += 1
            else:
                return
        yield start_in, stop_in, start_out, stop_out
        start_in, start_out = stop_in, stop_out


def _ratio(consumed: Sequence[Dim], produced: Sequence[Dim]) -> sympy.Expr:
    return sympy.simplify(_exact(_volume(consumed)) / _exact(_volume(produced)))


def _is_fraction(ratio: sympy.Expr) -> bool:
    """Say whether more of the input is needed: the output's run is the larger one."""
    numerator, denominator = ratio.as_numer_denom()
    return bool(numerator.is_number and not denominator.is_number) or bool(ratio.is_number and ratio < 1)


def _divides(dim: Dim) -> bool:
    return not isinstance(dim, int) and dim.has(torch_sympy.FloorDiv, *_REMAINDERS)


_REMAINDERS = (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)


def _exact(dim: Dim) -> sympy.Expr:
    expr = sympy.sympify(dim)
    return expr.replace(torch_sympy.FloorDiv, lambda base, divisor: base / divisor)


def _volume(dims: Sequence[Dim]) -> Dim:
    total = sympy.Integer(1)
    for dim in dims:
        total = total * sympy.sympify(dim)
    return simplify_dim(total)


def _changed_axes(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[int, int, int]:
    """Return where two shapes start to differ, and where each one's differing part ends."""
    start = 0
    while start < min(len(before), len(after)) and same_dim(before[start], after[start]):
        start += 1
    tail = 0
    while tail < min(len(before), len(after)) - start and same_dim(before[-1 - tail], after[-1 - tail]):
        tail += 1
    return start, len(before) - tail, len(after) - tail
