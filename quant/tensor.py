"""`QTensor`: a tensor that keeps its blocks and gives its values when something computes with it.

In: packed bytes and a scheme. Out: a `torch.Tensor` that modules, state dicts and `export_model_to_nnef` take as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from generic_export.compat import pytree, schema_of, wrapper_tensor
from generic_export.errors import WeightError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.weights.source import InMemoryBlocks, TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM
from quant.packing import check_quantizable, dequantize_bytes, pack_q4_0, pack_q8_1
from quant.protocol import InputStatistics, Quantizer
from quant.stream import row_length

aten = torch.ops.aten


class QTensor(torch.Tensor):
    """A float tensor stored in blocks. It has no gradient and is dequantized each time it is used.

    Operations that keep all values (`detach`, `clone`, `to`) return another `QTensor`; all others see the dequantized values.

    Args:
        blob: uint8 [bytes], the blocks in row order.
        shape: shape of the values.
        scheme: `q4_0`, or `q8_1` for embeddings.
        dtype: dtype that operations see; the blocks do not depend on it.

    Raises:
        WeightError: the scheme is unknown, or `blob` has the wrong size for `shape`.
    """

    blob: torch.Tensor
    scheme: str

    @staticmethod
    def __new__(
        cls: type[QTensor],
        blob: torch.Tensor,
        shape: Sequence[int],
        scheme: str = "q4_0",
        dtype: torch.dtype = torch.float32,
    ) -> QTensor:
        block = BLOCK_FORMATS.get(scheme)
        if block is None:
            raise WeightError(f"scheme {scheme!r} is unknown.", f"Known: {', '.join(BLOCK_FORMATS)}.")
        size = tuple(shape)
        if blob.dtype is not torch.uint8 or math.prod(size) % block.group or blob.numel() != block.data_size(size):
            raise WeightError(
                f"{blob.numel()} bytes of {blob.dtype} are no {scheme} tensor of shape {list(size)}.",
                f"Give uint8, {block.block_bytes} bytes for every {block.group} values.",
            )
        made = wrapper_tensor(cls, size, dtype=dtype, device=blob.device)  # type: ignore[attr-defined]
        made.blob = blob.reshape(-1)
        made.scheme = scheme
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Everything is done in `__new__`, as subclasses of `torch.Tensor` must."""

    @classmethod
    def from_float(
        cls,
        weight: torch.Tensor,
        scheme: str = "q4_0",
        quantizer: Quantizer | None = None,
        statistics: InputStatistics | None = None,
        name: str = "tensor",
    ) -> QTensor:
        """Quantize a tensor.

        Args:
            weight: float [..., K], whose rows are multiples of 32. Convolution kernels [O, I, k...] have rows of I k... values.
            scheme: `q4_0` or `q8_1`.
            quantizer: algorithm for `q4_0`; None for the data-free search.
            statistics: statistics of the inputs, for algorithms that use them.
            name: name of the tensor in error messages.

        Raises:
            WeightError: the tensor contains inf or NaN, or its rows are not multiples of 32.
        """
        length = row_length(tuple(weight.shape))
        if not length:
            check_quantizable(weight, name)
            raise WeightError(f"tensor {name}: shape {list(weight.shape)} has no rows of whole groups.")
        rows = weight.detach().cpu().to(torch.float32).reshape(-1, length)
        check_quantizable(rows, name)
        if scheme == "q8_1":
            blob = pack_q8_1(rows, name=name)
        else:
            blob = pack_q4_0((quantizer or BUILT_IN[DEFAULT_ALGORITHM]).quantize(rows, statistics))
        return cls(blob.to(weight.device), tuple(weight.shape), scheme, weight.dtype)

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """Return the values as a plain tensor of this shape and dtype."""
        return dequantize_bytes(self.blob, self.scheme).reshape(self.shape).to(self.dtype)

    def stored_source(self, name: str) -> TensorSource:
        """Return the blocks as a source that `export_model_to_nnef` writes.

        Args:
            name: name of the tensor.
        """
        return InMemoryBlocks(name, tuple(self.shape), self.scheme, self.blob.cpu())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show what it is, not its values."""
        del tensor_contents
        return f"QTensor({self.scheme}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the blocks, for `torch.save` and other processes."""
        return QTensor, (self.blob, tuple(self.shape), self.scheme, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """See `torch.utils._python_dispatch.is_traceable_wrapper_subclass`."""
        return ["blob"], {"scheme": self.scheme, "dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Mapping[str, Any], outer_size: Sequence[int], outer_stride: Any
    ) -> QTensor:
        """Undo `__tensor_flatten__`."""
        del outer_stride
        return QTensor(inner["blob"], outer_size, context["scheme"], context["dtype"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep the blocks where all values are kept, else compute on plain values."""
        del types
        keeps = _KEEPING.get(operator)
        if keeps is not None and isinstance(args[0], QTensor):
            return keeps(*args, **(kwargs or {}))
        if schema_of(operator).is_mutable and any(isinstance(argument, QTensor) for argument in args[:1]):
            raise WeightError(
                f"{operator}: the values of a QTensor cannot be changed in place.", "Dequantise it first."
            )
        plain_args, plain_kwargs = pytree.tree_map(_plain, (tuple(args), dict(kwargs or {})))
        return operator(*plain_args, **plain_kwargs)


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QTensor) else value


def _with_blob(tensor: QTensor, blob: torch.Tensor, dtype: torch.dtype | None = None) -> QTensor:
    return QTensor(blob, tuple(tensor.shape), tensor.scheme, dtype or tensor.dtype)


def _detach(tensor: QTensor) -> QTensor:
    return _with_blob(tensor, tensor.blob)


def _clone(tensor: QTensor, **_: Any) -> QTensor:
    return _with_blob(tensor, tensor.blob.clone())


def _to_copy(
    tensor: QTensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> torch.Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return tensor.dequantize().to(dtype=dtype, device=device)
    return _with_blob(tensor, tensor.blob.to(device=device, copy=True), dtype)


def _copy(target: QTensor, source: torch.Tensor, non_blocking: bool = False) -> QTensor:
    """Take over the blocks of another tensor, as `load_state_dict` does."""
    if not isinstance(source, QTensor) or source.scheme != target.scheme:
        raise WeightError(
            f"only {target.scheme} blocks can be copied into a {target.scheme} QTensor.", "Assign a new parameter."
        )
    target.blob.copy_(source.blob, non_blocking)
    return target


_KEEPING: dict[Any, Callable[..., torch.Tensor]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
