"""The boundary before and after: four stages, as text, as plain data, and as the lines that differ.

In: a `Boundary`. Out: `BoundaryStages`: raw (as the module is), collapsed (axes gone), bound (inputs gone), final (names, sizes
and outputs of the archive).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import ndiff
from typing import Any

import torch

from generic_export.nnef.dtypes import TRACT_DTYPES
from generic_export.remodel.boundary import Boundary, InputBoundary, OutputBoundary
from generic_export.remodel.plan import AxisName, dims_text

STAGES = ("raw", "collapsed", "bound", "final")


@dataclass(frozen=True)
class Port:
    """An input or output at one stage.

    Attributes:
        kind: `input` or `output`.
        name: its name.
        dtype: element type, as tract calls it.
        dims: its axes: a size, a symbol, or `f(T)` for a size that depends on `T` otherwise.
    """

    kind: str
    name: str
    dtype: str
    dims: tuple[AxisName, ...]

    @property
    def shape(self) -> str:
        """The axes as text."""
        return dims_text(self.dims)

    def __str__(self) -> str:
        return f"{self.kind:<6}  {self.name}  {self.dtype}{self.shape}"


@dataclass(frozen=True)
class Interface:
    """A boundary at one stage.

    Attributes:
        ports: inputs in order, then outputs in order.
        relations: what holds between the symbols.
        notes: where the inputs that are gone come from.
    """

    ports: tuple[Port, ...]
    relations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return it as text, a line for each port, relation and note."""
        return [
            *map(str, self.ports),
            *(f"assert  {relation}" for relation in self.relations),
            *(f"bound   {note}" for note in self.notes),
        ]

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data."""

        def listed(kind: str) -> list[dict[str, Any]]:
            ports = [port for port in self.ports if port.kind == kind]
            return [{"name": port.name, "dtype": port.dtype, "shape": list(port.dims)} for port in ports]

        return {
            "inputs": listed("input"),
            "outputs": listed("output"),
            "assertions": list(self.relations),
            "bound": list(self.notes),
        }


@dataclass(frozen=True)
class BoundaryStages:
    """The stages of one sub-graph.

    Attributes:
        name: of the sub-graph.
        interfaces: its boundary, by stage.
        outer: by kind and name in the module, what the archive calls it; missing where the archive does not have it.
    """

    name: str
    interfaces: Mapping[str, Interface]
    outer: Mapping[tuple[str, str], str]

    @staticmethod
    def of(boundary: Boundary) -> BoundaryStages:
        """Return the stages of a boundary."""
        own = _own_symbols(boundary.side.inputs)
        raw_outputs = [(output, _named(output.dims, own)) for output in boundary.outputs]
        collapsed_outputs = [_port(one, _without(dims, one.collapsed)) for one, dims in raw_outputs]
        inputs = boundary.side.inputs
        collapsed = [_input(one, _without(one.raw_dims, one.collapsed)) for one in inputs]
        staying = [port for port, one in zip(collapsed, inputs, strict=True) if one.bound is None]
        notes = tuple(f"{one.name} = {one.told}" for one in inputs if one.bound is not None)
        return BoundaryStages(
            boundary.name,
            {
                "raw": Interface(
                    (*(_input(one, one.raw_dims) for one in inputs), *(_port(one, dims) for one, dims in raw_outputs)),
                    boundary.own_assertions,
                ),
                "collapsed": Interface((*collapsed, *collapsed_outputs), boundary.own_assertions),
                "bound": Interface((*staying, *collapsed_outputs), boundary.own_assertions, notes),
                "final": Interface(tuple(_final_ports(boundary)), boundary.relations.texts(), notes),
            },
            {("input", one.name): one.outer_name for one in boundary.side.outer}
            | {("output", one.name): one.outer_name for one in boundary.outer_outputs},
        )

    def text(self) -> str:
        """Return all stages as text."""
        blocks = []
        for stage in STAGES:
            blocks.append("\n".join([f"{self.name}, {stage}", *(f"  {x}" for x in self.interfaces[stage].lines())]))
        return "\n\n".join(blocks) + "\n"

    def diff(self, before: str = "raw", after: str = "final") -> str:
        """Return the lines that two stages do not share, `-` before and `+` after; a blank stands before the others."""
        changes = ndiff(self.interfaces[before].lines(), self.interfaces[after].lines())
        return "".join(f"{line}\n" for line in changes if not line.startswith("?"))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per input and output of the module: kind, name, then what it is at each stage ("" where it is gone)."""
        cells: dict[tuple[str, str], list[str]] = {}
        for stage in STAGES[:-1]:
            ports = {(port.kind, port.name): f"{port.dtype}{port.shape}" for port in self.interfaces[stage].ports}
            for key in self.interfaces["raw"].ports:
                cells.setdefault((key.kind, key.name), []).append(ports.get((key.kind, key.name), ""))
        final = {(port.kind, port.name): str(port).split(None, 1)[1] for port in self.interfaces["final"].ports}
        return [
            (*key, *found, final[key[0], self.outer[key]] if key in self.outer else "") for key, found in cells.items()
        ]

    def asdict(self) -> dict[str, Any]:
        """Return all stages as plain data."""
        return {"subgraph": self.name, "stages": {name: self.interfaces[name].asdict() for name in STAGES}}


def _final_ports(boundary: Boundary) -> Iterator[Port]:
    for one in boundary.side.outer:
        yield Port("input", one.outer_name, _dtype(one.dtype), boundary.side.outer_dims(one))
    fixed: dict[AxisName, AxisName] = {symbol: size for symbol, size in boundary.side.fixed.items()}  # noqa: C416
    for output in boundary.outer_outputs:
        dims = tuple(fixed.get(dim, dim) for dim in _without(output.dims, output.collapsed))
        yield Port("output", output.outer_name, _dtype(output.dtype), dims)


def _own_symbols(inputs: Sequence[InputBoundary]) -> dict[AxisName, AxisName]:
    """Return what the module calls the archive's symbols: the first of its names for each."""
    own: dict[AxisName, AxisName] = {}
    for one in inputs:
        for raw, dim in zip(one.raw_dims, one.dims, strict=True):
            own.setdefault(dim, raw)
    return own


def _named(dims: Sequence[AxisName], names: Mapping[AxisName, AxisName]) -> tuple[AxisName, ...]:
    return tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims)


def _without(dims: Sequence[AxisName], gone: Sequence[int]) -> tuple[AxisName, ...]:
    return tuple(dim for axis, dim in enumerate(dims) if axis not in gone)


def _input(one: InputBoundary, dims: tuple[AxisName, ...]) -> Port:
    return Port("input", one.name, _dtype(one.dtype), dims)


def _port(one: OutputBoundary, dims: tuple[AxisName, ...]) -> Port:
    return Port("output", one.name, _dtype(one.dtype), dims)


def _dtype(dtype: torch.dtype) -> str:
    return TRACT_DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
