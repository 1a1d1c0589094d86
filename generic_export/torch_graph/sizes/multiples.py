"""Sizes that are declared multiples: captured as `[S/8, 8]` where the module sees `[S]`, so that PyTorch knows what divides them.

In: a call, and dynamic axes with `multiple_of`. Out: a call that takes folded tensors, and where their axes are. The graph has the
inputs whole (`conversion.py`); every size after them is said of S/8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram

from generic_export.compat import REMAINDERS, shape_guards, torch_sympy
from generic_export.errors import OptionError
from generic_export.torch_graph.dims import Dim, dim_symbol
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import AxisSymbol, DynamicAxes, DynamicSize, declared_sizes, symbol_name


def counted(size: DynamicSize) -> str:
    """Return what PyTorch calls a declared size: how many times there is what divides it."""
    return size.name if size.multiple_of == 1 else f"{size.name}_{size.multiple_of}"


def counted_dim(size: DynamicSize) -> Any:
    """Return what is left of a declared size as torch.export takes it: how many times what divides it."""
    least, most = size.least // size.multiple_of, None if size.most is None else size.most // size.multiple_of
    # PyTorch takes no range of one size.
    return TorchDim(counted(size), min=0 if least == most else least, **({} if most is None else {"max": most}))


@dataclass(frozen=True)
class DivisibleAxes:
    """What is folded of each input.

    Attributes:
        sizes: by input name, the axes whose size is a declared multiple.
    """

    sizes: Mapping[str, Mapping[int, DynamicSize]]

    @staticmethod
    def of(axes: DynamicAxes) -> DivisibleAxes:
        """Read what is declared; a symbol that is a multiple is one wherever it stands.

        Raises:
            OptionError: two declarations contradict.
        """
        declared = {name: size for name, size in declared_sizes(axes).items() if size.multiple_of > 1}
        return DivisibleAxes({name: _folded_axes(given, declared) for name, given in axes.items()})

    def place(self, name: str, axis: int) -> int:
        """Return where an axis of an input is once those before it have two places each."""
        return axis + sum(other < axis for other in self.sizes.get(name, {}))

    def moved(self, name: str, axes: Mapping[int, AxisSymbol]) -> dict[int, AxisSymbol]:
        """Return the dynamic axes of an input where PyTorch has them."""
        return {self.place(name, axis): symbol for axis, symbol in axes.items()}

    def whole_shape(self, name: str, folded: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the shape of an input as a user knows it."""
        shape = list(folded)
        for axis, size in self.sizes.get(name, {}).items():
            shape[axis : axis + 2] = [dim_symbol(size.name)]
        return tuple(shape)

    def call(self, call: FlatCall, names: Sequence[str]) -> FlatCall:
        """Return a call with folded tensors.

        Raises:
            OptionError: a size of the example is no multiple.
        """
        folds = [self.sizes.get(name, {}) for name in names]
        if not any(folds):
            return call

        def arguments(leaves: Iterator[torch.Tensor]) -> tuple[list[object], dict[str, object]]:
            return call.arguments([_whole(leaf, fold) for leaf, fold in zip(leaves, folds, strict=True)])

        return FlatCall(
            call.names, tuple(itertools.starmap(_folded, zip(names, call.tensors, folds, strict=True))), arguments
        )


def _folded_axes(axes: Mapping[int, object], declared: Mapping[str, DynamicSize]) -> dict[int, DynamicSize]:
    found = {axis: declared.get(symbol_name(axes[axis])) for axis in sorted(axes)}
    return {axis: size for axis, size in found.items() if size is not None}


def _folded(name: str, tensor: torch.Tensor, fold: Mapping[int, DynamicSize]) -> torch.Tensor:
    for axis, size in reversed(list(fold.items())):
        if tensor.shape[axis] % size.multiple_of:
            raise OptionError(
                f"axis {axis} of input {name!r} is declared a multiple of {size.multiple_of}, and is {tensor.shape[axis]}.",
                "Give an example in which it is one.",
            )
        tensor = tensor.unflatten(axis, (-1, size.multiple_of))
    return tensor


def _whole(tensor: torch.Tensor, fold: Mapping[int, DynamicSize]) -> torch.Tensor:
    for axis in fold:
        tensor = tensor.flatten(axis, axis + 1)
    return tensor


# --- multiples that nobody declared ---


def assumed(program: ExportedProgram, names: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[DynamicSize, ...]:
    """Return by what PyTorch divided sizes in what it assumed of them; of those that are no declared multiples."""
    guards = [guard.expr for guard in shape_guards(program) if isinstance(guard.expr, sympy.Rel)]
    parts = [part for guard in guards for part in guard.atoms(torch_sympy.FloorDiv, *REMAINDERS)]
    found: dict[str, int] = {}
    for part in parts:
        symbols, divisor = part.free_symbols, _divisor(part)
        name = names.get(next(iter(symbols))) if len(symbols) == 1 else None
        if name is not None and name.is_Symbol and divisor is not None:
            found[str(name)] = math.lcm(found.get(str(name), 1), divisor)
    return tuple(DynamicSize(name, factor) for name, factor in found.items())


def _divisor(part: sympy.Expr) -> int | None:
    """Return by what a size is divided in steps: 4 in `((H - 1) // 2 - 1) // 2` (two strides of 2), 2 in `8*H % 16`."""
    number, divisor = part.args
    if not divisor.is_Integer:
        return None
    inner = [_divisor(step) for step in number.atoms(torch_sympy.FloorDiv)]
    steps = [1 if step is None else step for step in inner]
    factor, _ = sympy.factor_terms(number).as_coeff_Mul()
    return int(divisor / sympy.gcd(factor, divisor)) * math.lcm(*steps)


def declared_too(axes: DynamicAxes, sizes: Sequence[DynamicSize]) -> DynamicAxes:
    """Return dynamic axes with some symbols declared multiples, of which nothing but bounds was said."""
    known = {size.name: size for size in sizes}
    return {
        name: {axis: _declared_too(symbol, known) for axis, symbol in given.items()} for name, given in axes.items()
    }


def _declared_too(symbol: AxisSymbol, sizes: Mapping[str, DynamicSize]) -> AxisSymbol:
    size = sizes.get(symbol_name(symbol))
    if size is None:
        return symbol
    least, most = (_bound(symbol, bound) for bound in ("min", "max"))
    return DynamicSize(size.name, size.multiple_of, least, most)


def _bound(symbol: AxisSymbol, bound: str) -> int | None:
    """Return a bound of a `Dim`; where it has none PyTorch keeps an infinity of its own there."""
    found = getattr(symbol, bound, None)
    return found if isinstance(found, int) and found > 0 else None


__all__ = ["DivisibleAxes", "assumed", "counted_dim", "declared_too"]
