"""What TorchScript asks of one tensor beside ATen's operators: its sizes, its type, where it lies.

In: the tensor and the other arguments of a node. Out: Python's values. What needs the run itself is in `interpreter.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from generic_export.torchscript.schema import as_number


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


__all__ = ["OF_TENSOR"]
