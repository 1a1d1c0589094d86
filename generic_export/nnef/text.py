"""`graph.nnef` as people read it: one commented block per module, the element type and shape beside each line.

In: an `NnefGraph`. Out: text that tract's parser accepts (docs/contributing/engine-facts.md#graph-language).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from generic_export.errors import GraphError
from generic_export.nnef.graph import (
    Argument,
    ArrayLiteral,
    Block,
    DimLiteral,
    NnefGraph,
    NnefOperation,
    Reference,
    TupleLiteral,
    check_graph,
)

_INDENT = "  "
_NOTE_COLUMN = 110


@dataclass(frozen=True)
class Parameter:
    """A parameter or a result of a fragment: its name, its type in NNEF, and what a reader wants to know of it."""

    name: str
    type: str
    note: str = ""


def graph_text(graph: NnefGraph) -> str:
    """Return the text of a graph, after checking it.

    Raises:
        GraphError: an identifier is undefined or assigned twice, or a literal has no NNEF form (NaN).
    """
    check_graph(graph)
    lines = [*_header(graph), "", *_signature(graph), "{"]
    lines.extend(_body(graph.operations, {fragment.name for fragment in graph.fragments}))
    lines.append("}")
    text = "\n".join(lines) + "\n"
    # tract <= 0.23.7 runs the file through a template engine (docs/contributing/engine-facts.md#container).
    for marker in ("{{", "{%", "{#"):
        if marker in text:
            raise GraphError(f"the text of graph {graph.name!r} contains {marker!r}, which tract reads as a template.")
    return text


def fragment_text(
    name: str, parameters: Sequence[str], results: Sequence[str], operations: Sequence[NnefOperation]
) -> str:
    """Return the text of a fragment whose parameters and results are all tensors."""
    arguments = ", ".join(f"{parameter}: tensor<scalar>" for parameter in parameters)
    answers = ", ".join(f"{result}: tensor<scalar>" for result in results)
    lines = [f"fragment {name}({arguments}) -> ({answers})", "{", *(_line(op) for op in operations), "}"]
    return "\n".join(lines)


def module_fragment_text(
    name: str,
    title: str,
    parameters: Sequence[Parameter],
    results: Sequence[Parameter],
    operations: Sequence[NnefOperation],
) -> str:
    """Return the text of a fragment that stands for modules, a block for each module in it; paths begin at the module.

    Args:
        name: of the fragment.
        title: what a reader should know of it, in one line.
        parameters, results: in order.
        operations: its body.
    """
    declared = [f"{_INDENT}{each.name}: {each.type}," for each in parameters]
    declared[-1] = declared[-1].removesuffix(",")
    column = max(map(len, declared))
    lines = [f"# {title}", f"fragment {name}("]
    for text, each in zip(declared, parameters, strict=True):
        lines.append(f"{text:<{column}}  # {each.note}" if each.note else text)
    answers = ", ".join(f"{each.name}: {each.type}" for each in results)
    return "\n".join([*lines, f") -> ({answers})", "{", *_body(operations), "}"])


def _header(graph: NnefGraph) -> Iterator[str]:
    yield "version 1.0;"
    yield ""
    for registry in graph.registries:
        yield f"extension tract_registry {registry};"
    for symbol in graph.symbols:
        yield f"extension tract_symbol {symbol};"
    for assertion in graph.assertions:
        yield f"extension tract_assert {assertion};"
    if graph.properties:
        yield ""
        yield "fragment tract_core_properties() -> (properties: (string, tensor<scalar>)[])"
        yield "{"
        yield f"{_INDENT}properties = ["
        for index, (key, value) in enumerate(graph.properties):
            comma = "," if index + 1 < len(graph.properties) else ""
            yield f"{_INDENT * 2}({_string(key)}, {argument_text(value)}){comma}"
        yield f"{_INDENT}];"
        yield "}"
    for fragment in graph.fragments:
        yield ""
        yield fragment.text.strip()


def _signature(graph: NnefGraph) -> Iterator[str]:
    line = f"graph {graph.name}({', '.join(graph.inputs)}) -> ({', '.join(graph.outputs)})"
    if len(line) <= _NOTE_COLUMN:
        yield line
        return
    yield f"graph {graph.name}("
    yield f"{_INDENT}{_wrapped(graph.inputs)}"
    yield ") -> ("
    yield f"{_INDENT}{_wrapped(graph.outputs)}"
    yield ")"


def _wrapped(names: tuple[str, ...], per_line: int = 4) -> str:
    rows = [", ".join(names[start : start + per_line]) for start in range(0, len(names), per_line)]
    return f",\n{_INDENT}".join(rows)


def _body(operations: Iterable[NnefOperation], fragments: Collection[str] = ()) -> Iterator[str]:
    current: Block | None = None
    for operation in operations:
        if operation.block != current:
            if current is not None:
                yield ""
            current = operation.block
            yield f"{_INDENT}# {_title(current)}"
        line = _line(operation)
        wraps = operation.operator in fragments and not operation.note and len(line) > _NOTE_COLUMN
        yield from _wrapped_call(operation) if wraps else (line,)


def _wrapped_call(operation: NnefOperation) -> Iterator[str]:
    """Yield the lines of a call that is too long for one."""
    yield f"{_INDENT}{_assigned(operation)} = {operation.operator}("
    row = ""
    arguments = _argument_texts(operation)
    for index, argument in enumerate(arguments):
        text = argument + ("," if index + 1 < len(arguments) else "")
        if row and len(row) + 1 + len(text) > _NOTE_COLUMN:
            yield row
            row = ""
        row = f"{row} {text}" if row else f"{_INDENT * 2}{text}"
    yield row
    yield f"{_INDENT});"


def _title(block: Block) -> str:
    path = block.path or "(root)"
    return f"{path}: {block.module_type}" if block.module_type else path


def _line(operation: NnefOperation) -> str:
    return noted(f"{_INDENT}{_assigned(operation)} = {_call(operation)};", operation.note)


def noted(statement: str, note: str) -> str:
    """Return a line of a body with what a reader wants to know of its result beside it."""
    return f"{statement:<{_NOTE_COLUMN}}  # {note}" if note else statement


def _assigned(operation: NnefOperation) -> str:
    outputs = ", ".join(operation.outputs)
    return f"({outputs})" if len(operation.outputs) > 1 else outputs


def _call(operation: NnefOperation) -> str:
    generic = f"<{operation.generic_type}>" if operation.generic_type else ""
    return f"{operation.operator}{generic}({', '.join(_argument_texts(operation))})"


def _argument_texts(operation: NnefOperation) -> list[str]:
    return [
        *(argument_text(value) for value in operation.inputs),
        *(f"{name}={argument_text(value)}" for name, value in operation.attributes),
    ]


def argument_text(value: Argument) -> str:
    """Return one argument as NNEF text.

    Raises:
        GraphError: a NaN, which NNEF cannot spell (docs/contributing/engine-facts.md#identifiers-and-literals).
    """
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, DimLiteral):
        return value.text
    if isinstance(value, ArrayLiteral):
        return f"[{', '.join(argument_text(element) for element in value.elements)}]"
    if isinstance(value, TupleLiteral):
        return f"({', '.join(argument_text(element) for element in value.elements)})"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return _float(value) if isinstance(value, float) else _string(value)


def _float(value: float) -> str:
    """A float literal always has a dot: an integer would be a size (docs/contributing/engine-facts.md#identifiers-and-literals)."""
    if math.isnan(value):
        raise GraphError("NaN has no NNEF literal.", "Replace it in the model, for example by a tensor.")
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    mantissa, separator, exponent = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{separator}{exponent.replace('+', '')}"


def _string(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
