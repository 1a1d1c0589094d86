"""TorchScript's operators on numbers, lists, strings and dicts, in Python: sizes may be symbolic.

In: an operator's name and its arguments, none of which is a tensor to compute with. Out: the result, or `NOT_HERE`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from generic_export.torchscript.schema import as_number

NOT_HERE = object()
"""Returned for operators that are not in the tables."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS = (int, float, bool, complex, *_SYMBOLIC)


def _as_int(value: Any) -> Any:
    return torch.sym_int(value) if isinstance(value, _SYMBOLIC) else int(value)


def _as_float(value: Any) -> Any:
    return torch.sym_float(value) if isinstance(value, _SYMBOLIC) else float(value)


def _as_bool(value: Any) -> Any:
    if isinstance(value, torch.SymBool):
        return value
    return value != 0 if isinstance(value, _SYMBOLIC) else bool(value)


def _divide(left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return left // right
    if rounding_mode == "trunc":
        return _as_int(left / right)
    return left / right


def _floor_divided(left: Any, right: Any) -> Any:
    """Floats as C++ does it: `1.0 // 0.1` is 10."""
    if isinstance(left, float) or isinstance(right, float):
        return float(math.floor(left / right))
    return left // right


def _remainder(left: Any, right: Any) -> Any:
    """Floats as C++ does it, to the bit."""
    if isinstance(left, float) or isinstance(right, float):
        return math.fmod(right + math.fmod(left, right), right)
    return left % right


def _add(left: Any, right: Any, alpha: Any = 1) -> Any:
    return left + right if isinstance(left, (list, str)) else left + alpha * right


def _smallest(*values: Any) -> Any:
    return min(values[0]) if len(values) == 1 else torch.sym_min(*values)


def _largest(*values: Any) -> Any:
    return max(values[0]) if len(values) == 1 else torch.sym_max(*values)


def _range_length(low: Any, high: Any, step: Any) -> Any:
    """Return how many numbers `range(low, high, step)` has."""
    return torch.sym_max((high - low + step - (1 if step > 0 else -1)) // step, 0)


def _end(index: int) -> int | None:
    """Return the end of a string as Python has it: -1 is the whole of it in TorchScript."""
    return None if index == -1 else index


def _piece(container: Sequence[Any], start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return container[start:end:step]


def _put(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _appended(container: list[Any], value: Any) -> list[Any]:
    container.append(value)
    return container


def _removed(container: list[Any], index: int = -1) -> Any:
    return container.pop(index)


_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("mul", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("__and__", "__or__", "__xor__", "__lshift__", "__rshift__")},
    **{
        name: getattr(math, name) for name in ("ceil", "floor", "exp", "log", "log2", "log10", "fmod", "isnan", "isinf")
    },
    **dict.fromkeys(("Scalar", "ScalarImplicit", "IntImplicit", "FloatImplicit", "item"), lambda value: value),
    "add": _add,
    "sub": lambda left, right, alpha=1: left - alpha * right,
    "rsub": lambda left, right, alpha=1: right - alpha * left,
    "div": _divide,
    "floordiv": _floor_divided,
    "floor_divide": _floor_divided,
    "remainder": _remainder,
    "abs": abs,
    "min": _smallest,
    "max": _largest,
    "round": round,
    "trunc": _as_int,
    "sqrt": lambda value: torch.sym_sqrt(value) if isinstance(value, _SYMBOLIC) else math.sqrt(value),  # type: ignore[attr-defined]
    "Int": _as_int,
    "Float": _as_float,
    "Bool": _as_bool,
    "bitwise_and": operator.and_,
    "__range_length": _range_length,
    "__derive_index": lambda index, start, step: start + index * step,
}

_ON_ANYTHING: dict[str, Callable[..., Any]] = {
    "__not__": lambda value: torch.sym_not(value) if isinstance(value, torch.SymBool) else not value,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    "format": lambda text, *values: text.format(*values),
    "warn": lambda *_: None,
    "str": str,
    "manual_seed": lambda *_: None,
    "is_grad_enabled": lambda: False,
    "set_grad_enabled": lambda *_: None,
    "is_scripting": lambda: True,
    "_set_item": _put,
}


def _method(name: str) -> Callable[..., Any]:
    return lambda container, *arguments: getattr(container, name)(*arguments)


_ON_CONTAINERS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (len, list, sum, any, all, sorted)},
    **{name: _method(name) for name in ("extend", "insert", "clear", "reverse", "copy", "index", "count", "get")},
    **{name: _method(name) for name in ("lower", "upper", "strip", "split", "join", "replace")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "add", "mul")},
    "add_": operator.iadd,
    "append": _appended,
    "pop": _removed,
    "__getitem__": operator.getitem,
    "select": operator.getitem,
    "slice": _piece,
    "_set_item": _put,
    "__contains__": operator.contains,
    "keys": lambda container: list(container.keys()),
    "values": lambda container: list(container.values()),
    "items": lambda container: list(container.items()),
    "Delete": operator.delitem,
    "startswith": lambda text, part, start=0, end=-1: text[start : _end(end)].startswith(part),
    "endswith": lambda text, part, start=0, end=-1: text[start : _end(end)].endswith(part),
    "min": _smallest,
    "max": _largest,
}


def evaluate(name: str, arguments: Sequence[Any]) -> Any:
    """Evaluate an operator without tensors.

    Args:
        name: its name without namespace and overload (`__getitem__`).
        arguments: numbers, sizes, strings, lists, dicts.
    """
    first = arguments[0] if arguments else None
    if isinstance(first, (list, tuple, str, dict)) and name in _ON_CONTAINERS:
        return _ON_CONTAINERS[name](*arguments)
    if name in _ON_ANYTHING:
        return _ON_ANYTHING[name](*arguments)
    if name in {"eq", "ne"} or (name in _ON_NUMBERS and all(isinstance(value, NUMBERS) for value in arguments)):
        return _ON_NUMBERS[name](*arguments)
    return NOT_HERE


def as_declared(kind: str, value: Any) -> Any:
    """Return a number as the type that TorchScript gives it: `2 ** 3` and `round(2.5)` are floats there.

    Args:
        kind: of the node's output, such as `FloatType`.
        value: what Python computed.
    """
    if kind == "FloatType" and isinstance(value, (int, torch.SymInt)):
        return _as_float(value)
    if kind == "IntType" and isinstance(value, (float, torch.SymFloat)):
        return _as_int(value)
    return value


# What TorchScript asks of one tensor beside ATen's operators: its sizes, its type, where it lies.
# In: the tensor and the other arguments of a node. Out: Python's values. What needs the run itself is in
# `interpreter.py`.
def _size(tensor: torch.Tensor, axis: int | None = None) -> Any:
    return list(tensor.shape) if axis is None else tensor.shape[axis]


def _itself(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


def _yes(*_: Any) -> bool:
    return True


def _no(*_: Any) -> bool:
    return False


OF_TENSOR: dict[str, Callable[..., Any]] = {
    "len": lambda tensor: tensor.shape[0],
    "size": _size,
    "shape": _size,
    "dim": lambda tensor: tensor.ndim,
    "ndim": lambda tensor: tensor.ndim,
    "numel": torch.Tensor.numel,
    "itemsize": torch.Tensor.element_size,
    "dtype": lambda tensor: as_number(tensor.dtype),
    "device": lambda tensor: tensor.device,
    "layout": lambda tensor: 0,
    "data": torch.Tensor.detach,
    "T": lambda tensor: tensor.T,
    "mT": lambda tensor: tensor.mT,
    "is_floating_point": torch.Tensor.is_floating_point,
    "is_complex": torch.Tensor.is_complex,
    "is_quantized": lambda tensor: tensor.is_quantized,
    "__not__": torch.Tensor.logical_not,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    **dict.fromkeys(("cpu", "cuda", "requires_grad_"), _itself),
    **dict.fromkeys(("is_contiguous", "is_cpu"), _yes),
    **dict.fromkeys(("requires_grad", "is_cuda", "is_sparse", "is_mkldnn", "is_nested"), _no),
    **dict.fromkeys(("is_meta", "is_mps", "is_vulkan", "is_xpu"), _no),
}


__all__ = ["NOT_HERE", "NUMBERS", "OF_TENSOR", "as_declared", "evaluate"]
