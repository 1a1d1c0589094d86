"""What is asked of a capture: the module, its example arguments, the names of things, the axes that stay symbolic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.export import Dim

from generic_export.compat import OpOverload
from generic_export.errors import OptionError


@dataclass(frozen=True)
class DynamicSize:
    """A dynamic size with constraints. tract refuses to run at sizes that violate them.

    Attributes:
        name: symbol of the size, such as `S`.
        multiple_of: the size is a multiple of this number.
        min: smallest allowed size; None for no limit.
        max: largest allowed size; None for no limit.

    Raises:
        OptionError: the constraints allow no size.
    """

    name: str
    multiple_of: int = 1
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        for option, value in (("multiple_of", self.multiple_of), ("min", self.min), ("max", self.max)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{option} of {self.name!r} is {value!r}.", "Give a whole number from 1 on.")
        if self.max is not None and self.least > self.max:
            raise OptionError(f"no multiple of {self.multiple_of} is between {self.min} and {self.max} ({self.name}).")

    @property
    def least(self) -> int:
        """Smallest allowed size."""
        return -(-(self.min or 1) // self.multiple_of) * self.multiple_of

    @property
    def most(self) -> int | None:
        """Largest allowed size; None if there is no limit."""
        return None if self.max is None else self.max // self.multiple_of * self.multiple_of

    def near(self, size: int) -> int:
        """Return the smallest allowed size that is at least `size`, or the largest allowed size if there is none.

        Args:
            size: requested size.
        """
        above = max(-(-size // self.multiple_of) * self.multiple_of, self.least)
        return above if self.most is None else min(above, self.most)

    @property
    def relations(self) -> tuple[str, ...]:
        """The constraints in tract's syntax."""
        found = (
            [f"{self.name}-({self.name}/{self.multiple_of})*{self.multiple_of} == 0"] if self.multiple_of > 1 else []
        )
        found += [f"{self.name} >= {self.least}"] if self.min is not None else []
        return (*found, *([] if self.most is None else [f"{self.name} <= {self.most}"]))

    def __str__(self) -> str:
        """As it is written."""
        said = {"multiple_of": self.multiple_of if self.multiple_of > 1 else None, "min": self.min, "max": self.max}
        return (
            f"DynamicSize({', '.join([repr(self.name), *(f'{key}={value}' for key, value in said.items() if value)])})"
        )


@dataclass(frozen=True)
class AutoSize:
    """A size that stays symbolic where the model allows it: what `torch.export.Dim.AUTO` becomes.

    Attributes:
        name: its symbol; an axis that must be equal to another one takes the symbol of the first.
    """

    name: str


AxisSymbol = str | Dim | DynamicSize | AutoSize
"""One dynamic size: a name, a torch.export `Dim`, whose bounds PyTorch then holds to, or what is known of it."""

DynamicAxes = Mapping[str, Mapping[int, AxisSymbol]]
"""`{input name: {axis: symbol}}`. One symbol is one size."""


@dataclass(frozen=True)
class CaptureRequest:
    """One capture.

    Attributes:
        module: the module to capture, in eval mode; parameters may be on the meta device. It is not modified.
        args: example positional arguments (tensors, or nests of tensors); only shapes and dtypes matter.
        kwargs: example keyword arguments.
        input_names: a name per input tensor, in flattened order; None takes those of `forward`, dotted (`batch.ids.0`).
        output_names: a name per output tensor, in flattened order; None numbers them, or takes a dict's own.
        dynamic_axes: the axes that stay symbolic.
        strip_prefix: leading path removed from module paths and parameter names (a wrapper's attribute).
        keep: says whether an operator can stay as it is; others go through PyTorch's own decompositions.
        conditional: accept a program that is right at some sizes alone: the graph says at which (`conditions`). Otherwise
            that is refused where the model's code asks for one size, other than for a largest one, and sizes of 1 are left
            to whoever checks the archive.
        whole: classes of modules of which each instance is captured as one operator, see `units.py`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes = field(default_factory=dict)
    strip_prefix: str = ""
    keep: Callable[[OpOverload], bool] | None = None
    whole: Collection[type[nn.Module]] = ()
    conditional: bool = False


def symbol_name(symbol: object) -> str:
    """Return the name of a dynamic size, however it is given.

    Raises:
        OptionError: a hint without a name (`Dim.DYNAMIC`), or an expression of another `Dim`.
    """
    if isinstance(symbol, str):
        return symbol
    if isinstance(symbol, DynamicSize | AutoSize):
        return symbol.name
    name = getattr(symbol, "__name__", None)
    if type(symbol) is not Dim or not isinstance(name, str):
        raise OptionError(
            f"dynamic size {symbol!r} has no name.",
            "Give a string, torch.export.Dim(name), or DynamicSize(name, multiple_of=8) for what is a multiple.",
        )
    return name


def size_near(symbol: AxisSymbol, size: int) -> int:
    """Return a size that an axis may have, near another one."""
    if isinstance(symbol, DynamicSize):
        return symbol.near(size)
    least, most = (
        getattr(symbol, bound, None) for bound in ("min", "max")
    )  # of a Dim; an infinity of PyTorch's is no number
    above = max(size, least) if isinstance(least, int) else size
    return min(above, most) if isinstance(most, int) else above


def declared_sizes(axes: DynamicAxes) -> dict[str, DynamicSize]:
    """Return what is declared of each symbol by a `DynamicSize`; where a symbol stands again, its name is enough.

    Raises:
        OptionError: two of them contradict.
    """
    found: dict[str, DynamicSize] = {}
    for size in (symbol for given in axes.values() for symbol in given.values() if isinstance(symbol, DynamicSize)):
        if found.setdefault(size.name, size) != size:
            raise OptionError(
                f"{size.name} is declared twice, as {found[size.name]} and as {size}.", "One symbol is one size."
            )
    return found


def auto_symbols(axes: DynamicAxes) -> frozenset[str]:
    """Return the symbols that were declared with `Dim.AUTO`, and nowhere by name."""
    given = [symbol for axis in axes.values() for symbol in axis.values()]
    named = {symbol_name(symbol) for symbol in given if not isinstance(symbol, AutoSize)}
    return frozenset(symbol.name for symbol in given if isinstance(symbol, AutoSize)) - named


__all__ = [
    "AutoSize",
    "AxisSymbol",
    "CaptureRequest",
    "DynamicAxes",
    "DynamicSize",
    "auto_symbols",
    "declared_sizes",
    "size_near",
    "symbol_name",
]
