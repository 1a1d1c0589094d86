"""`KhronosNNEF`: standard NNEF 1.0 only, static shapes; what tract adds is rewritten, or refused by name.

Operator list: The Khronos NNEF Specification 1.0.5, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from generic_export.errors import GraphError, OptionError, UnsupportedOperatorError
from generic_export.inference_target.base import InferenceTarget
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.sizes.declared_axes import dynamic_axes_of

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
_RENAMED = {"recip": "rcp", "square": "sqr", "tract_core_silu": "silu", "gelu_exact": "gelu"}

# The largest number of f32: NNEF 1.0 has no literal for infinity.
_LARGEST = 3.4028234663852886e38

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
    """Exports strict NNEF 1.0, without tract's extensions. No engine is available to check it.

    Args:
        dynamic_axes: must be None or empty; NNEF 1.0 has fixed shapes.
        check_io: must be False.

    Raises:
        OptionError: `dynamic_axes` or `check_io` is set.
    """

    dynamic_axes: DynamicAxes = None  # type: ignore[assignment]  # none, as {} is
    check_io: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dynamic_axes", dynamic_axes_of(self.dynamic_axes))
        if self.dynamic_axes:
            raise OptionError("NNEF 1.0 has no symbolic sizes.", "Leave dynamic_axes empty, or use TractNNEF.")
        if self.check_io:
            raise OptionError("KhronosNNEF has no engine to check with.", "Leave check_io off, or use TractNNEF.")

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the document in NNEF 1.0.

        Args:
            graph: the translated document.

        Raises:
            UnsupportedOperatorError: an operation has no form in NNEF 1.0; the message names it and its module.
        """
        read = {name for operation in graph.operations for name in references(operation)} | set(graph.outputs)
        operations = tuple(
            _standard(step) for operation in graph.operations for step in _spelled_out(_finite(operation), read)
        )
        return replace(
            graph,
            operations=operations,
            registries=(),
            symbols=(),
            assertions=(),
            fragments=tuple(fragment for fragment in graph.fragments if fragment.name in _STANDARD_OPERATORS),
            properties=(),
        )


def _finite(operation: NnefOperation) -> NnefOperation:
    """Return an operation whose infinite operands are the largest numbers there are."""
    if not any(isinstance(value, float) and math.isinf(value) for value in operation.inputs):
        return operation
    bounded = (max(min(v, _LARGEST), -_LARGEST) if isinstance(v, float) else v for v in operation.inputs)
    return replace(operation, inputs=tuple(bounded))


def _spelled_out(operation: NnefOperation, read: set[str]) -> tuple[NnefOperation, ...]:
    """Return an operation that NNEF 1.0 has no name for as several that it has names for."""
    if operation.operator == "max_pool_with_index" and operation.outputs[1] not in read:
        return (replace(operation, operator="max_pool", outputs=operation.outputs[:1]),)
    spelling = _SPELLINGS.get(operation.operator)
    return (operation,) if spelling is None else spelling(operation)


def _steps(
    operation: NnefOperation, *steps: tuple[str, tuple[Argument, ...], dict[str, Argument]]
) -> tuple[NnefOperation, ...]:
    """Return a chain of operations: each reads the one before it where its operand is `_PREVIOUS`."""
    (output,) = operation.outputs
    made: list[NnefOperation] = []
    previous = ""
    for index, (operator, inputs, attributes) in enumerate(steps):
        name = output if index == len(steps) - 1 else f"{output}_step_{index}"
        operands = tuple(Reference(previous) if operand is _PREVIOUS else operand for operand in inputs)
        made.append(NnefOperation(operator, operands, tuple(attributes.items()), (name,), operation.block))
        previous = name
    return tuple(made)


_PREVIOUS = Reference("")


def _rms_norm(operation: NnefOperation) -> tuple[NnefOperation, ...]:
    """x * rsqrt(mean(x^2) + eps)"""
    (x,) = operation.inputs
    attributes = dict(operation.attributes)
    axes: dict[str, Argument] = {"axes": ArrayLiteral((attributes["axis"],))}
    return _steps(
        operation,
        ("sqr", (x,), {}),
        ("mean_reduce", (_PREVIOUS,), axes),
        ("add", (_PREVIOUS, attributes["eps"]), {}),
        ("rsqrt", (_PREVIOUS,), {}),
        ("mul", (x, _PREVIOUS), {}),
    )


def _hard_swish(operation: NnefOperation) -> tuple[NnefOperation, ...]:
    """x * clamp(x + 3, 0, 6) / 6"""
    (x,) = operation.inputs
    return _steps(
        operation,
        ("add", (x, 3.0), {}),
        ("clamp", (_PREVIOUS, 0.0, 6.0), {}),
        ("mul", (x, _PREVIOUS), {}),
        ("div", (_PREVIOUS, 6.0), {}),
    )


def _gather(operation: NnefOperation) -> tuple[NnefOperation, ...]:
    kept = tuple((name, value) for name, value in operation.attributes if name == "axis")
    return (replace(operation, operator="gather", attributes=kept),)


_SPELLINGS: Mapping[str, Callable[[NnefOperation], tuple[NnefOperation, ...]]] = {
    "tract_core_rms_norm": _rms_norm,
    "tract_core_hard_swish": _hard_swish,
    "tract_core_gather": _gather,
}


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
