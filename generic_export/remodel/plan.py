"""What a remodel plan says: frozen dataclasses, the same whether written in Python, YAML or JSON.

In: nothing but plain values. Out: read by `resolve.py`, which holds a plan against a module. Names are those of the module before
any renaming; symbols may be called by their own name or by the one that `aliases` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from generic_export.errors import OptionError

AxisName: TypeAlias = int | str
"""An axis by its number (negative from the end) or by the symbol on it."""

Constant: TypeAlias = "int | float | bool | tuple[Constant, ...]"
"""A number, or nested rows of numbers."""


@dataclass(frozen=True)
class BindSize:
    """An input that holds how large an axis of another one is, as a length holds the audio's time axis."""

    source: str
    axis: AxisName


@dataclass(frozen=True)
class BindValue:
    """An input that holds the same values as another one, which may be bound itself."""

    source: str


@dataclass(frozen=True)
class BindConstant:
    """An input that always holds the same values, repeated along axes that they lack."""

    value: Constant


Bind: TypeAlias = BindSize | BindValue | BindConstant


@dataclass(frozen=True)
class InputPlan:
    """What becomes of one input.

    Attributes:
        shape: every axis as a size or a symbol, in place of what the sub-graph declares; None leaves that.
        axes: symbols of single axes, by axis number.
        collapse: symbols of axes that disappear; the module sees them with size 1.
        bind: where its values come from, when the input itself disappears.
        rename: its name in the archive; None keeps the module's.
    """

    shape: tuple[AxisName, ...] | None = None
    axes: Mapping[int, str] = field(default_factory=dict)
    collapse: tuple[str, ...] = ()
    bind: Bind | None = None
    rename: str | None = None


@dataclass(frozen=True)
class OutputPlan:
    """What becomes of one output.

    Attributes:
        collapse: axes of size 1 that disappear, by number or by the symbol that makes their size.
        rename: its name in the archive; None keeps the module's.
    """

    collapse: tuple[AxisName, ...] = ()
    rename: str | None = None


@dataclass(frozen=True)
class SymbolConstraint:
    """What sizes a symbol may stand for.

    Attributes:
        min, max: the smallest and the largest one.
        multiple_of: what divides them all.
        equals: the size it always is, as text over other symbols; a lone symbol makes the two one.
    """

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    equals: str | None = None


@dataclass(frozen=True)
class SubgraphPlan:
    """What becomes of one module's boundary.

    Attributes:
        inputs: by input name (`states.0` for the first of a tuple).
        outputs: by output name.
        outputs_keep: the outputs of the archive, in its order; None keeps all.
        aliases: by new name, the symbols that become that one.
        pins: sizes of symbols that become static.
        constraints: by symbol.
        assertions: relations between symbols, such as `T <= 4*S`, that tract may rely on.
    """

    inputs: Mapping[str, InputPlan] = field(default_factory=dict)
    outputs: Mapping[str, OutputPlan] = field(default_factory=dict)
    outputs_keep: tuple[str, ...] | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pins: Mapping[str, int] = field(default_factory=dict)
    constraints: Mapping[str, SymbolConstraint] = field(default_factory=dict)
    assertions: tuple[str, ...] = ()


Path: TypeAlias = tuple[AxisName, ...]
"""Where something stands in a plan: keys and positions from the root, `("encoder", "inputs", "audio", "collapse", 0)`."""


@dataclass(frozen=True)
class Origin:
    """Where a plan was read.

    Attributes:
        name: of the file; "" for a plan made in Python.
        lines: line (counted from 1) of everything in it.
    """

    name: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)

    def describe(self, path: Path) -> str:
        """Return where something stands, as people look for it: `plan.yaml:12: encoder.inputs.audio.collapse`."""
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)
        line = f":{self.lines[known]}" if known is not None else ""
        parts = [f"{self.name}{line}"] if self.name else []
        return ": ".join([*parts, dotted(path)] if path else parts)


@dataclass(frozen=True)
class RemodelPlan:
    """One plan for all sub-graphs of a model.

    Attributes:
        subgraphs: by the sub-graph's name; one that is not named is exported as it is.
        origin: where the plan was read; not part of what it says.
    """

    subgraphs: Mapping[str, SubgraphPlan] = field(default_factory=dict)
    origin: Origin = field(default=Origin(), compare=False, repr=False)


@dataclass(frozen=True)
class Place:
    """A spot in a plan, for errors about what stands there."""

    origin: Origin = Origin()
    path: Path = ()

    def at(self, *steps: AxisName) -> Place:
        """Return a spot below this one."""
        return Place(self.origin, (*self.path, *steps))

    def error(self, message: str, hint: str | None = None) -> OptionError:
        """Return the error that names this spot."""
        where = self.origin.describe(self.path)
        return OptionError(f"{where}: {message}" if where else message, hint)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let an error about a name or a size, raised inside, say this spot."""
        try:
            yield
        except OptionError as error:
            raise self.error(error.message, error.hint) from None

    def unknown(self, what: str, name: object, known: Iterable[str]) -> OptionError:
        """Return the error for a name that does not exist, with the nearest that does."""
        names = list(known)
        near = get_close_matches(str(name), names, n=1)
        listed = f"Known: {', '.join(names)}." if names else "There is none."
        return self.error(
            f"{what} {str(name)!r} is unknown.", f"Did you mean {near[0]!r}? {listed}" if near else listed
        )


def dims_text(dims: Iterable[AxisName]) -> str:
    """Return axes as text: `[B, 80, T]`."""
    return f"[{', '.join(map(str, dims))}]"


def dotted(path: Path) -> str:
    """Return a path as text: `encoder.inputs.audio.collapse[0]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
