"""TorchScript's calling conventions: which operator a node calls, how its arguments are spelled.

In: nodes and schemas of a TorchScript graph. Out: Python objects; nothing is run here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

import torch

from generic_export.compat import FunctionSchema, JitNode, OpOverload, parse_schema, schema_of

# c10/core/ScalarType.h: TorchScript writes element types as these numbers.
_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.qint8,
    torch.quint8,
    torch.qint32,
    torch.bfloat16,
)
# c10/core/MemoryFormat.h
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)

_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+)|^(\S+)\((\d+)\): ', re.MULTILINE)
_HIERARCHY_STEP = re.compile(r"([^.()]+)\(([^()]*)\)")
_NO_STEP = frozenset({"SELF", "UNKNOWN_INSTANCE", "TOP"})


@dataclass(frozen=True)
class NodePlace:
    """Where a node comes from.

    Attributes:
        path: names of the modules that were called on the way to it, dotted; "" for the root.
        source: `file:line` ("" when it was not recorded).
    """

    path: str
    source: str


def place_of(node: JitNode) -> NodePlace:
    """Return the module and the source line that a node (also an inlined one) comes from."""
    return NodePlace(".".join(name for name, _ in steps_of(node)), source_of(node))


def steps_of(node: JitNode) -> tuple[tuple[str, str], ...]:
    """Return name and class of the modules that were called on the way to a node, outermost first."""
    found = _HIERARCHY_STEP.findall(node.getModuleHierarchy())
    return tuple((name, kind) for name, kind in found if name not in _NO_STEP)


def source_of(node: JitNode) -> str:
    """Return `file:line` of a node: the user's line where the range has several, "" where it has none."""
    found = [(a or c, b or d) for a, b, c, d in _FILE_LINE.findall(str(node.sourceRange()))]
    if not found:
        return ""
    own = [entry for entry in found if "/torch/" not in entry[0]]
    path, line = (own or found)[0]
    return f"{PurePath(path).name}:{line}"


def as_dtype(value: Any) -> torch.dtype | None:
    """Return the element type that TorchScript's number, or None, stands for."""
    return _DTYPES[value] if isinstance(value, int) else value


def as_number(dtype: torch.dtype) -> int:
    """Return the number that stands for an element type in TorchScript."""
    return _DTYPES.index(dtype)


@cache
def overload_named(name: str, overload: str) -> OpOverload | None:
    """Return `namespace::name`'s overload, or None when it is not an operator on tensors of this PyTorch."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None


@cache
def parsed_schema(text: str) -> FunctionSchema | None:
    """Return a node's schema; None for nodes that have none (most `prim` ones)."""
    return None if text == "(no schema)" else parse_schema(text)


@dataclass(frozen=True)
class SpelledCall:
    """The arguments of an operator, spelled as Python callers spell them.

    Attributes:
        args, kwargs: the arguments.
        numbers: names of parameters that are tensors in the schema and received a number.
        tensors: names of parameters that are numbers in the schema and received a tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: tuple[str, ...]
    tensors: tuple[str, ...]


def spelled_call(overload: OpOverload, values: Sequence[Any]) -> SpelledCall:
    """Arrange the inputs of a node as the arguments of an operator; trailing ones that are missing take their defaults."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    numbers, tensors = [], []
    for parameter, given in zip(schema_of(overload).arguments, values, strict=False):
        kind = str(parameter.real_type).removeprefix("Optional[").removesuffix("]")
        value = _spelled(kind, given)
        if kind == "Tensor" and isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            numbers.append(parameter.name)
        if kind in {"Scalar", "number", "int", "SymInt", "float", "bool"} and isinstance(value, torch.Tensor):
            tensors.append(parameter.name)
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return SpelledCall(tuple(args), kwargs, tuple(numbers), tuple(tensors))


def _spelled(kind: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    kind = kind.removesuffix("?")
    if kind == "ScalarType":
        return _DTYPES[value]
    if kind == "MemoryFormat":
        return _MEMORY_FORMATS[value]
    return torch.strided if kind == "Layout" else value


__all__ = [
    "NodePlace",
    "SpelledCall",
    "as_dtype",
    "as_number",
    "overload_named",
    "parsed_schema",
    "place_of",
    "source_of",
    "spelled_call",
    "steps_of",
]
