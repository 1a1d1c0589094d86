"""Reductions and softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.ops.builder import NnefBuilder, Value, ints
from generic_export.ops.registry import translates
from generic_export.ops.shape import axis_of

aten = torch.ops.aten


def _axes(dim: Sequence[int] | int | None, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(rank))
    return [axis_of(axis, rank) for axis in ([dim] if isinstance(dim, int) else dim)]


@translates(aten.mean.dim)
def mean(
    b: NnefBuilder, self: Value, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    return _reduced(b, "mean_reduce", b.cast(self, dtype or self.dtype), dim, keepdim)


@translates(aten.sum.dim_IntList)
def sum_dim(
    b: NnefBuilder, self: Value, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    integer = not self.dtype.is_floating_point
    return _reduced(b, "sum_reduce", b.cast(self, dtype or (torch.int64 if integer else self.dtype)), dim, keepdim)


@translates(aten.amax.default)
def amax(b: NnefBuilder, self: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return b.reduce("max_reduce", self, _axes(dim, self.rank), keepdim=keepdim) if self.rank else self


@translates(aten.amin.default)
def amin(b: NnefBuilder, self: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return b.reduce("min_reduce", self, _axes(dim, self.rank), keepdim=keepdim) if self.rank else self


def _reduced(b: NnefBuilder, operator: str, value: Value, dim: Sequence[int] | None, keepdim: bool) -> Value:
    """Sum or average; f16 accumulates in f32, as PyTorch does on every device."""
    if value.rank == 0:
        return value
    wide = b.cast(value, torch.float32) if value.dtype is torch.float16 else value
    return b.cast(b.reduce(operator, wide, _axes(dim, value.rank), keepdim=keepdim), value.dtype)


@translates(aten.softmax.int)
def softmax(b: NnefBuilder, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    value = b.cast(self, dtype) if dtype is not None else self
    if value.rank == 0:
        return b.full((), 1.0, value.dtype)
    attributes = {"axes": ints([axis_of(dim, value.rank)])}  # facts/tract.md §3.1: the default axis is 1
    return b.emit("softmax", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)
