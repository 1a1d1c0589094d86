"""What a weight conversion does, without doing it: transformers' operations run once on tensors without values.

In: `TensorSource` objects of a checkpoint. Out: sources that know their shape and dtype, and convert while they stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from generic_export.compat import pytree, schema_of, wrapper_tensor
from generic_export.errors import WeightError, first_line
from generic_export.weights.source import PlainValues, TensorSource
from t2n_llm.weights.expressions import (
    Computed,
    Expression,
    Indivisible,
    Joined,
    TensorLeaf,
    Transposed,
    narrowed,
    reshaped,
    stream_expression,
)

aten = torch.ops.aten


# --- recording --------------------------------------------------------------------------------


class RecordedTensor(torch.Tensor):
    """A tensor without values, which remembers how it is made of checkpoint tensors; for transformers' operations."""

    expression: Expression
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, expression: Expression, meta: torch.Tensor) -> RecordedTensor:
        recorded: RecordedTensor = wrapper_tensor(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("meta")
        )
        recorded.expression, recorded.meta = expression, meta
        return recorded

    def __init__(self, expression: Expression, meta: torch.Tensor) -> None:
        """`expression` says how it is made; `meta` has its shape, strides and dtype."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if schema_of(func).is_mutable:
            raise RuntimeError(f"{func} writes into a tensor of the checkpoint")
        meta_args, meta_kwargs = pytree.tree_map(_meta, (args, kwargs))
        result = func(*meta_args, **meta_kwargs)
        if isinstance(result, torch.Tensor):
            return cls(_expression(func, args, kwargs, None, result), result)
        if isinstance(result, tuple | list):
            outputs = (
                cls(_expression(func, args, kwargs, index, item), item) if isinstance(item, torch.Tensor) else item
                for index, item in enumerate(result)
            )
            return type(result)(outputs)
        return result


def record(source: TensorSource) -> RecordedTensor:
    """Return a checkpoint tensor in the form that operations can be recorded on."""
    return RecordedTensor(TensorLeaf(source), torch.empty(source.shape, dtype=source.dtype, device="meta"))


def _recorded_expression(value: Any) -> Any:
    return value.expression if isinstance(value, RecordedTensor) else value


def _meta(value: Any) -> Any:
    return value.meta if isinstance(value, RecordedTensor) else value


def _expression(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: int | None, result: torch.Tensor
) -> Expression:
    """Return how one output of an operator is made: in parts for those that only move data, else whole."""
    known = _MOVES.get(func)
    if known is not None:
        try:
            expression = known(_bound(func, args, kwargs), output, tuple(result.shape))
        except Indivisible:
            expression = None
        if expression is not None:
            return expression
    args, kwargs = pytree.tree_map(_recorded_expression, (args, dict(kwargs)))
    return Computed(func, args, kwargs, output)


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the operator's schema, defaults included."""
    schema = schema_of(func).arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


_Arguments = Mapping[str, Any]
_Shape = tuple[int, ...]


def _keep(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output, shape
    return call["self"].expression


def _reshape(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    return reshaped(call["self"].expression, shape)


def _cat(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    parts = [tensor.expression for tensor in call["tensors"]]
    if len({part.dtype for part in parts}) > 1 or any(len(part.shape) != len(shape) for part in parts):
        return None
    return Joined(tuple(parts), call["dim"] % len(shape))


def _stack(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    dim, parts = call["dim"] % len(shape), [tensor.expression for tensor in call["tensors"]]
    if len({part.dtype for part in parts}) > 1:
        return None
    slice_shape = (*shape[:dim], 1, *shape[dim + 1 :])
    return Joined(tuple(reshaped(part, slice_shape) for part in parts), dim)


def _split(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    """One piece of `split`, `split_with_sizes` and `chunk`."""
    whole, dim = call["self"].expression, call["dim"] % len(shape)
    sizes = call.get("split_sizes")
    start = sum(sizes[:output]) if sizes is not None else call["split_size"] * (output or 0)
    return narrowed(whole, dim, start, shape[dim])


def _unbind(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    whole = call["self"].expression
    dim = call["dim"] % len(whole.shape)
    return reshaped(narrowed(whole, dim, output or 0, 1), shape)


def _select(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    whole = call["self"].expression
    dim = call["dim"] % len(whole.shape)
    return reshaped(narrowed(whole, dim, call["index"] % whole.shape[dim], 1), shape)


def _slice(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    whole = call["self"].expression
    dim = call["dim"] % len(whole.shape)
    if call["step"] != 1:
        return None
    start = range(whole.shape[dim])[slice(call["start"], call["end"])].start
    return narrowed(whole, dim, start, shape[dim])


def _transpose(call: _Arguments, output: int | None, shape: _Shape) -> Expression | None:
    del output
    dim0, dim1 = sorted((call["dim0"] % len(shape), call["dim1"] % len(shape)))
    return call["self"].expression if dim0 == dim1 else Transposed(call["self"].expression, dim0, dim1)


# Operators that only move data. Views of a transposed tensor reach `view` only after a clone, whose order is C.
_MOVES: dict[Any, Callable[[_Arguments, int | None, _Shape], Expression | None]] = {
    aten.alias.default: _keep,
    aten.detach.default: _keep,
    aten.clone.default: _keep,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.transpose.int: _transpose,
}


# --- the source -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ConvertedTensor(PlainValues):
    """A parameter made of several checkpoint tensors, or of part of one.

    Args:
        name: the parameter.
        recorded: how it is made.
        members: the checkpoint tensors it is made of.
    """

    name: str
    recorded: RecordedTensor
    members: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Known from the members' shapes."""
        return self.recorded.expression.shape

    @property
    def dtype(self) -> torch.dtype:
        """Known from the members' dtypes."""
        return self.recorded.expression.dtype

    @property
    def plain(self) -> TensorSource | None:
        """The one source whose bytes these are, unchanged; None when there is something to compute."""
        expression = self.recorded.expression
        return expression.source if isinstance(expression, TensorLeaf) else None

    def chunks(self) -> Iterator[memoryview]:
        """Compute and stream the bytes, in C order.

        Stacked and joined tensors cost a chunk; what an axis is transposed or interleaved for costs one member.

        Raises:
            WeightError: a member cannot be read, or they cannot be combined after all.
        """
        try:
            yield from stream_expression(self.recorded.expression)
        except (RuntimeError, ValueError, TypeError) as error:
            raise WeightError(
                f"tensor {self.name}: cannot be built from {len(self.members)} checkpoint tensors ({self.members[0]}, "
                f"...): {first_line(error)}."
            ) from error
