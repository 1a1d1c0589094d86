"""Matrix products. Every one becomes a `tract_core_einsum`, with weights as PyTorch stores them ([out, in])."""

from __future__ import annotations

import torch

from generic_export.ops.builder import NnefBuilder, Scalar, Value, broadcast_shape
from generic_export.ops.registry import translates
from generic_export.torch_graph.dims import Shape, same_dim

aten = torch.ops.aten

_BATCH_LETTERS = "abcdefghij"


@translates(aten.linear.default)
def linear(b: NnefBuilder, input: Value, weight: Value, bias: Value | None = None) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    batch = _BATCH_LETTERS[: input.rank - 1]
    if weight.rank == 1:
        return _with_bias(b, b.product(f"{batch}k,k->{batch}", [input, weight]), bias)
    return _with_bias(b, b.product(f"{batch}k,nk->{batch}n", [input, weight]), bias)


def _with_bias(b: NnefBuilder, product: Value, bias: Value | None) -> Value:
    return product if bias is None else b.binary("add", product, b.cast(bias, product.dtype))


@translates(aten.matmul.default)
def matmul(b: NnefBuilder, self: Value, other: Value) -> Value:
    """matmul(Tensor self, Tensor other) -> Tensor"""
    left = "k" if self.rank == 1 else "mk"
    right = "k" if other.rank == 1 else "kn"
    batch = max(self.rank - len(left), other.rank - len(right), 0)
    shape = broadcast_shape(self.shape[: max(self.rank - 2, 0)], other.shape[: max(other.rank - 2, 0)])
    left_letters, right_letters = (_batch_letters(value, shape) for value in (self, other))
    result = _BATCH_LETTERS[:batch] + left.replace("k", "") + right.replace("k", "")
    operands = [_without_unit_batch(b, value, shape) for value in (self, other)]
    return b.product(f"{left_letters}{left},{right_letters}{right}->{result}", operands)


def _kept_batch_axes(value: Value, shape: Shape) -> list[int]:
    """Return the batch axes of a value that the product really runs over (not 1 where the other operand is wider)."""
    count = max(value.rank - 2, 0)
    offset = len(shape) - count
    return [axis for axis in range(count) if same_dim(value.shape[axis], shape[offset + axis])]


def _batch_letters(value: Value, shape: Shape) -> str:
    offset = len(shape) - max(value.rank - 2, 0)
    return "".join(_BATCH_LETTERS[offset + axis] for axis in _kept_batch_axes(value, shape))


def _without_unit_batch(b: NnefBuilder, value: Value, shape: Shape) -> Value:
    kept = _kept_batch_axes(value, shape)
    return b.squeeze(value, [axis for axis in range(max(value.rank - 2, 0)) if axis not in kept])


@translates(aten.mm.default, aten.bmm.default)
def mm(b: NnefBuilder, self: Value, mat2: Value) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor; bmm(Tensor self, Tensor mat2) -> Tensor"""
    return matmul(b, self, mat2)


@translates(aten.addmm.default)
def addmm(b: NnefBuilder, self: Value, mat1: Value, mat2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    product = b.product("mk,kn->mn", [mat1, mat2])
    if alpha != 1:
        product = b.binary("mul", product, b.scalar(float(alpha), product.dtype))
    if beta == 0:
        return product
    bias = self if beta == 1 else b.binary("mul", self, b.scalar(float(beta), self.dtype))
    return b.binary("add", product, bias)
