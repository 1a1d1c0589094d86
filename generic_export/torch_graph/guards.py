"""What PyTorch assumed of sizes while it captured, when it was told not to refuse over it.

In: a program captured with `Dim.DYNAMIC`. Out: the assumptions that fix a size, which no export may be built on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import sympy
from torch.export import ExportedProgram

from generic_export.compat import over_sizes_of_inputs, shape_guards
from generic_export.torch_graph.size_guards import answer

# Sizes far from any example: multiples of many numbers, so that divisibility is met by some, and sizes that are not.
_FAR_SIZES = (144, 160, 210, 240, 250, 256, 336, 360, 441, 512)


def freezing_guards(program: ExportedProgram) -> list[sympy.Expr]:
    """Return the equalities that hold for no large size, such as `trunc(0.5*float(s0)) == 4`.

    Others ask for divisibility (`s0 == 2*(s0//2)`) and leave the axis dynamic.
    """
    return [guard for guard in _equalities(program) if not _holds_somewhere(guard, program.range_constraints)]


def unproved_equalities(program: ExportedProgram) -> list[sympy.Expr]:
    """Return the equalities of sizes that are not proved for all of them."""
    ranges = program.range_constraints
    least = {symbol: int(found.lower) for symbol, found in ranges.items() if found.lower.is_Integer}
    # Inputs that share a declared size have symbols of their own, and a guard that they are equal.
    found = (over_sizes_of_inputs(program, guard) for guard in _equalities(program))
    return [guard for guard in found if guard != sympy.true and answer(guard, least) is not True]


def _equalities(program: ExportedProgram) -> list[sympy.Expr]:
    return [guard.expr for guard in shape_guards(program) if isinstance(guard.expr, sympy.Eq)]


def _holds_somewhere(guard: sympy.Expr, ranges: Mapping[sympy.Symbol, Any]) -> bool:
    symbols = sorted(guard.free_symbols, key=str)
    far = [_far_sizes(ranges.get(symbol)) for symbol in symbols]
    return any(
        guard.subs(dict(zip(symbols, sizes, strict=True))) == sympy.true
        for sizes in itertools.islice(itertools.product(*far), 1000)
    )


def _far_sizes(found: Any) -> tuple[int, ...]:
    """Return sizes far above the smallest that a symbol may have: what reads sound needs hundreds of samples for a position."""
    least = int(getattr(found, "lower", 0))
    if least <= min(_FAR_SIZES):
        return _FAR_SIZES
    return tuple(size * least for size in _FAR_SIZES[:5]) + tuple(size + 20 * least for size in _FAR_SIZES[5:])
