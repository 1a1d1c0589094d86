"""The NNEF document: plain data, free of torch.fx and of aten.

Made by `translate/translate.py`, checked here, printed by `text.py`. Names are NNEF identifiers, sizes are already text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from generic_export.errors import GraphError
from generic_export.weights.part import TensorPart


@dataclass(frozen=True)
class Reference:
    """The use of a value by its identifier."""

    name: str


@dataclass(frozen=True)
class DimLiteral:
    """A size in tract's dimension language, such as `S+P`."""

    text: str


@dataclass(frozen=True)
class ArrayLiteral:
    """An array of arguments: shapes, axes, lists of values."""

    elements: tuple[Argument, ...]


@dataclass(frozen=True)
class TupleLiteral:
    """A tuple of arguments, as in the padding pairs of a convolution."""

    elements: tuple[Argument, ...]


Argument = Reference | DimLiteral | ArrayLiteral | TupleLiteral | float | int | bool | str


@dataclass(frozen=True)
class Block:
    """The module of the user's model that a run of operations comes from."""

    path: str = ""
    module_type: str = ""


@dataclass(frozen=True)
class NnefOperation:
    """One assignment of the graph body.

    Attributes:
        operator: NNEF or tract operator name.
        inputs: positional arguments.
        attributes: named arguments, in printing order.
        outputs: identifiers assigned.
        block: the module it belongs to.
        note: what the reader wants to know of the result: element type and shape.
        generic_type: the `<scalar>` written after the operator name (variables and externals), or "".
    """

    operator: str
    inputs: tuple[Argument, ...]
    attributes: tuple[tuple[str, Argument], ...]
    outputs: tuple[str, ...]
    block: Block = Block()
    note: str = ""
    generic_type: str = ""


@dataclass(frozen=True)
class NnefVariable:
    """A tensor that lies in `<label>.dat` beside the graph.

    Attributes:
        label: path in the archive, without `.dat`.
        shape: concrete.
        dtype: a tract name (`f16`), or a block format of `nnef.dat` (`q4_0`).
        part: what it is of a parameter, when it is not the parameter that bears its label.
        factor: what the parameter's values are multiplied with before they are stored: a power of two.
        residual_of: label of the variable that it is added to, where a parameter is stored as the sum of two; else "".
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    part: TensorPart | None = None
    factor: float = 1.0
    residual_of: str = ""

    @property
    def parameter(self) -> str:
        """Name of the model's tensor that its values come from."""
        return (self.residual_of or self.label) if self.part is None else self.part.parameter

    @property
    def values(self) -> int:
        """How many values of the model it holds: none of its own, where it is added to another one."""
        return 0 if self.residual_of else math.prod(self.shape)


@dataclass(frozen=True)
class NnefFragment:
    """A named piece of NNEF text that the body may call: `fragment name(...) -> (...) { ... }`.

    Attributes:
        name: identifier.
        text: the whole fragment.
        calls: operators and fragments that its own body calls, where they must be known (registries, other fragments).
    """

    name: str
    text: str
    calls: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NnefGraph:
    """A whole `graph.nnef`.

    Attributes:
        name: graph identifier (tract shows it as the property `tract.name`).
        inputs, outputs: identifiers, in the order of the module's flattened inputs and outputs.
        operations: the body in execution order; the `external`s come first, in the order of `inputs`.
        variables: every tensor that the archive must hold.
        symbols: names for `extension tract_symbol`.
        assertions: relations between sizes, for `extension tract_assert`.
        registries: names for `extension tract_registry`.
        fragments: only those used.
        properties: what `tract_core_properties` returns: producer, versions, source model.
        origins: (identifier, name of the captured tensor that it is) for inputs and results; not written.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operations: tuple[NnefOperation, ...]
    variables: tuple[NnefVariable, ...] = ()
    symbols: tuple[str, ...] = ()
    assertions: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    fragments: tuple[NnefFragment, ...] = ()
    properties: tuple[tuple[str, str | float], ...] = field(default=())
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)


def check_graph(graph: NnefGraph) -> None:
    """Check that each identifier is assigned once and before it is used.

    Raises:
        GraphError: naming the identifier and the operation.
    """
    defined: set[str] = set()
    for operation in graph.operations:
        for name in references(operation):
            if name not in defined:
                raise GraphError(
                    f"{operation.operator} -> {operation.outputs[0]}: {name!r} is used before it is defined."
                )
        for name in operation.outputs:
            if name in defined:
                raise GraphError(f"{operation.operator}: {name!r} is assigned twice.")
            defined.add(name)
    for name in graph.outputs:
        if name not in defined:
            raise GraphError(f"output {name!r} of graph {graph.name!r} is never assigned.")
    if len(set(graph.outputs)) != len(graph.outputs):
        raise GraphError(f"graph {graph.name!r} lists an output twice: {', '.join(graph.outputs)}.")


def references(operation: NnefOperation) -> list[str]:
    """Return the identifiers that an operation reads, in order, repeated when read twice."""
    return _references(operation.inputs + tuple(value for _, value in operation.attributes))


def _references(arguments: tuple[Argument, ...]) -> list[str]:
    found: list[str] = []
    for argument in arguments:
        if isinstance(argument, Reference):
            found.append(argument.name)
        elif isinstance(argument, (ArrayLiteral, TupleLiteral)):
            found.extend(_references(argument.elements))
    return found
