"""What a case of a suite is: how a module is built, what it is given, and which axes of that are dynamic.

In: PyTorch, and what a dynamic size is. Out: `ModuleCase`; the library is imported when a module is built, so that names can be
listed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from generic_export import DynamicSize
from generic_export.torch_graph.request import AxisSymbol

Sizes: TypeAlias = Mapping[str, int]
Values: TypeAlias = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]

STATIC, DYNAMIC, HALF = "static", "dynamic", "half"
"""The columns of a suite: no axis is dynamic, or all that the case names; and those with matrices in f16."""


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normally distributed values in f32."""
    return torch.randn(shape, generator=generator)


def below(limit: int) -> Values:
    """Return what draws whole numbers from 0 to `limit`, without it."""
    return lambda shape, generator: torch.randint(limit, shape, generator=generator)


def between(least: float, most: float) -> Values:
    """Return what draws evenly distributed values in f32."""
    return lambda shape, generator: torch.rand(shape, generator=generator) * (most - least) + least


@dataclass(frozen=True)
class Given:
    """One input tensor.

    Attributes:
        shape: numbers, and the symbols of dynamic axes.
        values: draws them.
    """

    shape: tuple[int | str, ...]
    values: Values = normal


@dataclass(frozen=True)
class ModuleCase:
    """One module of a library.

    Attributes:
        build: makes it, with random weights; imports the library.
        inputs: of its forward, in order.
        sizes: of the symbols, at the example; `{}` where every axis is static.
        other: at the second comparison.
        multiples: what divides a symbol, where that is declared.
        more: sizes of further comparisons.
    """

    build: Callable[[], nn.Module]
    inputs: Mapping[str, Given]
    sizes: Sizes
    other: Sizes
    multiples: Sizes = field(default_factory=dict)
    more: tuple[Sizes, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it has in f32."""
        return (DYNAMIC, STATIC) if self.sizes else (STATIC,)

    @property
    def told(self) -> str:
        """Its columns, and which multiples its dynamic sizes are declared to be."""
        factors = sorted({factor for factor in self.multiples.values() if factor > 1})
        declared = f" (multiples of {', '.join(map(str, factors))})" if factors else ""
        return ", ".join(column + (declared if column == DYNAMIC else "") for column in self.columns)

    @property
    def dynamic_axes(self) -> dict[str, dict[int, AxisSymbol]]:
        """Every axis that is a symbol, with what is declared of it."""
        return {
            name: {axis: self._declared(size) for axis, size in enumerate(given.shape) if isinstance(size, str)}
            for name, given in self.inputs.items()
        }

    def _declared(self, symbol: str) -> AxisSymbol:
        factor = self.multiples.get(symbol, 1)
        return symbol if factor == 1 else DynamicSize(symbol, factor)

    def drawn(self, sizes: Sizes, seed: int) -> tuple[torch.Tensor, ...]:
        """Draw the inputs at some sizes."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            given.values(tuple(sizes[size] if isinstance(size, str) else size for size in given.shape), generator)
            for given in self.inputs.values()
        )


BATCH = {"B": 2}
OTHER_BATCH = {"B": 3}


def pictures(
    build: Callable[[], nn.Module], size: int, *, of_any_size: bool = False, multiple_of: int = 1, name: str = "x"
) -> ModuleCase:
    """Return a case that takes RGB pictures [B, 3, size, size]; height and width are dynamic too where it takes any.

    They are declared as multiples where `multiple_of` is more than 1; where it is not, odd ones are tried too.
    """
    if not of_any_size:
        return ModuleCase(build, {name: Given(("B", 3, size, size))}, BATCH, OTHER_BATCH)
    step = multiple_of if multiple_of > 1 else 32
    last = {"H": size + 7, "W": size + 13} if multiple_of == 1 else {"H": size + step, "W": size}
    return ModuleCase(
        build,
        {name: Given(("B", 3, "H", "W"))},
        {**BATCH, "H": size, "W": size},
        {**OTHER_BATCH, "H": size + 2 * step, "W": size + step},
        multiples={"H": multiple_of, "W": multiple_of},
        more=({"B": 1, "H": size, "W": size + 3 * step}, {**BATCH, **last}),
    )


__all__ = [
    "BATCH",
    "DYNAMIC",
    "HALF",
    "OTHER_BATCH",
    "STATIC",
    "Given",
    "ModuleCase",
    "Sizes",
    "Values",
    "below",
    "between",
    "normal",
    "pictures",
]
