"""What a translation writes with: typed NNEF primitives that keep track of shapes and element types.

Each method emits one NNEF operation (or none, when there is nothing to do) and returns its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy
import torch

from generic_export.compat import REMAINDERS, torch_sympy
from generic_export.errors import GraphError, TranslationError
from generic_export.nnef.dtypes import (
    F32_MAX,
    F32_SCALE,
    F32_SMALL,
    F32_SMALLEST,
    WRAPPING_DTYPES,
    as_read,
    tract_dtype,
)
from generic_export.nnef.graph import Argument, ArrayLiteral, DimLiteral, TupleLiteral
from generic_export.torch_graph.dims import (
    Dim,
    Shape,
    dim_text,
    floor_div,
    same_dim,
    same_shape,
    simplify_dim,
    symbols_of,
)
from generic_export.translate.emitter import NnefEmitter
from generic_export.translate.products import equal_free_axis, reading_stored_weights, rejoined_operands
from generic_export.translate.real_sizes import is_real, real_value, unlike_masks
from generic_export.translate.value import (
    Emission,
    QuantisedTensor,
    Scalar,
    Value,
    broadcast_shape,
    ints,
    shape_argument,
)


class NnefBuilder(NnefEmitter):
    """Typed primitives over the emissions; see `NnefEmitter` for the fields."""

    # --- constants --------------------------------------------------------------------------------

    def scalar(self, value: Scalar | sympy.Expr, dtype: torch.dtype) -> Value:
        """Return a rank-0 constant: a literal for floats and bools' sake of NNEF, a cast dimension for integers."""
        if isinstance(value, sympy.Expr) and is_real(value):
            return self.cast(real_value(self, value), dtype)
        if isinstance(value, sympy.Expr):
            return self.emit(
                "tract_core_cast", [DimLiteral(dim_text(value))], shape=(), dtype=dtype, attributes=_to(dtype)
            )
        if dtype.is_floating_point and value != value:
            # docs/contributing/engine-facts.md#identifiers-and-literals: `nan` is no literal.
            return self.unary("log", self.materialised(Value(-1, (), dtype, constant=-1.0, literal=True)))
        if dtype is torch.float64 and as_read(value) != value:
            return self._exact_f64(float(value))
        if dtype.is_floating_point:
            return Value(-1, (), dtype, constant=float(value), literal=True)
        if dtype is torch.bool:
            literal = 1.0 if value else 0.0
            return self.emit(
                "tract_core_cast", [literal], shape=(), dtype=dtype, attributes=_to(dtype), constant=bool(value)
            )
        # docs/contributing/engine-facts.md#identifiers-and-literals: an integer literal is a size, not an i64.
        return self.emit(
            "tract_core_cast", [int(value)], shape=(), dtype=dtype, attributes=_to(dtype), constant=int(value)
        )

    def _exact_f64(self, value: float) -> Value:
        """Return an f64 constant as a sum: literals are f32 (docs/contributing/engine-facts.md#identifiers-and-literals)."""
        if abs(value) < F32_SMALLEST:
            raise TranslationError(
                f"the f64 number {value:g}: tract computes matmuls with a number this close to zero as zero "
                "(docs/contributing/engine-facts.md#identifiers-and-literals).",
                f"Use 0, or at least {F32_SMALLEST:.2g}.",
            )
        scaled = True
        if abs(value) > F32_MAX:
            halves = [value / F32_SCALE, F32_SCALE]
        elif abs(value) < F32_SMALL:
            halves = [value * F32_SCALE, 1 / F32_SCALE]
        else:
            halves, scaled = [value - as_read(value), as_read(value)], False
        # Both made f64 first: tract computes a constant with a literal in the literal's own f32.
        left, right = (self.materialised(self.scalar(half, torch.float64)) for half in halves)
        return replace(self.binary("mul" if scaled else "add", left, right), constant=value)

    def full(self, shape: Shape, value: Scalar | sympy.Expr, dtype: torch.dtype) -> Value:
        """Return a tensor of the given shape filled with one number."""
        splat = self.materialised(self.scalar(value, dtype))
        if isinstance(value, sympy.Expr) and dtype is torch.int64:
            splat = self.opaque(splat, value)
        filled = self.broadcast(self.align_rank(splat, len(shape)), shape)
        return filled if isinstance(value, sympy.Expr) else replace(filled, constant=value)

    def opaque(self, value: Value, lowest: Dim) -> Value:
        """Return an integer tensor whose dependence on sizes is hidden from tract.

        tract (optim/uniform_mask.rs) cuts `select`, `and` and `mul` in regions where a comparison is constant, and gets them wrong:
        with branches of size 1 the regions have size 1, with two axes the cut depends on the other axis. Of quotients and
        remainders of sizes it makes expressions that take it minutes, or forever.

        Args:
            value: i64.
            lowest: what it is at least.
        """
        if sympy.sympify(lowest).is_nonnegative:
            return self.unary("abs", value)
        return self.unary("tract_core_bitnot", self.unary("tract_core_bitnot", value))

    def materialised(self, value: Value) -> Value:
        """Return a value that an operation made: a literal becomes a cast of itself, with its exact element type."""
        if not value.literal:
            return value
        return self.emit(
            "tract_core_cast",
            [float(value.constant)],  # type: ignore[arg-type]
            shape=(),
            dtype=value.dtype,
            attributes=_to(value.dtype),
            constant=value.constant,
        )

    # --- shapes ----------------------------------------------------------------------------------

    def align_rank(self, value: Value, rank: int) -> Value:
        """Add leading axes up to `rank`.

        tract itself adds trailing ones (docs/contributing/engine-facts.md#ranks-and-unchecked-shapes).
        """
        if value.literal or value.rank >= rank:
            return value
        return self.unsqueeze(value, range(rank - value.rank))

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Insert axes of size 1 at the given positions of the result (non-negative, ascending)."""
        if not axes:
            return value
        shape = list(value.shape)
        for axis in sorted(axes):
            shape.insert(axis, 1)
        source = self.materialised(value)
        result = self.emit(
            "unsqueeze", [source], shape=shape, dtype=value.dtype, attributes={"axes": ints(sorted(axes))}
        )
        return replace(result, constant=value.constant)

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Remove axes of size 1 (non-negative positions)."""
        if not axes:
            return value
        shape = [dim for axis, dim in enumerate(value.shape) if axis not in set(axes)]
        return self.emit("squeeze", [value], shape=shape, dtype=value.dtype, attributes={"axes": ints(sorted(axes))})

    def reshape(self, value: Value, shape: Sequence[Dim]) -> Value:
        """Reshape; an axis of `T` that PyTorch knows to be a multiple of 4 is written `4*(T/4)`, by a slice that keeps it all."""
        if same_shape(value.shape, shape):
            return value
        cuts, written = provable_cuts(value.shape, shape)
        for axis, volume in cuts:
            value = self.slice(value, axis, 0, volume)
        result = self._reshape_changed(value, written)
        for axis, (size, wanted) in enumerate(zip(written, shape, strict=True)):
            if not same_dim(size, wanted):
                result = self.slice(result, axis, 0, wanted)
        return result

    def _reshape_changed(self, value: Value, shape: Sequence[Dim]) -> Value:
        """Name only the axes that change, so that symbolic ones stay out of it."""
        start, stop_in, stop_out = changed_axes(value.shape, shape)
        removed, added = value.shape[start:stop_in], tuple(shape[start:stop_out])
        if not added and all(same_dim(dim, 1) for dim in removed):
            return self.squeeze(value, range(start, stop_in))
        if not removed and all(same_dim(dim, 1) for dim in added):
            return self.unsqueeze(value, range(start, stop_out))
        attributes: dict[str, Argument] = {"shape": shape_argument(added)}
        if start or stop_in < value.rank:
            attributes |= {"axis_start": start, "axis_count": stop_in - start}
        return self.emit("reshape", [value], shape=shape, dtype=value.dtype, attributes=attributes)

    def transpose(self, value: Value, axes: Sequence[int]) -> Value:
        """Permute the axes: axis `i` of the result is axis `axes[i]` of the value."""
        if list(axes) == list(range(value.rank)):
            return value
        shape = [value.shape[axis] for axis in axes]
        return self.emit("transpose", [value], shape=shape, dtype=value.dtype, attributes={"axes": ints(axes)})

    def broadcast(self, value: Value, shape: Sequence[Dim]) -> Value:
        """Repeat along axes of size 1 up to `shape` (same rank)."""
        if same_shape(value.shape, shape):
            return value
        attributes: dict[str, Argument] = {"shape": shape_argument(shape)}
        return self.emit("tract_core_broadcast", [value], shape=shape, dtype=value.dtype, attributes=attributes)

    def slice(self, value: Value, axis: int, begin: Dim, end: Dim, stride: int = 1) -> Value:
        """Take `begin:end:stride` along one axis, with 0 <= begin <= end <= size.

        Other bounds are not safe in tract (docs/contributing/engine-facts.md#operators-of-tract_nnef).
        """
        if same_dim(begin, 0) and same_dim(end, value.shape[axis]) and stride == 1:
            return value
        if stride == 1 and (joined := self._joined_at(value, axis, begin, end)) is not None:
            return joined
        length = simplify_dim(sympy.sympify(end) - sympy.sympify(begin))
        if stride != 1:
            length = floor_div(simplify_dim(sympy.sympify(length) + stride - 1), stride)
        shape = [*value.shape[:axis], length, *value.shape[axis + 1 :]]
        attributes: dict[str, Argument] = {
            "axes": ints([axis]),
            "begin": shape_argument([begin]),
            "end": shape_argument([end]),
        }
        if stride != 1:
            attributes["stride"] = ints([stride])
        return self.emit("slice", [value], shape=shape, dtype=value.dtype, attributes=attributes)

    def _joined_at(self, value: Value, axis: int, begin: Dim, end: Dim) -> Value | None:
        """Return the operand of a concatenation that lies between two bounds, if one does."""
        maker = self.maker_of(value)
        if maker is None or maker.operator != "concat" or dict(maker.attributes)["axis"] != axis:
            return None
        start: Dim = 0
        parts: Sequence[Value] = maker.inputs[0]  # type: ignore[assignment]  # as `concat` gave them
        for part in parts:
            stop = simplify_dim(sympy.sympify(start) + sympy.sympify(part.shape[axis]))
            if same_dim(start, begin) and same_dim(stop, end):
                return part
            start = stop
        return None

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along one axis; all values must have the same element type and rank."""
        if len(values) == 1:
            return values[0]
        total = simplify_dim(sum((sympy.sympify(value.shape[axis]) for value in values), sympy.Integer(0)))
        shape = [*values[0].shape[:axis], total, *values[0].shape[axis + 1 :]]
        return self.emit("concat", [list(values)], shape=shape, dtype=values[0].dtype, attributes={"axis": axis})

    # --- element types and arithmetic -------------------------------------------------------------

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert the element type; nothing is emitted when it is right already."""
        if value.dtype is dtype:
            return value
        if value.literal:
            return self.scalar(value.constant, dtype)  # type: ignore[arg-type]
        if value.dtype.is_floating_point and dtype in WRAPPING_DTYPES:
            value = self.cast(value, torch.int64)  # tract saturates floats at the bounds of a type, PyTorch wraps
        result = self.emit("tract_core_cast", [value], shape=value.shape, dtype=dtype, attributes=_to(dtype))
        return replace(result, constant=value.constant)

    def unary(self, operator: str, value: Value, *, dtype: torch.dtype | None = None) -> Value:
        """Emit an element-wise operation of one operand."""
        source = self.materialised(value)
        return self.emit(operator, [source], shape=value.shape, dtype=dtype or value.dtype)

    def binary(self, operator: str, left: Value, right: Value, *, dtype: torch.dtype | None = None) -> Value:
        """Emit an element-wise operation of two operands of one element type, aligned as PyTorch aligns them."""
        if operator == "mul" and left.number == right.number and not (left.literal or left.dtype.is_floating_point):
            return self._integer_square(left)
        if left.literal and right.literal:
            left = self.materialised(left)
        if left.dtype is not right.dtype:
            raise TranslationError(f"{operator}: operands are {left.dtype} and {right.dtype}; cast them first.")
        operator, left, right = unlike_masks(self, operator, left, right)
        rank = max(left.rank, right.rank)
        shape = broadcast_shape(left.shape, right.shape)
        operands = [self.align_rank(left, rank), self.align_rank(right, rank)]
        return self.emit(operator, operands, shape=shape, dtype=dtype or left.dtype)

    def _integer_square(self, value: Value) -> Value:
        # docs/contributing/engine-facts.md#typing-rules: `x * x` becomes Square, which has no integer kernel;
        # -(x * -x) is another product.
        wide = value if value.dtype.is_signed else self.cast(value, torch.int64)
        return self.cast(self.unary("neg", self.binary("mul", wide, self.unary("neg", wide))), value.dtype)

    def select(self, condition: Value, if_true: Value, if_false: Value) -> Value:
        """Choose element by element; tract converts neither branch (docs/contributing/engine-facts.md#typing-rules)."""
        shape = broadcast_shape(condition.shape, broadcast_shape(if_true.shape, if_false.shape))
        branches = [self._exact(branch) for branch in (if_true, if_false)]
        operands = [self.align_rank(value, len(shape)) for value in (condition, *branches)]
        return self.emit("select", operands, shape=shape, dtype=if_true.dtype)

    def _exact(self, value: Value) -> Value:
        # A float literal is f32 for tract; `select` wants the very type of the other branch.
        return value if value.dtype is torch.float32 else self.materialised(value)

    def reduce(
        self, operator: str, value: Value, axes: Sequence[int], *, keepdim: bool, dtype: torch.dtype | None = None
    ) -> Value:
        """Reduce along non-negative axes: others abort (docs/contributing/engine-facts.md#what-aborts-the-process)."""
        if operator == "mean_reduce" and not all(isinstance(value.shape[axis], int) for axis in axes):
            # `mean_reduce` divides by a size, see `unlike_masks`.
            count = self.scalar(sympy.Mul(*(value.shape[axis] for axis in axes)), value.dtype)
            return self.binary("div", self.reduce("sum_reduce", value, axes, keepdim=keepdim), count)
        kept = [1 if axis in set(axes) else dim for axis, dim in enumerate(value.shape)]
        attributes: dict[str, Argument] = {"axes": ints(sorted(axes))}
        result = self.emit(operator, [value], shape=kept, dtype=dtype or value.dtype, attributes=attributes)
        return result if keepdim else self.squeeze(result, sorted(axes))

    def holds_copies(self, value: Value, axis: int) -> bool:
        """Say whether an axis of a value is certain to hold copies of one row."""
        return self._repeated.surely(value, axis)

    def picked(self, value: Value, axes: Sequence[int]) -> Value:
        """Return a value whose one row along each of these axes is gathered as often as it was repeated."""
        for axis in axes:
            indices = self.broadcast(self.align_rank(self.scalar(0, torch.int64), 1), [value.shape[axis]])
            operands, attributes = [self.slice(value, axis, 0, 1), indices], {"axis": axis}
            value = self.emit(
                "tract_core_gather", operands, shape=value.shape, dtype=value.dtype, attributes=dict(attributes)
            )
        return value

    def einsum(self, expression: str, values: Sequence[Value], *, accumulator: torch.dtype) -> Value:
        """Emit a product written as an einsum.

        `accumulator` is also the element type of the result (docs/contributing/engine-facts.md#operators-of-tract_core).
        """
        expression, values = reading_stored_weights(self.maker_of, self.label_of, expression, values)
        for each in rejoined_operands(self._repeated, self.maker_of, expression, values):
            parts = [self.picked(*part) for part in zip(each.parts, each.picked, strict=True)]
            values[each.place] = self.concat(parts, each.axis)
        sizes: dict[str, Dim] = {}
        terms, output = expression.split("->")
        for term, value in zip(terms.split(","), values, strict=True):
            for letter, dim in zip(term, value.shape, strict=True):
                known = sizes.setdefault(letter, dim)
                if not same_dim(known, dim) and not (same_dim(dim, 1) or same_dim(known, 1)):
                    # docs/contributing/engine-facts.md#ranks-and-unchecked-shapes: tract does not check.
                    raise GraphError(
                        f"einsum {expression!r}: axis {letter!r} is {dim_text(known)} and {dim_text(dim)}.",
                        symbols=(*symbols_of(known), *symbols_of(dim)),
                    )
        equal = None if self.spelling.square_products else equal_free_axis(expression, values)
        if equal is not None:
            longer = self._one_row_more(values[1], terms.split(",")[1].index(equal))
            product = self.einsum(expression, [values[0], longer], accumulator=accumulator)
            return self.slice(product, output.index(equal), 0, sizes[equal])
        attributes: dict[str, Argument] = {"expr": expression, "acc": tract_dtype(accumulator)}
        shape = [sizes[letter] for letter in output]
        lost = self._repeated.lost_by_einsum(expression, values)
        if not lost:
            return self.emit("tract_core_einsum", [list(values)], shape=shape, dtype=accumulator, attributes=attributes)
        letters = self._repeated.single_letters(expression, values, lost)
        single = [
            self._first_of(value, [axis for axis, letter in enumerate(term) if letter in letters])
            for term, value in zip(terms.split(","), values, strict=True)
        ]
        kept: list[Dim] = [1 if letter in letters else sizes[letter] for letter in output]
        result = self.emit("tract_core_einsum", [single], shape=kept, dtype=accumulator, attributes=attributes)
        attributes = {"shape": shape_argument(shape)}  # what tract forgets (see repeated_axes.py) is said again
        return self.emit("tract_core_broadcast", [result], shape=shape, dtype=accumulator, attributes=attributes)

    def _one_row_more(self, value: Value, axis: int) -> Value:
        shape = [*value.shape[:axis], simplify_dim(sympy.sympify(value.shape[axis]) + 1), *value.shape[axis + 1 :]]
        amounts = ArrayLiteral(tuple(TupleLiteral((0, int(axis == other))) for other in range(value.rank)))
        attributes: dict[str, Argument] = {"padding": amounts, "border": "constant", "value": 0.0}
        return self.emit("pad", [value], shape=shape, dtype=value.dtype, attributes=attributes)

    def _first_of(self, value: Value, axes: Sequence[int]) -> Value:
        for axis in axes:
            if not same_dim(value.shape[axis], 1):
                value = self.slice(value, axis, 0, 1)
        return value

    def product(self, expression: str, values: Sequence[Value]) -> Value:
        """Emit a matrix product in the values' element type, honouring `numerics.f32_linear_accumulation`."""
        dtype = values[0].dtype
        wide = dtype is torch.float16 and self.numerics.f32_linear_accumulation
        return self.cast(self.einsum(expression, values, accumulator=torch.float32 if wide else dtype), dtype)


def _to(dtype: torch.dtype) -> dict[str, Argument]:
    return {"to": tract_dtype(dtype)}


# Reshapes, so that tract can prove them: it compares volumes by their form.
# In: the shape of a value, and the one that PyTorch gives it. Out: which axes change, and which are cut to sizes that
# divide.
def provable_cuts(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[list[tuple[int, Dim]], list[Dim]]:
    """Return the axes of `before` to cut to a provable size, and `after` with its merged axes at theirs."""
    cuts: list[tuple[int, Dim]] = []
    written = list(after)
    if not any(_divides(dim) for dim in (*before, *after)):
        return cuts, written
    for first_in, stop_in, first_out, stop_out in _groups(before, after):
        consumed, produced = _volume(before[first_in:stop_in]), _volume(after[first_out:stop_out])
        if same_dim(consumed, produced):
            continue
        if stop_in - first_in == 1:
            cuts.append((first_in, produced))
        elif stop_out - first_out == 1:
            written[first_out] = consumed
    return cuts, written


def _groups(before: Sequence[Dim], after: Sequence[Dim]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of axes, in and out, of equal volume when every division is taken as exact."""
    start_in = start_out = 0
    while start_in < len(before) and start_out < len(after):
        stop_in, stop_out = start_in + 1, start_out + 1
        while (ratio := _ratio(before[start_in:stop_in], after[start_out:stop_out])) != 1:
            if stop_out < len(after) and (stop_in == len(before) or not _is_fraction(ratio)):
                stop_out += 1
            elif stop_in < len(before):
                stop_in += 1
            else:
                return
        yield start_in, stop_in, start_out, stop_out
        start_in, start_out = stop_in, stop_out


def _ratio(consumed: Sequence[Dim], produced: Sequence[Dim]) -> sympy.Expr:
    return sympy.simplify(_exact(_volume(consumed)) / _exact(_volume(produced)))


def _is_fraction(ratio: sympy.Expr) -> bool:
    """Say whether more of the input is needed: the output's run is the larger one."""
    numerator, denominator = ratio.as_numer_denom()
    return bool(numerator.is_number and not denominator.is_number) or bool(ratio.is_number and ratio < 1)


def _divides(dim: Dim) -> bool:
    return not isinstance(dim, int) and dim.has(torch_sympy.FloorDiv, *REMAINDERS)


def _exact(dim: Dim) -> sympy.Expr:
    expr = sympy.sympify(dim)
    return expr.replace(torch_sympy.FloorDiv, lambda base, divisor: base / divisor)


def _volume(dims: Sequence[Dim]) -> Dim:
    total = sympy.Integer(1)
    for dim in dims:
        total = total * sympy.sympify(dim)
    return simplify_dim(total)


def changed_axes(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[int, int, int]:
    """Return where two shapes start to differ, and where each one's differing part ends."""
    start = 0
    while start < min(len(before), len(after)) and same_dim(before[start], after[start]):
        start += 1
    tail = 0
    while tail < min(len(before), len(after)) - start and same_dim(before[-1 - tail], after[-1 - tail]):
        tail += 1
    return start, len(before) - tail, len(after) - tail


__all__ = [
    "Emission",
    "NnefBuilder",
    "QuantisedTensor",
    "Scalar",
    "Value",
    "broadcast_shape",
    "changed_axes",
    "ints",
    "provable_cuts",
    "shape_argument",
    "tract_dtype",
]
