"""Greatest common divisors and least common multiples: Euclid's algorithm, as many steps as an element type can need."""

from __future__ import annotations

import torch

from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.loops import loop

aten = torch.ops.aten
Tensor = torch.Tensor


def _steps(dtype: torch.dtype) -> int:
    """Two neighbours among Fibonacci's numbers take longest (Lamé): as many steps as there are such numbers below the limit."""
    limits = torch.iinfo(dtype)
    smaller, larger, steps = 1, 2, 2
    while larger <= max(limits.max, -limits.min):
        smaller, larger, steps = larger, smaller + larger, steps + 1
    return steps


@rewrites(aten.gcd.default)
def gcd(self: Tensor, other: Tensor) -> Tensor:
    """The greatest common divisor; 0 of two zeros."""
    dtype = torch.promote_types(self.dtype, other.dtype)
    largest, smallest = torch.broadcast_tensors(self.to(torch.int64).abs(), other.to(torch.int64).abs())

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (first, second), (nothing,) = states, slices
        done = second == 0
        rest = torch.remainder(first, torch.where(done, 1, second))
        return [torch.where(done, first, second) + nothing, torch.where(done, 0, rest)], []

    (divisor, _), _ = loop(step, [largest, smallest], [torch.zeros(_steps(dtype), dtype=torch.int64)])
    return divisor.to(dtype)


@rewrites(aten.lcm.default)
def lcm(self: Tensor, other: Tensor) -> Tensor:
    """The least common multiple; 0 where either is."""
    divisor = torch.gcd(self, other)
    parts = torch.div(self, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return (parts * other).abs()
