"""`x.split(3, 1)` and `x.chunk(4, 1)` of an axis that changes: how many pieces there are is asked only where it matters.

The number of pieces depends on the size, and PyTorch's tuple has as many as the example. The first piece always exists, so a
model that takes only that one is right at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import torch


class Pieces(tuple[torch.Tensor, ...]):
    """The result of `split` or `chunk`: indexing it slices the tensor, and anything else asks PyTorch for all pieces.

    Args:
        tensor: [..., size, ...].
        length: how many elements of the axis each piece has, except for the last one.
        dim: the axis that is cut.
        split: returns all pieces as PyTorch makes them, which asks for their number.
    """

    def __new__(
        cls, tensor: torch.Tensor, length: Any, dim: int, split: Callable[[], tuple[torch.Tensor, ...]]
    ) -> Pieces:
        pieces = super().__new__(cls)
        pieces._cut, pieces._split = (tensor, length, dim), split
        return pieces

    _cut: tuple[torch.Tensor, Any, int]
    _split: Callable[[], tuple[torch.Tensor, ...]]

    def all(self) -> tuple[torch.Tensor, ...]:
        """Return a plain tuple of all pieces."""
        return tuple(self._split())

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int) or place < 0:
            return self.all()[place]
        tensor, length, dim = self._cut
        if place and not place * length < tensor.shape[dim]:
            raise IndexError("tuple index out of range")
        return _cut(tensor, dim, place * length, (place + 1) * length)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def __add__(self, other: Any) -> Any:
        return self.all() + tuple(other)

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + self.all()

    def __mul__(self, times: SupportsIndex) -> tuple[torch.Tensor, ...]:
        return self.all() * times

    __rmul__ = __mul__

    def __contains__(self, value: object) -> bool:
        return value in self.all()


def _cut(tensor: torch.Tensor, dim: int, start: Any, end: Any) -> torch.Tensor:
    return tensor[(slice(None),) * (dim % tensor.dim()) + (slice(start, end),)]


def without_pieces(value: Any) -> Any:
    """Return an argument of one of PyTorch's functions with all of its pieces, which C++ could not see."""
    return value.all() if isinstance(value, Pieces) else value


__all__ = ["Pieces", "without_pieces"]
