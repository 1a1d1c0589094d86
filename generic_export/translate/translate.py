"""The room's entrance: a `TorchModuleIRGraph` goes in, an `NnefGraph` comes out.

Runs the translations in order, checks every result against the shape and dtype PyTorch computed, drops what nobody
reads, and gives each value the name a person expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from generic_export.errors import GraphError, T2NError, TranslationError
from generic_export.nnef.dtypes import tract_dtype
from generic_export.nnef.graph import Block, NnefFragment, NnefGraph, NnefOperation, NnefVariable
from generic_export.nnef.registries import registries_of
from generic_export.torch_graph.dims import same_shape, symbols_of
from generic_export.torch_graph.ir import (
    FixedTensorList,
    SymbolRange,
    TensorKind,
    TensorVariable,
    TorchModuleIRGraph,
    TorchOp,
)
from generic_export.torch_graph.naming import IdentifierAllocator, identifier
from generic_export.translate.builder import NnefBuilder
from generic_export.translate.choices import Numerics, Spelling
from generic_export.translate.emissions import inner_name, operation_of, reachable, shape_text
from generic_export.translate.registry import translate_call
from generic_export.translate.value import Emission, Value


@dataclass(frozen=True)
class TranslationOptions:
    """What the document should carry besides the model itself.

    Attributes:
        graph_name: NNEF graph identifier.
        numerics: f32 switches.
        spelling: which of two ways to say the same thing is written.
        naming_scheme: see `torch_graph.naming.NAMING_SCHEMES`.
        assertions: further `tract_assert` relations between sizes.
        properties: key/value pairs for `tract_core_properties`.
    """

    graph_name: str = "network"
    numerics: Numerics = field(default_factory=Numerics)
    spelling: Spelling = field(default_factory=Spelling)
    naming_scheme: str = "natural_verbose"
    assertions: Sequence[str] = ()
    properties: Sequence[tuple[str, str | float]] = ()


def translate(graph: TorchModuleIRGraph, options: TranslationOptions | None = None) -> NnefGraph:
    """Translate a captured graph.

    Args:
        graph: what the tracer captured, possibly rewritten by fusions.
        options: names, properties and numerics of the document.

    Raises:
        UnsupportedOperatorError: an operator has no NNEF form.
        TranslationError: an operator was called in a way that has none.
    """
    options = options or TranslationOptions()
    builder = _builder(graph, options)
    values = _Values(graph, builder)
    for op in graph.ops:
        _translate_op(op, builder, values)
    outputs = _output_values(graph, builder, values)
    return _document(graph, options, builder, values, outputs)


def refusals(
    graph: TorchModuleIRGraph, options: TranslationOptions | None = None
) -> tuple[tuple[TorchOp, T2NError], ...]:
    """Return every operator call that has no translation, or whose arguments its translation refuses, and why.

    The results of a refused call are taken as given, so that what reads them is judged on its own account.
    """
    options = options or TranslationOptions()
    builder = _builder(graph, options)
    values = _Values(graph, builder)
    found = []
    for op in graph.ops:
        try:
            _translate_op(op, builder, values)
        except T2NError as error:
            found.append((op, error))
            for variable in op.outputs:
                if variable is not None:
                    values.bind(variable, builder.external(variable.shape, variable.dtype, variable.name))
    return tuple(found)


def translate_body(graph: TorchModuleIRGraph, builder: NnefBuilder, inputs: Sequence[Value]) -> list[Value]:
    """Translate the operators of an inner graph (a loop's body) where its inputs are values already."""
    values = _Values(graph, builder, inputs)
    for op in graph.ops:
        _translate_op(op, builder, values)
    return [values.of(variable) for variable in graph.outputs]


def _builder(graph: TorchModuleIRGraph, options: TranslationOptions) -> NnefBuilder:
    uses = Counter(name for op in graph.ops for name in {tensor.name for tensor in op.tensor_inputs()})
    shared = frozenset(parameter.name for parameter in graph.parameters if uses[parameter.name] > 1)
    return NnefBuilder(numerics=options.numerics, spelling=options.spelling, shared_parameters=shared)


class _Values:
    """Which NNEF value stands for which captured tensor, and what it should be called."""

    def __init__(self, graph: TorchModuleIRGraph, builder: NnefBuilder, inputs: Sequence[Value] | None = None) -> None:
        self._builder = builder
        self._values: dict[str, Value] = {}
        self._bound: list[TensorVariable] = []
        self.names: dict[int, str] = {}
        if inputs is None:
            builder.block = Block("inputs")
            inputs = [builder.external(variable.shape, variable.dtype, variable.name) for variable in graph.inputs]
        for variable, value in zip(graph.inputs, inputs, strict=True):
            self.bind(variable, value)

    def bind(self, variable: TensorVariable, value: Value) -> None:
        self._values[variable.name] = value
        self._bound.append(variable)
        # A stored tensor keeps its label as its name, whatever casts and views that change nothing return it.
        if not value.literal and self._builder.label_of(value) is None:
            self.names.setdefault(value.number, variable.name)

    def of(self, variable: TensorVariable) -> Value:
        known = self._values.get(variable.name)
        if known is None:
            if variable.kind not in (TensorKind.PARAMETER, TensorKind.CONSTANT):
                raise GraphError(f"{variable.name!r} is read before an operator assigns it.")
            known = self._builder.variable(variable.name, variable.shape, variable.dtype)
            self._values[variable.name] = known
        return known

    def captured(self) -> Iterator[tuple[TensorVariable, int]]:
        """Yield each captured tensor with the number of the value that stands for it, results of operators last."""
        for variable in self._bound:
            yield variable, self._values[variable.name].number

    def replace_tensors(self, argument: Any) -> Any:
        """Return an argument with every tensor replaced by its value."""
        if isinstance(argument, TensorVariable):
            return self.of(argument)
        if isinstance(argument, (FixedTensorList, tuple)):
            return tuple(self.replace_tensors(element) for element in argument)
        return argument


def _translate_op(op: TorchOp, builder: NnefBuilder, values: _Values) -> None:
    builder.block = Block(op.module_path, op.module_type)
    builder.hint = next((out.name for out in op.outputs if out is not None), op.module_path)
    builder.result_shapes = tuple(out.shape if out is not None else () for out in op.outputs)
    arguments = {name: values.replace_tensors(argument) for name, argument in op.arguments().items()}
    try:
        results = translate_call(builder, op, arguments)
    except T2NError as error:
        if str(op.target) in error.message:
            raise
        where = f"{op.target} at {op.module_path or '(root)'}" + (f" ({op.source})" if op.source else "")
        raise type(error)(f"{where}: {error.message}", error.hint) from error
    if len(results) != len(op.outputs):
        raise TranslationError(
            f"{op.target}: the translation returned {len(results)} values, but the schema has {len(op.outputs)}."
        )
    for variable, value in zip(op.outputs, results, strict=True):
        if variable is not None:
            _check_result(op, variable, value)
            values.bind(variable, value)


def _check_result(op: TorchOp, variable: TensorVariable, value: Value) -> None:
    """A translation must give what PyTorch computed.

    tract itself checks little (docs/contributing/engine-facts.md#ranks-and-unchecked-shapes).
    """
    if value.dtype is not variable.dtype:
        raise GraphError(
            f"{op.target} at {op.module_path}: translated to {value.dtype}, but PyTorch has {variable.dtype}."
        )
    if not same_shape(value.shape, variable.shape):
        raise GraphError(
            f"{op.target} at {op.module_path} ({op.source}): translated to shape {shape_text(value.shape)}, but "
            f"PyTorch has {shape_text(variable.shape)}.",
            symbols=[name for dim in (*value.shape, *variable.shape) for name in symbols_of(dim)],
        )


def _output_values(graph: TorchModuleIRGraph, builder: NnefBuilder, values: _Values) -> list[Value]:
    """Return one distinct computed value per output; an input or a repeated value is copied."""
    builder.block = Block("outputs")
    inputs = {values.of(variable).number for variable in graph.inputs}
    taken: set[int] = set()
    outputs = []
    for name, variable in zip(graph.output_names, graph.outputs, strict=True):
        builder.hint = name
        value = builder.materialised(values.of(variable))
        if value.number in taken or value.number in inputs or builder.label_of(value) is not None:
            (value,) = builder.emit_many("copy", [value], [(value.shape, value.dtype)], label=name)
        taken.add(value.number)
        values.names[value.number] = name
        outputs.append(value)
    return outputs


def _document(
    graph: TorchModuleIRGraph,
    options: TranslationOptions,
    builder: NnefBuilder,
    values: _Values,
    outputs: Sequence[Value],
) -> NnefGraph:
    emissions = reachable(builder.emissions, outputs, kept={values.of(variable).number for variable in graph.inputs})
    symbols = [symbol.name for symbol in graph.symbols]
    names = _identifiers(emissions, graph, options.naming_scheme, symbols, values.names)
    operations = tuple(operation_of(emission, names) for emission in emissions)
    fragments = _called_fragments(operations, builder.fragments)
    called = {operation.operator for operation in operations}.union(*(fragment.calls for fragment in fragments))
    return NnefGraph(
        name=identifier(options.graph_name),
        inputs=tuple(names[values.of(variable).number] for variable in graph.inputs),
        outputs=tuple(names[value.number] for value in outputs),
        operations=operations,
        variables=tuple(_variable(emission, builder) for emission in emissions if emission.operator == "variable"),
        symbols=tuple(symbols),
        assertions=tuple(_range_assertions(graph.symbols)) + tuple(options.assertions),
        registries=registries_of(called),
        fragments=fragments,
        properties=tuple(options.properties),
        origins=tuple((names[number], variable.name) for variable, number in values.captured() if number in names),
    )


def _called_fragments(
    operations: Sequence[NnefOperation], fragments: Mapping[str, NnefFragment]
) -> tuple[NnefFragment, ...]:
    """Return the fragments that the body calls, hands to a scan, or that one of those calls."""
    wanted = {operation.operator for operation in operations}
    wanted |= {str(dict(operation.attributes).get("body")) for operation in operations}
    waiting = [fragments[name] for name in wanted if name in fragments]
    found: dict[str, NnefFragment] = {}
    while waiting:
        fragment = waiting.pop()
        if fragment.name not in found:
            found[fragment.name] = fragment
            waiting.extend(fragments[name] for name in fragment.calls if name in fragments)
    return tuple(fragment for name, fragment in fragments.items() if name in found)


def _identifiers(
    emissions: Sequence[Emission],
    graph: TorchModuleIRGraph,
    scheme: str,
    symbols: Sequence[str],
    dotted: Mapping[int, str],
) -> dict[int, str]:
    interface = {identifier(variable.name) for variable in graph.inputs} | {identifier(n) for n in graph.output_names}
    allocator = IdentifierAllocator(scheme, [*symbols, *interface])
    outputs = set(graph.output_names)
    names: dict[int, str] = {}
    for emission in emissions:
        for value in emission.outputs:
            name = dotted.get(value.number)
            if emission.operator == "tract_core_external" or name in outputs:
                names[value.number] = identifier(name or emission.hint)
            else:
                names[value.number] = allocator.allocate(name or inner_name(emission))
    return names


def _variable(emission: Emission, builder: NnefBuilder) -> NnefVariable:
    (value,) = emission.outputs
    if not all(isinstance(dim, int) for dim in value.shape):
        raise GraphError(
            f"stored tensor {emission.label!r} has a dynamic shape {shape_text(value.shape)}.",
            symbols=[name for dim in value.shape for name in symbols_of(dim)],
        )
    shape = tuple(int(dim) for dim in value.shape)  # type: ignore[arg-type]
    return NnefVariable(emission.label, shape, tract_dtype(value.dtype), builder.parts.get(emission.label))


def _range_assertions(symbols: Sequence[SymbolRange]) -> list[str]:
    lines = []
    for symbol in symbols:
        lines.append(f"{symbol.name} >= {symbol.lower}")
        if symbol.upper is not None:
            lines.append(f"{symbol.name} <= {symbol.upper}")
    return lines
