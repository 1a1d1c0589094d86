"""A captured graph as text, one operator a line, for a person to read.

In: a `TorchModuleIRGraph`. Out: text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generic_export.torch_graph.dims import dim_text
from generic_export.torch_graph.ir import FixedTensorList, TensorVariable, TorchModuleIRGraph, is_dim


def graph_listing(graph: TorchModuleIRGraph) -> str:
    """Return inputs, stored tensors, operators in execution order with module and source line, and outputs."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: TorchModuleIRGraph) -> Iterator[str]:
    for symbol in graph.symbols:
        yield f"symbol {symbol.name}: {symbol.lower} .. {'any' if symbol.upper is None else symbol.upper}"
    for title, variables in (("input", graph.inputs), ("stored", graph.parameters)):
        for variable in variables:
            yield f"{title} {_typed(variable)}"
    for name, value in graph.constants.items():
        yield f"constant {name}: {_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    for op in graph.ops:
        left = ", ".join("_" if variable is None else _typed(variable) for variable in op.outputs)
        arguments = [_argument(argument) for argument in op.args]
        arguments += [f"{name}={_argument(argument)}" for name, argument in op.kwargs.items()]
        where = " ".join(part for part in (op.module_path or "(root)", op.module_type, op.source) if part)
        yield f"{left} = {op.target}({', '.join(arguments)})  # {where}"
    for name, variable in zip(graph.output_names, graph.outputs, strict=True):
        yield f"output {name} = {variable.name}"


def _typed(variable: TensorVariable) -> str:
    return f"{variable.name}: {_dtype(variable.dtype)}[{', '.join(dim_text(dim) for dim in variable.shape)}]"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _argument(argument: Any) -> str:
    if isinstance(argument, TensorVariable):
        return argument.name
    if isinstance(argument, (FixedTensorList, tuple)):
        return f"[{', '.join(_argument(element) for element in argument)}]"
    if isinstance(argument, TorchModuleIRGraph):
        return f"<loop of {len(argument.ops)} operators>"
    return dim_text(argument) if is_dim(argument) else str(argument)


__all__ = ["graph_listing"]
