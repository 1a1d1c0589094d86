"""Symmetric matrices for little more than half the price: strips of columns, down to the diagonal and no further.

In: rows [N, K], or a symmetric matrix [K, K]. Out: the sums x x^T over the rows, or tr(W H W^T).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_FEWEST_STRIPS = 8  # then 9/16 of the whole is computed
_NARROWEST = 256  # columns; products of fewer are slower than what they spare


def _strips(size: int) -> Iterator[slice]:
    """Yield the columns of a matrix, some at a time."""
    width = max(_NARROWEST, -(-size // _FEWEST_STRIPS))
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def add_products(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the sum of x x^T over rows to `total`; above the diagonal it is undefined until it is `mirrored`.

    Args:
        total: float32 [K, K].
        rows: float32 [N, K].
    """
    for columns in _strips(rows.shape[1]):
        total[columns, : columns.stop].addmm_(rows[:, columns].T, rows[:, : columns.stop])


def mirrored(lower: torch.Tensor) -> torch.Tensor:
    """Fill in, in place, what `add_products` leaves undefined; return the matrix [K, K]."""
    for columns in _strips(len(lower)):
        lower[: columns.start, columns] = lower[columns, : columns.start].T
    return lower


def quadratic_form(rows: torch.Tensor, symmetric: torch.Tensor) -> float:
    """Return tr(W H W^T).

    Args:
        rows: W, float32 [N, K].
        symmetric: H, float32 [K, K].
    """
    total = 0.0
    for columns in _strips(rows.shape[1]):
        here, before = rows[:, columns], rows[:, : columns.start]
        slopes = here @ symmetric[columns, columns]
        if columns.start:
            slopes.addmm_(before, symmetric[: columns.start, columns], alpha=2.0)
        total += float((slopes * here).sum(dtype=torch.float64))
    return total


__all__ = ["add_products", "mirrored", "quadratic_form"]
