"""What torch.export would say of sizes once all is captured, told when a model first asks: so that it is not captured twice.

A table of 512 positions bounds a length. In: the dynamic axes of a capture. Out: `SizesBoundedError`, raised at the first question
that bounds one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from generic_export.compat import upper_bounds_seen
from generic_export.torch_graph.multiples import LEAF_SIZE
from generic_export.torch_graph.request import AxisSymbol


class SizesBoundedError(Exception):
    """A model bounds sizes that were to be any; never seen outside a capture.

    Attributes:
        bounds: `max`, the largest size, by symbol.
    """

    def __init__(self, bounds: dict[str, dict[str, int]]) -> None:
        super().__init__(f"bounded: {bounds}")
        self.bounds = bounds


class SizesMixedError(Exception):
    """A table bounds a sum of sizes, which a capture for any size does not tell; never seen outside a capture."""


@contextmanager
def told_of_bounds(axes: Sequence[Mapping[int, AxisSymbol]], *, of_sums: bool) -> Iterator[None]:
    """Raise `SizesBoundedError` inside the capture that the block holds, where its model bounds a dynamic size.

    Args:
        axes: the dynamic ones of each input, where PyTorch has them. Of a size that is more than a name something was said
            already: it is left to torch.export's message.
        of_sums: raise `SizesMixedError` where it bounds a sum of sizes.
    """

    def note(largest: Mapping[str, int]) -> None:
        bounds = {}
        for size, most in largest.items():
            place = LEAF_SIZE.fullmatch(size)
            symbol = axes[int(place[1])].get(int(place[2])) if place else None
            if isinstance(symbol, str):
                bounds[symbol] = {"max": most}
        if bounds:
            raise SizesBoundedError(bounds)

    def mixed() -> None:
        if of_sums:
            raise SizesMixedError

    with upper_bounds_seen(note, mixed):
        yield


__all__ = ["SizesBoundedError", "SizesMixedError", "told_of_bounds"]
