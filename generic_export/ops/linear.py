"""Matrix products. Every one becomes a `tract_core_einsum`, with weights as PyTorch stores them ([out, in])."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.errors import TranslationError
from generic_export.ops.complex import both_parts, complex_of
from generic_export.ops.integer_products import integer_linear
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, Shape, same_dim
from generic_export.translate.builder import NnefBuilder, Scalar, Value, broadcast_shape
from generic_export.translate.complex_layout import as_complex, as_pairs
from generic_export.translate.operands import result_dtype
from generic_export.translate.registry import translates

aten = torch.ops.aten

_BATCH_LETTERS = "abcdefghij"
_FREE_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


# --- products of any element type ----------------------------------------------------------------


def product(b: NnefBuilder, expression: str, values: Sequence[Value]) -> Value:
    """Emit a product of tensors of one element type, which is also the result's."""
    dtype = values[0].dtype
    if any(value.dtype is not dtype for value in values):
        raise TranslationError(f"matmul of {[str(value.dtype) for value in values]}: PyTorch needs equal dtypes.")
    if any(same_dim(dim, 0) for value in values for dim in value.shape):
        return _empty_product(b, expression, values)
    if dtype.is_complex:
        return _complex_product(b, expression, values)
    if dtype.is_floating_point:
        return _float_product(b, expression, values)
    return _integer_product(b, expression, values)


def _float_product(b: NnefBuilder, expression: str, values: Sequence[Value]) -> Value:
    if not expression.endswith("->"):
        return b.product(expression, values)
    # tract reads an empty result as an implicit one, and keeps every letter that stands once: `ij->` sums nothing.
    first, *rest = values
    kept = b.product("Z" + expression + "Z", [b.unsqueeze(first, [0]), *rest])
    return b.squeeze(kept, [0])


def _empty_product(b: NnefBuilder, expression: str, values: Sequence[Value]) -> Value:
    terms, output = expression.split("->")
    sizes = {
        letter: dim
        for term, value in zip(terms.split(","), values, strict=True)
        for letter, dim in zip(term, value.shape, strict=True)
    }
    return b.full(tuple(sizes[letter] for letter in output), 0, values[0].dtype)


def _integer_product(b: NnefBuilder, expression: str, values: Sequence[Value]) -> Value:
    """Multiply and sum in i64: exact, and an i64 einsum aborts (docs/contributing/engine-facts.md#typing-rules)."""
    terms, output = expression.split("->")
    letters = output + "".join(sorted(set(terms) - set(output) - {","}))
    result: Value | None = None
    for term, value in zip(terms.split(","), values, strict=True):
        if len(set(term)) < len(term):
            raise TranslationError(f"einsum {expression!r} takes a diagonal of integers: use torch.diagonal.")
        ordered = b.transpose(value, [term.index(letter) for letter in letters if letter in term])
        aligned = b.unsqueeze(ordered, [axis for axis, letter in enumerate(letters) if letter not in term])
        wide = b.cast(aligned, torch.int64)
        result = wide if result is None else b.binary("mul", result, wide)
    assert result is not None
    summed = list(range(len(output), len(letters)))
    total = b.reduce("sum_reduce", result, summed, keepdim=False) if summed else result
    return b.cast(total, values[0].dtype)


def _complex_product(b: NnefBuilder, expression: str, values: Sequence[Value]) -> Value:
    if len(values) == 1:
        terms, output = expression.split("->")
        return as_complex(b.product(f"{terms}Z->{output}Z", [as_pairs(values[0])]))
    if len(values) != 2:
        raise TranslationError(f"einsum {expression!r} of {len(values)} complex tensors: contract them two at a time.")
    (a, c), (x, y) = (both_parts(b, value) for value in values)
    ax, cy, ay, cx = (b.product(expression, pair) for pair in ((a, x), (c, y), (a, y), (c, x)))
    return complex_of(b, b.binary("sub", ax, cy), b.binary("add", ay, cx))


# --- aten ----------------------------------------------------------------------------------------


@translates(aten.linear.default)
def linear(b: NnefBuilder, input: Value, weight: Value, bias: Value | None = None) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    in_integers = integer_linear(b, input, weight, bias)
    if in_integers is not None:
        return in_integers
    batch = _BATCH_LETTERS[: input.rank - 1]
    if weight.rank == 1:
        return _with_bias(b, product(b, f"{batch}k,k->{batch}", [input, weight]), bias)
    return _with_bias(b, product(b, f"{batch}k,nk->{batch}n", [input, weight]), bias)


def _with_bias(b: NnefBuilder, result: Value, bias: Value | None) -> Value:
    return result if bias is None else b.binary("add", result, b.cast(bias, result.dtype))


@translates(aten.matmul.default)
def matmul(b: NnefBuilder, self: Value, other: Value) -> Value:
    """matmul(Tensor self, Tensor other) -> Tensor"""
    left = "k" if self.rank == 1 else "mk"
    right = "k" if other.rank == 1 else "kn"
    batch = max(self.rank - len(left), other.rank - len(right), 0)
    shape = broadcast_shape(self.shape[: max(self.rank - 2, 0)], other.shape[: max(other.rank - 2, 0)])
    result = _BATCH_LETTERS[:batch] + left.replace("k", "") + right.replace("k", "")
    (own, first), (others, second) = (_batch(b, value, shape) for value in (self, other))
    return product(b, f"{own}{left},{others}{right}->{result}", [first, second])


def _batch(b: NnefBuilder, value: Value, shape: Shape) -> tuple[str, Value]:
    """Return the letters of the batch axes that the product really runs over, and the factor without the others.

    Those are 1 where the other factor is wider.
    """
    count = max(value.rank - 2, 0)
    offset = len(shape) - count
    kept = [axis for axis in range(count) if same_dim(value.shape[axis], shape[offset + axis])]
    letters = "".join(_BATCH_LETTERS[offset + axis] for axis in kept)
    return letters, b.squeeze(value, [axis for axis in range(count) if axis not in kept])


@translates(aten.mm.default, aten.bmm.default)
def mm(b: NnefBuilder, self: Value, mat2: Value) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor; bmm(Tensor self, Tensor mat2) -> Tensor"""
    return matmul(b, self, mat2)


@translates(aten.mv.default)
def mv(b: NnefBuilder, self: Value, vec: Value) -> Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    return product(b, "mk,k->m", [self, vec])


@translates(aten.dot.default)
def dot(b: NnefBuilder, self: Value, tensor: Value) -> Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    return product(b, "k,k->", [self, tensor])


@translates(aten.addmm.default)
def addmm(b: NnefBuilder, self: Value, mat1: Value, mat2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _accumulated(b, self, product(b, "mk,kn->mn", [mat1, mat2]), beta, alpha)


@translates(aten.baddbmm.default)
def baddbmm(b: NnefBuilder, self: Value, batch1: Value, batch2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _accumulated(b, self, product(b, "amk,akn->amn", [batch1, batch2]), beta, alpha)


@translates(aten.addbmm.default)
def addbmm(b: NnefBuilder, self: Value, batch1: Value, batch2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _accumulated(b, self, product(b, "amk,akn->mn", [batch1, batch2]), beta, alpha)


@translates(aten.addmv.default)
def addmv(b: NnefBuilder, self: Value, mat: Value, vec: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _accumulated(b, self, product(b, "mk,k->m", [mat, vec]), beta, alpha)


@translates(aten.addr.default)
def addr(b: NnefBuilder, self: Value, vec1: Value, vec2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """addr(Tensor self, Tensor vec1, Tensor vec2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    dtype = result_dtype(self, vec1, vec2)
    rows, columns = b.unsqueeze(b.cast(vec1, dtype), [1]), b.unsqueeze(b.cast(vec2, dtype), [0])
    return _accumulated(b, b.cast(self, dtype), b.binary("mul", rows, columns), beta, alpha)


def _accumulated(b: NnefBuilder, addend: Value, result: Value, beta: Scalar, alpha: Scalar) -> Value:
    """beta * addend + alpha * result, where beta = 0 drops the addend (even its NaN)."""
    dtype = result.dtype
    if alpha != 1:
        result = b.binary("mul", result, b.scalar(_number(alpha, dtype), dtype))
    if beta == 0:
        return result
    scaled = addend if beta == 1 else b.binary("mul", addend, b.scalar(_number(beta, dtype), dtype))
    return b.binary("add", result, scaled)


def _number(value: Scalar, dtype: torch.dtype) -> Scalar:
    return float(value) if dtype.is_floating_point else int(value)


# --- einsum --------------------------------------------------------------------------------------


@translates(aten.einsum.default)
def einsum(b: NnefBuilder, equation: str, tensors: Sequence[Value]) -> Value:
    """einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor"""
    dtype = tensors[0].dtype
    values = [b.cast(value, dtype) if not dtype.is_complex else value for value in tensors]
    terms, output = _spelled_out(equation.replace(" ", ""), [value.rank for value in values])
    values, terms = _without_unit_axes(b, values, terms)
    values, terms = _without_diagonals(b, values, terms)
    result = "".join(letter for letter in output if any(letter in term for term in terms))
    reduced = product(b, f"{','.join(terms)}->{result}", values)
    return b.unsqueeze(reduced, [axis for axis, letter in enumerate(output) if letter not in result])


def _spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the terms and the result with letters for `...`, and with an implicit result written out."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    free = [letter for letter in _FREE_LETTERS if letter not in equation]
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    widest = max((width for term, width in zip(terms, widths, strict=True) if "..." in term), default=0)
    batch = "".join(free[:widest])
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spelled = [
        term.replace("...", batch[widest - width :] if width else "") for term, width in zip(terms, widths, strict=True)
    ]
    return spelled, right.replace("...", batch)


def _without_unit_axes(b: NnefBuilder, values: Sequence[Value], terms: Sequence[str]) -> tuple[list[Value], list[str]]:
    """Squeeze axes of size 1 that other operands have wider (or that repeat): the engine does not broadcast those."""
    sizes: dict[str, Dim] = {}
    for value, term in zip(values, terms, strict=True):
        for letter, dim in zip(term, value.shape, strict=True):
            if letter not in sizes or same_dim(sizes[letter], 1):
                sizes[letter] = dim
    kept_values, kept_terms = [], []
    for value, term in zip(values, terms, strict=True):
        unit = [
            axis
            for axis, letter in enumerate(term)
            if same_dim(value.shape[axis], 1) and not same_dim(sizes[letter], 1)
        ]
        kept_values.append(b.squeeze(value, unit))
        kept_terms.append("".join(letter for axis, letter in enumerate(term) if axis not in unit))
    return kept_values, kept_terms


def _without_diagonals(b: NnefBuilder, values: Sequence[Value], terms: Sequence[str]) -> tuple[list[Value], list[str]]:
    """Take the diagonals of repeated letters first: tract's `ii,i->i` is not a product with the diagonal."""
    once = ["".join(dict.fromkeys(term)) for term in terms]
    taken = [
        value if term == short else product(b, f"{term}->{short}", [value])
        for value, term, short in zip(values, terms, once, strict=True)
    ]
    return taken, once


# --- products of several steps -------------------------------------------------------------------


@rewrites(aten.bilinear.default)
def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x1^T W x2 for each output."""
    result = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return result if bias is None else result + bias


@rewrites(aten.vdot.default)
def vdot(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product of a conjugated vector with another."""
    return torch.dot(self.conj_physical(), other)


@rewrites(aten.cdist.default)
def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """Distances between all rows of two matrices."""
    return minkowski(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def minkowski(difference: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm along the last axis."""
    size = difference.abs()
    if p == 0:
        return (size != 0).to(size.dtype).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == float("inf"):
        return size.amax(-1)
    if p == 2:
        return (size * size).sum(-1).sqrt()
    return size.pow(p).sum(-1).pow(1 / p)
