"""`KhronosNNEF`: standard NNEF 1.0 only, static shapes; what tract adds is rewritten, or refused by name.

Operator list: The Khronos NNEF Specification 1.0.5, chapter 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from generic_export.errors import GraphError, OptionError, UnsupportedOperatorError
from generic_export.inference_target.base import InferenceTarget
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation

_STANDARD_OPERATORS = frozenset(
    """
    external variable copy neg rcp exp log sin cos tan tanh sinh cosh asin acos atan asinh acosh atanh abs sign not
    floor ceil round add sub mul div pow lt gt le ge eq ne and or sqr sqrt rsqr rsqrt log2 min max clamp select
    reshape squeeze unsqueeze transpose concat split stack unstack slice pad tile gather cast
    sum_reduce max_reduce min_reduce mean_reduce argmax_reduce argmin_reduce any_reduce all_reduce matmul
    conv deconv box debox max_pool avg_pool rms_pool linear relu sigmoid elu selu gelu silu prelu leaky_relu softabs
    softmax softplus batch_normalization local_response_normalization
    """.split()  # noqa: SIM905
)

# tract spelling -> NNEF 1.0 spelling, where the meaning is the same.
_RENAMED = {"recip": "rcp", "square": "sqr", "tract_core_silu": "silu"}

_EXTERNAL_TYPES = {
    "f32": "scalar",
    "f16": "scalar",
    "f64": "scalar",
    "i64": "integer",
    "i32": "integer",
    "bool": "logical",
}

# Matrix products that `matmul` says as well; the einsums that `ops/linear.py` writes for weights and activations.
_MATMUL_FORMS: Mapping[str, Mapping[str, Argument]] = {
    "ak,nk->an": {"transposeB": True},
    "mk,kn->mn": {},
}


@dataclass(frozen=True, kw_only=True)
class KhronosNNEF(InferenceTarget):
    """Export strict NNEF 1.0. There is no engine to check with, so `check_io` must be off.

    Raises:
        OptionError: dynamic axes or `check_io` were asked for.
    """

    check_io: bool = False

    def __post_init__(self) -> None:
        if self.dynamic_axes:
            raise OptionError("NNEF 1.0 has no symbolic sizes.", "Leave dynamic_axes empty, or use TractNNEF.")
        if self.check_io:
            raise OptionError("KhronosNNEF has no engine to check with.", "Leave check_io off, or use TractNNEF.")

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the document in NNEF 1.0.

        Raises:
            UnsupportedOperatorError: an operation has no NNEF 1.0 form; it is named with its module.
        """
        operations = tuple(_standard(operation) for operation in graph.operations)
        return replace(
            graph, operations=operations, registries=(), symbols=(), assertions=(), fragments=(), properties=()
        )


def _standard(operation: NnefOperation) -> NnefOperation:
    rewrite = _REWRITES.get(operation.operator)
    rewritten = rewrite(operation) if rewrite is not None else operation
    renamed = _RENAMED.get(rewritten.operator, rewritten.operator)
    if renamed not in _STANDARD_OPERATORS:
        raise UnsupportedOperatorError(
            f"{operation.operator} at {operation.block.path or '(root)'}: NNEF 1.0 has no such operator.",
            "Use TractNNEF, or write that part of the model with standard operators.",
        )
    return replace(rewritten, operator=renamed)


def _external(operation: NnefOperation) -> NnefOperation:
    attributes = dict(operation.attributes)
    generic = _EXTERNAL_TYPES.get(str(attributes.get("datum_type")))
    if generic is None:
        raise UnsupportedOperatorError(
            f"input {operation.outputs[0]!r}: NNEF 1.0 has no {attributes.get('datum_type')}."
        )
    return replace(operation, operator="external", generic_type=generic, attributes=(("shape", attributes["shape"]),))


def _einsum(operation: NnefOperation) -> NnefOperation:
    expression = str(dict(operation.attributes)["expr"])
    form = _MATMUL_FORMS.get(expression)
    if form is None:
        raise UnsupportedOperatorError(
            f"product {expression!r} at {operation.block.path or '(root)'}: NNEF 1.0 has matmul of equal ranks only.",
            "Flatten the leading axes before the layer, or use TractNNEF.",
        )
    (operands,) = operation.inputs
    if not isinstance(operands, ArrayLiteral):
        raise GraphError(f"tract_core_einsum -> {operation.outputs[0]}: its operands are not a list.")
    return replace(operation, operator="matmul", inputs=operands.elements, attributes=tuple(form.items()))


_REWRITES: Mapping[str, Callable[[NnefOperation], NnefOperation]] = {
    "tract_core_external": _external,
    "tract_core_einsum": _einsum,
}
