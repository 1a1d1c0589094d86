"""Which axes are dynamic, and which are the same size: named symbols fitted to the sizes seen in several input sets.

In: a recording. Out: `Symbols`, which says any vector of sizes in named symbols (`S+P`, `2*S`), and an `AxisReport`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from generic_export.debug.record.recording import RecordedCall, Recording
from generic_export.debug.records import Axis, AxisReport, LeafKind
from generic_export.errors import OptionError
from generic_export.torch_graph.dims import dim_symbol

DEFAULT_NAMES = ("B", "S", "P", "T", "U", "V", "W")

Overrides = Mapping[str, Mapping[int, str]]
"""`{input of the root: {axis: symbol}}`."""

# With few sets nearly any line can be laid through the sizes: only plain ones are believed.
_MAX_OFFSET = 8
_MAX_FACTOR = 16
_ENOUGH_SETS = 3


@dataclass(frozen=True)
class Form:
    """One size in named symbols: the sum of `factor * symbol`, plus a number.

    Attributes:
        terms: (symbol, factor), factors not 0; a symbol may be a product, written `B*S`.
        offset: the number.
    """

    terms: tuple[tuple[str, int], ...] = ()
    offset: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether it has no symbol."""
        return not self.terms

    @property
    def bare(self) -> str | None:
        """The symbol, when it is nothing else."""
        plain = len(self.terms) == 1 and self.terms[0][1] == 1 and self.offset == 0
        return self.terms[0][0] if plain else None

    @property
    def cost(self) -> tuple[int, int, int]:
        """How far-fetched it is: few symbols, small factors, small offsets first."""
        return len(self.terms), sum(abs(factor) for _, factor in self.terms), abs(self.offset)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Return the size for sizes of the symbols."""
        return sum(factor * _product(symbol, sizes) for symbol, factor in self.terms) + self.offset

    def __str__(self) -> str:
        parts = [symbol if factor == 1 else f"{factor}*{symbol}" for symbol, factor in self.terms]
        if self.offset or not parts:
            parts.append(str(self.offset))
        return "+".join(parts).replace("+-", "-")


def _product(symbol: str, sizes: Mapping[str, int]) -> int:
    result = 1
    for factor in symbol.split("*"):
        result *= sizes[factor]
    return result


@dataclass
class Symbols:
    """The symbols of a recording.

    Attributes:
        values: size of each symbol in each input set.
        warnings: what is doubtful about them.
    """

    values: dict[str, dict[int, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: list(DEFAULT_NAMES))

    def form(self, sizes: Sequence[tuple[int, int]]) -> Form | None:
        """Say sizes, given as (input set, size), in symbols.

        Returns:
            A constant when all are equal; None when no form fits.
        """
        if len({size for _, size in sizes}) == 1:
            return Form(offset=sizes[0][1])
        fitting = sorted((form for form in self._candidates(sizes)), key=lambda form: form.cost)
        if len(fitting) > 1 and fitting[0].cost[:2] == fitting[1].cost[:2] and fitting[0].cost == fitting[1].cost:
            self.warn(f"sizes {_listed(sizes)} are {fitting[0]} as well as {fitting[1]}: record one more input set.")
        return fitting[0] if fitting else None

    def named(self, sizes: Sequence[tuple[int, int]], axis: int | None = None) -> Form:
        """Return the form of sizes that vary; a symbol is made where none fits, by preference `B` for a first axis."""
        found = self.form(sizes)
        if found is not None:
            return found
        free = [name for name in self.names if name not in self.values]
        preferred = [name for name in free if (name == self.names[0]) == (axis == 0)] or free
        return Form(((self.add(dict(sizes), preferred[0] if preferred else ""), 1),))

    def add(self, values: dict[int, int], name: str = "") -> str:
        """Make a symbol."""
        name = name or next((n for n in self.names if n not in self.values), f"D{len(self.values)}")
        dim_symbol(name)  # refuses names that the engine cannot parse
        self.values[name] = values
        return name

    def warn(self, message: str) -> None:
        """Note something once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def sizes(self, set_index: int) -> dict[str, int]:
        """Return the size of each symbol in an input set, where it is known."""
        return {name: values[set_index] for name, values in self.values.items() if set_index in values}

    def _candidates(self, sizes: Sequence[tuple[int, int]]) -> Iterator[Form]:
        sets = [index for index, _ in sizes]
        wanted = [size for _, size in sizes]
        columns = {
            name: [values[index] for index in sets]
            for name, values in self.values.items()
            if all(index in values for index in sets)
        }
        for name, column in columns.items():
            yield from _lines((name,), [column], wanted, wide=len(set(wanted)) >= _ENOUGH_SETS)
        for pair in itertools.combinations(columns, 2):
            summed = [a + b for a, b in zip(columns[pair[0]], columns[pair[1]], strict=True)]
            yield from (form for form in _lines(pair, [summed], wanted, wide=False) if form.terms[0][1] == 1)
            product = [a * b for a, b in zip(columns[pair[0]], columns[pair[1]], strict=True)]
            if product == wanted and not any(column == wanted for column in columns.values()):
                yield Form((("*".join(pair), 1),))


def _lines(names: Sequence[str], columns: Sequence[list[int]], wanted: list[int], *, wide: bool) -> Iterator[Form]:
    """Yield `factor * size + offset` through all points, when there is a plain one."""
    (column,) = columns
    low, high = min(range(len(column)), key=column.__getitem__), max(range(len(column)), key=column.__getitem__)
    span = column[high] - column[low]
    if not span or (wanted[high] - wanted[low]) % span:
        return
    factor = (wanted[high] - wanted[low]) // span
    offset = wanted[low] - factor * column[low]
    plain = offset == 0 or (factor == 1 and abs(offset) <= _MAX_OFFSET) or (wide and abs(offset) <= _MAX_OFFSET)
    if not 1 <= factor <= _MAX_FACTOR or not plain:
        return
    if all(factor * size + offset == goal for size, goal in zip(column, wanted, strict=True)):
        yield Form(tuple((name, factor) for name in names), offset)


def _listed(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(size) for _, size in sizes)


# --- the axes of a recording ------------------------------------------------------------------------


def infer_axes(
    recording: Recording, overrides: Overrides | None = None, names: Sequence[str] = DEFAULT_NAMES
) -> tuple[Symbols, AxisReport]:
    """Fit symbols to the sizes of the root's inputs.

    Args:
        recording: of several input sets; with one, everything is static.
        overrides: symbols of axes of the root's inputs; the others follow.
        names: symbols to use for axes without one, in the order in which they are met.

    Raises:
        OptionError: an override names no input, or no axis of it.
    """
    symbols = Symbols(names=list(names))
    roots = [recorded for recorded in recording.roots() if recorded.module is recording.model] or recording.roots()
    seen = _sizes_by_axis(roots)
    _check_overrides(overrides or {}, seen)
    if len(roots) < 2:
        symbols.warn("one input set: no dynamic axis could be inferred, all sizes are static.")
    elif not any(len({size for _, size in sizes}) > 1 for sizes in seen.values()):
        symbols.warn("all input sets have the same sizes: no dynamic axis could be inferred.")
    _declare(symbols, seen, overrides or {})
    for (leaf, axis), sizes in seen.items():
        if len({size for _, size in sizes}) > 1 and (overrides or {}).get(leaf, {}).get(axis) is None:
            symbols.named(sizes, axis)
    if len(roots) > 1:
        _warn_of_small_sizes(symbols, seen, overrides or {})
    axes = tuple(
        Axis(leaf, axis, str(form), tuple(size for _, size in sizes))
        for (leaf, axis), sizes in seen.items()
        if (form := axis_form(symbols, leaf, axis, sizes, overrides or {})) and not form.is_constant
    )
    sets = sorted({recorded.call.set_index for recorded in roots})
    rows = tuple((name, tuple(values.get(index) for index in sets)) for name, values in symbols.values.items())
    return symbols, AxisReport(rows, axes, tuple(symbols.warnings))


def axis_form(
    symbols: Symbols, leaf: str, axis: int, sizes: Sequence[tuple[int, int]], overrides: Overrides
) -> Form | None:
    """Return the form of one axis: as overridden, or as it fits."""
    name = overrides.get(leaf, {}).get(axis)
    return Form(((name, 1),)) if name is not None else symbols.form(sizes)


def _sizes_by_axis(calls: Sequence[RecordedCall]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for recorded in calls:
        for leaf in recorded.call.inputs:
            if leaf.kind is LeafKind.TENSOR and not leaf.alias_of:
                for axis, size in enumerate(leaf.sizes):
                    seen.setdefault((leaf.name, axis), []).append((recorded.call.set_index, size))
    return seen


def _check_overrides(overrides: Overrides, seen: Mapping[tuple[str, int], object]) -> None:
    known = sorted({leaf for leaf, _ in seen})
    for leaf, axes in overrides.items():
        for axis in axes:
            if (leaf, axis) not in seen:
                raise OptionError(
                    f"axes: the model has no input {leaf!r} with an axis {axis}.", f"Inputs: {', '.join(known)}."
                )


def _declare(symbols: Symbols, seen: Mapping[tuple[str, int], list[tuple[int, int]]], overrides: Overrides) -> None:
    for leaf, axes in overrides.items():
        for axis, name in axes.items():
            sizes = dict(seen[leaf, axis])
            twin = next((other for other, values in symbols.values.items() if values == sizes and other != name), None)
            if twin is not None and len(sizes) > 1:
                symbols.warn(f"{name} and {twin} have the same sizes in every set: record one more input set.")
            if name not in symbols.values:
                symbols.add(sizes, name)
            if len(set(sizes.values())) == 1:
                symbols.warn(
                    f"axis {axis} of {leaf} is {next(iter(sizes.values()))} in every set, but declared {name}."
                )


def _warn_of_small_sizes(
    symbols: Symbols, seen: Mapping[tuple[str, int], list[tuple[int, int]]], overrides: Overrides
) -> None:
    for (leaf, axis), sizes in seen.items():
        found = {size for _, size in sizes}
        # Of the many slots of a state one warning is enough, and the plain inputs give it.
        is_open = overrides.get(leaf, {}).get(axis) is None and not re.search(r"\d$", leaf)
        if is_open and (found <= {0} or found <= {1}):
            symbols.warn(
                f"axis {axis} of {leaf} is {next(iter(found))} in every set, taken for static; "
                f"if it is dynamic say axes={{{leaf!r}: {{{axis}: 'B'}}}}."
            )


__all__ = ["DEFAULT_NAMES", "Form", "Overrides", "Symbols", "axis_form", "infer_axes"]
