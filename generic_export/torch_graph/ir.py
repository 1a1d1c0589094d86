"""The captured graph: plain frozen data between the tracer and the translations.

Created by `tracer.py`, rewritten (into a new graph) by fusions, read by `ops/`. Sizes are `dims.Dim`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from generic_export.compat import OpOverload, schema_of
from generic_export.torch_graph.dims import Dim, Shape
from generic_export.torch_graph.request import DynamicSize


class TensorKind(enum.Enum):
    """Where a tensor of the graph comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    RESULT = "result"


@dataclass(frozen=True)
class TensorVariable:
    """One tensor of the graph.

    Attributes:
        name: unique in the graph; for a parameter or buffer its fully qualified name in the module.
        shape: sizes, symbolic where the axis is dynamic.
        dtype: PyTorch element type.
        kind: input, parameter (also buffers), constant made by the forward, or result of an operator.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    kind: TensorKind

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class FixedTensorList:
    """A list of tensors of known length: an argument such as `cat`'s, or the result of `split`."""

    elements: tuple[TensorVariable | None, ...]

    def __iter__(self) -> Iterator[TensorVariable | None]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)


Argument = Any
"""TensorVariable, FixedTensorList, Dim, float, bool, str, dtype, None, or a tuple of those."""


@dataclass(frozen=True)
class TorchOp:
    """One call of an ATen (or `torch.library`) operator.

    Attributes:
        target: the exact overload called.
        args: positional arguments, in the order of the overload's schema.
        kwargs: the others, by schema name.
        outputs: the tensors it makes; None where a result is never used as a tensor.
        module_path: dotted path of the module whose forward called it ("" for the root).
        module_type: class name of that module.
        source: `file:line` in the user's model, when PyTorch recorded it.
    """

    target: OpOverload
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    outputs: tuple[TensorVariable | None, ...]
    module_path: str = ""
    module_type: str = ""
    source: str = ""

    @property
    def output(self) -> TensorVariable:
        """The only output of a one-output operator."""
        (only,) = self.outputs
        if only is None:
            raise ValueError(f"{self.target} has no tensor output")
        return only

    def arguments(self) -> dict[str, Argument]:
        """Return the call's arguments by schema name; those left out keep the schema's default by not being listed."""
        schema = schema_of(self.target).arguments
        return {argument.name: value for argument, value in zip(schema, self.args, strict=False)} | dict(self.kwargs)

    def with_arguments(self, changes: Mapping[str, Argument]) -> TorchOp:
        """Return the call with other values for some arguments, by schema name."""
        names = [argument.name for argument in schema_of(self.target).arguments][: len(self.args)]
        args = tuple(changes.get(name, value) for name, value in zip(names, self.args, strict=True))
        further = {name: value for name, value in changes.items() if name not in names}
        return replace(self, args=args, kwargs={**self.kwargs, **further})

    def tensor_inputs(self) -> Iterator[TensorVariable]:
        """Yield every tensor among the arguments, in order, repeated when used twice."""
        for argument in (*self.args, *self.kwargs.values()):
            yield from _tensors_in(argument)


def _tensors_in(argument: Argument) -> Iterator[TensorVariable]:
    if isinstance(argument, TensorVariable):
        yield argument
    elif isinstance(argument, (FixedTensorList, tuple)):
        for element in argument:
            yield from _tensors_in(element)


@dataclass(frozen=True)
class SymbolRange:
    """The values PyTorch proved (or was told) a symbol can take; `upper` is None when unbounded."""

    name: str
    lower: int
    upper: int | None


@dataclass(frozen=True)
class SizeCondition:
    """A relation between sizes that a graph needs.

    Attributes:
        relation: as tract reads it; None where it has no words for it.
        text: the same as PyTorch has it.
        source: file and line that decided by it.
        stated: it is a bound of a symbol, which the document states anyway.
        required: the module itself raises an error where it does not hold, so nobody has to be held to it.
    """

    relation: str | None
    text: str
    source: str
    stated: bool = False
    required: bool = False


@dataclass(frozen=True)
class TorchModuleIRGraph:
    """A whole captured module, in execution order.

    Attributes:
        inputs: user inputs, in the order of the flattened forward arguments.
        outputs: user outputs, flattened; an input or a parameter may stand here too.
        ops: operators in execution order.
        parameters: every parameter and buffer that an operator reads, by fully qualified name.
        constants: tensors that the forward itself creates, by name, with their values.
        symbols: the dynamic sizes, in the order of their first appearance in the inputs.
        output_names: a name per output, in the same order.
        conditions: what sizes must be for the graph to do what the module does, beside their ranges.
        declarations: multiples that PyTorch assumed of sizes without a word of the user's, as they would have to be declared.
    """

    inputs: tuple[TensorVariable, ...]
    outputs: tuple[TensorVariable, ...]
    ops: tuple[TorchOp, ...]
    parameters: tuple[TensorVariable, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    symbols: tuple[SymbolRange, ...] = ()
    output_names: tuple[str, ...] = ()
    conditions: tuple[SizeCondition, ...] = ()
    declarations: tuple[DynamicSize, ...] = ()

    def producers(self) -> dict[str, TorchOp]:
        """Return, for the name of each result, the operator that makes it."""
        return {out.name: op for op in self.ops for out in op.outputs if out is not None}

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Return the size that each symbol has where the inputs are these tensors."""
        return {
            str(dim): int(size)
            for variable, tensor in zip(self.inputs, tensors, strict=True)
            for dim, size in zip(variable.shape, tensor.shape, strict=False)
            if isinstance(dim, sympy.Symbol)
        }

    def use_counts(self) -> dict[str, int]:
        """Return how many times each tensor is read, by an operator or as an output of the graph."""
        counts: dict[str, int] = {}
        for op in self.ops:
            for tensor in op.tensor_inputs():
                counts[tensor.name] = counts.get(tensor.name, 0) + 1
        for tensor in self.outputs:
            counts[tensor.name] = counts.get(tensor.name, 0) + 1
        return counts


def is_dim(value: object) -> bool:
    """Say whether an argument is a size: an integer (not a bool) or a symbolic expression."""
    return isinstance(value, sympy.Expr) or (isinstance(value, int) and not isinstance(value, bool))


__all__ = [
    "Argument",
    "Dim",
    "FixedTensorList",
    "SizeCondition",
    "SymbolRange",
    "TensorKind",
    "TensorVariable",
    "TorchModuleIRGraph",
    "TorchOp",
    "is_dim",
]
