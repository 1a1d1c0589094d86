"""Products whose two free sizes are one symbol, `[T,D] x [T,D] -> [T,T]`: a release that never ends loading them gets others.

tract 0.21.14 orders the operands of a product by size, and swaps two equal symbolic ones for ever (by running: 0.21.13 and
0.21.15 do not). One row more on one side, cut off the result, tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from generic_export.torch_graph.dims import same_dim
from generic_export.translate.value import Value


def equal_free_axis(expression: str, values: Sequence[Value]) -> str | None:
    """Return a letter that only the second operand of an einsum has, whose symbolic size is that of one of the first's own."""
    terms, output = expression.split("->")
    if len(values) != 2:
        return None
    left, right = (
        {letter: dim for letter, dim in zip(term, value.shape, strict=True) if letter in output}
        for term, value in zip(terms.split(","), values, strict=True)
    )
    for letter in right.keys() - left.keys():
        sizes = (dim for own, dim in left.items() if own not in right)
        if not isinstance(right[letter], int) and any(same_dim(right[letter], dim) for dim in sizes):
            return letter
    return None


__all__ = ["equal_free_axis"]
