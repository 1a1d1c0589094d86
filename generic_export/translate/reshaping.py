"""Reshapes, so that tract can prove them: it compares volumes by their form.

In: the shape of a value, and the one that PyTorch gives it. Out: which axes change, and which are cut to sizes that divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from generic_export.compat import REMAINDERS, torch_sympy
from generic_export.torch_graph.dims import Dim, same_dim, simplify_dim


def provable_cuts(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[list[tuple[int, Dim]], list[Dim]]:
    """Return the axes of `before` to cut to a provable size, and `after` with its merged axes at theirs."""
    cuts: list[tuple[int, Dim]] = []
    written = list(after)
    if not any(_divides(dim) for dim in (*before, *after)):
        return cuts, written
    for first_in, stop_in, first_out, stop_out in _groups(before, after):
        consumed, produced = _volume(before[first_in:stop_in]), _volume(after[first_out:stop_out])
        if same_dim(consumed, produced):
            continue
        if stop_in - first_in == 1:
            cuts.append((first_in, produced))
        elif stop_out - first_out == 1:
            written[first_out] = consumed
    return cuts, written


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
    return not isinstance(dim, int) and dim.has(torch_sympy.FloorDiv, *REMAINDERS)


def _exact(dim: Dim) -> sympy.Expr:
    expr = sympy.sympify(dim)
    return expr.replace(torch_sympy.FloorDiv, lambda base, divisor: base / divisor)


def _volume(dims: Sequence[Dim]) -> Dim:
    total = sympy.Integer(1)
    for dim in dims:
        total = total * sympy.sympify(dim)
    return simplify_dim(total)


def changed_axes(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[int, int, int]:
    """Return where two shapes start to differ, and where each one's differing part ends."""
    start = 0
    while start < min(len(before), len(after)) and same_dim(before[start], after[start]):
        start += 1
    tail = 0
    while tail < min(len(before), len(after)) - start and same_dim(before[-1 - tail], after[-1 - tail]):
        tail += 1
    return start, len(before) - tail, len(after) - tail


__all__ = ["changed_axes", "provable_cuts"]
