"""What TorchScript asks of tensors beside ATen's operators: their sizes and types, the numbers in them, a trace's own forms.

In: one tensor and the other arguments of a node. Out: Python's values; while a graph is captured a number in a tensor stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from generic_export.compat import JitNode
from generic_export.torchscript.schema import as_dtype, as_number, parsed_schema

if TYPE_CHECKING:
    from generic_export.torchscript.interpreter import Interpreter


def _capturing() -> bool:
    return bool(torch.compiler.is_exporting())


def _number_of(run: Interpreter, _node: JitNode, tensor: torch.Tensor, kind: str) -> Any:
    """Return the number in a tensor; while a graph is captured it stays a tensor of no axes."""
    known = run.numbers.get(id(tensor))
    if known is not None:
        return {"Int": int, "Float": float, "Bool": bool}.get(kind, lambda value: value)(known)
    if not _capturing():
        return {"Int": int, "Float": float, "Bool": bool}.get(kind, lambda value: value)(tensor.item())
    scalar = tensor.reshape(())
    if kind == "Bool":
        return scalar if scalar.dtype is torch.bool else scalar.ne(0)
    if kind == "Int":
        return scalar.to(torch.int64)
    return scalar if kind != "Float" or scalar.is_floating_point() else scalar.to(torch.float32)


def _length(_run: Interpreter, _node: JitNode, tensor: torch.Tensor) -> Any:
    return tensor.shape[0]


def _size(_run: Interpreter, _node: JitNode, tensor: torch.Tensor, axis: int | None = None) -> Any:
    return list(tensor.shape) if axis is None else tensor.shape[axis]


def _cast(run: Interpreter, node: JitNode, tensor: torch.Tensor, *rest: Any) -> Any:
    """`aten::to` in the forms that TorchScript alone has, and the others."""
    schema = parsed_schema(node.schema())
    if schema is None or not schema.overload_name.startswith("prim_"):
        return run.operator(node, "aten::to", [tensor, *rest])
    if schema.overload_name == "prim_other":
        target = rest[0].dtype
    else:
        dtypes = [value for value in rest[:2] if isinstance(value, int) and not isinstance(value, bool)]
        target = as_dtype(dtypes[0]) if dtypes else None
    return tensor if target is None else run.home.placed(node, lambda: tensor.to(target))


def _convolution(run: Interpreter, node: JitNode, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The form that a trace has of every convolution, as the function that the user called."""
    weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_ = rest
    axes = len(stride)
    options: tuple[Any, ...]
    if transposed:
        function = getattr(torch, f"conv_transpose{axes}d")
        options = (bias, stride, padding, output_padding, groups, dilation)
    else:
        function = getattr(torch, f"conv{axes}d")
        options = (bias, stride, padding, dilation, groups)
    result: torch.Tensor = run.home.placed(node, lambda: function(tensor, weight, *options))
    return result


def _negated(_run: Interpreter, _node: JitNode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.logical_not()


ON_TENSORS: dict[str, Callable[..., Any]] = {
    "Int": lambda run, node, tensor: _number_of(run, node, tensor, "Int"),
    "Float": lambda run, node, tensor: _number_of(run, node, tensor, "Float"),
    "Bool": lambda run, node, tensor: _number_of(run, node, tensor, "Bool"),
    "item": lambda run, node, tensor: _number_of(run, node, tensor, ""),
    "ScalarImplicit": lambda run, node, tensor: _number_of(run, node, tensor, ""),
    "IntImplicit": lambda run, node, tensor: _number_of(run, node, tensor, "Int"),
    "FloatImplicit": lambda run, node, tensor: _number_of(run, node, tensor, "Float"),
    "len": _length,
    "size": _size,
    "dim": lambda run, node, tensor: tensor.ndim,
    "numel": lambda run, node, tensor: tensor.numel(),
    "is_floating_point": lambda run, node, tensor: tensor.is_floating_point(),
    "is_complex": lambda run, node, tensor: tensor.is_complex(),
    "is_contiguous": lambda run, node, tensor, *_: True,
    "to": _cast,
    "_convolution": _convolution,
    "cpu": lambda run, node, tensor: tensor,
    "cuda": lambda run, node, tensor: tensor,
    "requires_grad_": lambda run, node, tensor, *_: tensor,
    "__not__": _negated,
    "__is__": lambda run, node, tensor, other: tensor is other,
    "__isnot__": lambda run, node, tensor, other: tensor is not other,
    "dtype": lambda run, node, tensor: as_number(tensor.dtype),
    "device": lambda run, node, tensor: tensor.device,
    "layout": lambda run, node, tensor: 0,
    "data": lambda run, node, tensor: tensor.detach(),
    "shape": _size,
    "requires_grad": lambda run, node, tensor: False,
    "is_cuda": lambda run, node, tensor: False,
    "is_cpu": lambda run, node, tensor: True,
    "is_quantized": lambda run, node, tensor: tensor.is_quantized,
    "is_sparse": lambda run, node, tensor: False,
    "is_mkldnn": lambda run, node, tensor: False,
    "is_nested": lambda run, node, tensor: False,
    "is_meta": lambda run, node, tensor: False,
    "is_mps": lambda run, node, tensor: False,
    "is_vulkan": lambda run, node, tensor: False,
    "is_xpu": lambda run, node, tensor: False,
    "ndim": lambda run, node, tensor: tensor.ndim,
    "itemsize": lambda run, node, tensor: tensor.element_size(),
    "T": lambda run, node, tensor: tensor.T,
    "mT": lambda run, node, tensor: tensor.mT,
}


__all__ = ["ON_TENSORS"]
