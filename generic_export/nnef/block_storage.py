"""Which stored tensors may lie in the archive as blocks, and the graph that reads them so.

In: an `NnefGraph` whose tensors are plain. Out: what stands in the way of each tensor, and a new graph whose variables, and
the operations that read them, suit block formats (facts: tract 0.23.9, NNEF loader and einsum codegen).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from generic_export.errors import GraphError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import (
    Argument,
    ArrayLiteral,
    NnefGraph,
    NnefOperation,
    NnefVariable,
    Reference,
    references,
)
from generic_export.nnef.rewriting import FreeNames, attribute, cast_operation, negated_twice, renamed, with_attribute

_GROUP = 32
_FLOATS = ("f16", "f32")
_GATHER_ONLY = frozenset({"q8_1"})  # tract has no product for it
_MOVES = frozenset({"reshape", "squeeze", "transpose", "unsqueeze"})
_MOE_OPERANDS = (2, 3, 4)  # w1, w2, w3 of tract_moe_ffn


@dataclass(frozen=True)
class StorageUse:
    """How the operations of a graph read one stored tensor.

    Attributes:
        gathered: rows of it are picked (an embedding).
        multiplied: it is a weight of products or convolutions.
        axes: the order of axes that puts the summed one last, where it is not; None when it lies as blocks want it.
        obstacle: why it cannot be stored in blocks, or "".
        addable: what reads it can be done for two tensors instead, and the results added up.
    """

    gathered: bool = False
    multiplied: bool = False
    axes: tuple[int, ...] | None = None
    obstacle: str = ""
    addable: bool = False


def storage_uses(graph: NnefGraph) -> dict[str, StorageUse]:
    """Return, by label, how each float tensor of rank 2 and more is read; others are no matter for blocks."""
    readers = _readers(graph.operations)
    names = _variable_names(graph)
    uses: dict[str, StorageUse] = {}
    for variable in graph.variables:
        if variable.dtype in _FLOATS and len(variable.shape) >= 2:
            found = [
                _use(variable, name, op, readers) for name in names[variable.label] for op in readers.get(name, ())
            ]
            uses[variable.label] = _combined(variable, found)
    return uses


def may_store(use: StorageUse, block_format: str) -> str:
    """Return why a tensor that is read so cannot be in a block format, or ""."""
    if use.obstacle:
        return use.obstacle
    if use.multiplied and block_format in _GATHER_ONLY:
        return f"tract has no matmul with {block_format} weights"
    return ""


def split_products(graph: NnefGraph, labels: Mapping[str, str]) -> NnefGraph:
    """Return the graph with a variable of their own for the products that read a tensor which is also gathered from.

    Args:
        graph: the document.
        labels: label of the tensor -> label of the copy that the products read.
    """
    names = _variable_names(graph)
    names_left = FreeNames(graph)
    copies: dict[str, str] = {}
    for label in labels:
        for name in names[label]:
            copies[name] = names_left.take(f"{name}_product")
    operations: list[NnefOperation] = []
    placed: set[str] = set()
    for op in graph.operations:
        wanted = [name for name in references(op) if name in copies and op.operator == "tract_core_einsum"]
        for name in wanted:
            if name not in placed:
                placed.add(name)
                operations.append(_copied_variable(graph, name, copies[name], labels, op))
        operations.append(renamed(op, {name: copies[name] for name in wanted}) if wanted else op)
    by_label = {variable.label: variable for variable in graph.variables}
    added = tuple(replace(by_label[label], label=copy) for label, copy in labels.items())
    return replace(graph, operations=tuple(operations), variables=(*graph.variables, *added))


def store_in_blocks(graph: NnefGraph, formats: Mapping[str, str]) -> NnefGraph:
    """Return the graph that reads some of its tensors from blocks.

    Products of f16 values with Q4_0 weights accumulate in f32 and are rounded to f16 once.

    Args:
        graph: the document.
        formats: label -> name of a block format.

    Raises:
        GraphError: a tensor cannot be stored so; `storage_uses` says beforehand.
    """
    uses = storage_uses(graph)
    for label, block_format in formats.items():
        _require(label, block_format, uses)
    names = _variable_names(graph)
    axes = {label: uses[label].axes for label in formats}
    label_of = {name: label for label in formats for name in names[label]}
    joined = _joined(graph.operations)
    names_left = FreeNames(graph)
    operations: list[NnefOperation] = []
    for op in graph.operations:
        if op.operator == "variable" and op.outputs[0] in label_of:
            label = label_of[op.outputs[0]]
            operations.append(_block_variable(op, formats[label], axes[label]))
        elif op.operator == "tract_core_einsum" and any(name in label_of for name in references(op)):
            moved = {name: axes[label_of[name]] for name in references(op) if name in label_of}
            # tract makes a product that sums over a concatenated axis a sum of products with slices of the weights, and aborts on a
            # slice of blocks.
            hidden = {name: negated_twice(Reference(name), op, names_left) for name in references(op) if name in joined}
            operations.extend(negation for pair in hidden.values() for negation in pair)
            product = _blocks_first(_permuted_product(op, moved), set(moved))
            product = renamed(product, {name: twice.outputs[0] for name, (_, twice) in hidden.items()})
            operations.extend(_wide_product(product, names_left))
        else:
            operations.append(op)
    variables = tuple(
        replace(variable, dtype=formats[variable.label], shape=_permuted(variable.shape, axes[variable.label]))
        if variable.label in formats
        else variable
        for variable in graph.variables
    )
    return replace(graph, operations=tuple(operations), variables=variables)


# --- reading the graph --------------------------------------------------------------------------


def _joined(operations: Iterable[NnefOperation]) -> set[str]:
    """Return what is a concatenation, or one whose axes were moved: the engine moves them back."""
    joined: set[str] = set()
    for op in operations:
        moved = op.operator in _MOVES and any(name in joined for name in references(op))
        if op.operator == "concat" or moved:
            joined.update(op.outputs)
    return joined


def _readers(operations: Iterable[NnefOperation]) -> dict[str, list[NnefOperation]]:
    readers: dict[str, list[NnefOperation]] = {}
    for op in operations:
        for name in dict.fromkeys(references(op)):
            readers.setdefault(name, []).append(op)
    return readers


def _variable_names(graph: NnefGraph) -> dict[str, list[str]]:
    """Return the identifiers under which each label is read."""
    names: dict[str, list[str]] = {variable.label: [] for variable in graph.variables}
    for op in graph.operations:
        if op.operator == "variable":
            names[str(attribute(op, "label"))].append(op.outputs[0])
    return names


def _use(
    variable: NnefVariable, name: str, op: NnefOperation, readers: Mapping[str, Sequence[NnefOperation]]
) -> StorageUse:
    if op.operator == "tract_core_gather" and op.inputs[0] == Reference(name) and attribute(op, "axis") == 0:
        return StorageUse(gathered=True, addable=True)
    if op.operator == "tract_core_einsum":
        return replace(_product_use(variable, name, op), addable=True)
    if op.operator == "reshape" and _folds_back(variable, op, readers):
        return StorageUse(gathered=True, addable=True)
    if op.operator == "conv" and op.inputs[1] == Reference(name):
        grouped = attribute(op, "groups") != 1
        return StorageUse(multiplied=True, obstacle="it is the kernel of a grouped convolution" if grouped else "")
    if op.operator == "tract_moe_ffn" and Reference(name) in [
        op.inputs[i] for i in _MOE_OPERANDS if i < len(op.inputs)
    ]:
        linear = attribute(op, "expert_layout") == "linear"
        return StorageUse(multiplied=True, obstacle="" if linear else "the layout of its experts does not suit blocks")
    return StorageUse(obstacle=f"{op.operator} ({op.outputs[0]}) reads it")


def _folds_back(variable: NnefVariable, op: NnefOperation, readers: Mapping[str, Sequence[NnefOperation]]) -> bool:
    """Say whether a reshape is the first half of folding a table out and back before a gather (ops/indexing.py)."""
    if len(variable.shape) != 2 or len(readers.get(op.outputs[0], ())) != 1:
        return False
    back = readers[op.outputs[0]][0]
    if back.operator != "reshape" or attribute(back, "shape") != ArrayLiteral((variable.shape[1],)):
        return False
    last = readers.get(back.outputs[0], ())
    return bool(last) and all(
        reader.operator == "tract_core_gather" and reader.inputs[0] == Reference(back.outputs[0]) for reader in last
    )


def _product_use(variable: NnefVariable, name: str, op: NnefOperation) -> StorageUse:
    terms, output, operands = _einsum(op)
    places = [index for index, operand in enumerate(operands) if operand == Reference(name)]
    if len(operands) != 2 or len(places) != 1:
        return StorageUse(multiplied=True, obstacle=f"{op.outputs[0]} is not a matmul of it with one other tensor")
    letters, other = terms[places[0]], terms[1 - places[0]]
    summed = [letter for letter in letters if letter not in output and letter in other]
    if not summed or len(set(letters)) < len(letters):
        return StorageUse(multiplied=True, obstacle=f"{op.outputs[0]} does not sum over its last axis")
    if letters.endswith("".join(summed)):
        whole_rows = variable.shape[-1] % _GROUP == 0 or len(summed) == len(letters) - 1
        odd = f"its last axis is {variable.shape[-1]}, not a multiple of {_GROUP}"
        return StorageUse(multiplied=True, obstacle="" if whole_rows else odd)
    if len(summed) > 1:
        return StorageUse(multiplied=True, obstacle=f"{op.outputs[0]} sums over several of its axes")
    order = [axis for axis, letter in enumerate(letters) if letter not in summed]
    last = letters.index(summed[0])
    if len(order) > 1 and variable.shape[last] % _GROUP:
        odd = f"{op.outputs[0]} sums over {variable.shape[last]} values of it, not a multiple of {_GROUP}"
        return StorageUse(multiplied=True, obstacle=odd)
    return StorageUse(multiplied=True, axes=(*order, last))


def _einsum(op: NnefOperation) -> tuple[list[str], str, tuple[Argument, ...]]:
    expression = str(attribute(op, "expr"))
    terms, _, output = expression.partition("->")
    operands = op.inputs[0]
    return terms.split(","), output, operands.elements if isinstance(operands, ArrayLiteral) else ()


def _combined(variable: NnefVariable, uses: Sequence[StorageUse]) -> StorageUse:
    gathered, multiplied = any(use.gathered for use in uses), any(use.multiplied for use in uses)
    orders = {use.axes for use in uses}
    axes = next(iter(orders)) if len(orders) == 1 else None
    obstacle = next((use.obstacle for use in uses if use.obstacle), "")
    if not obstacle and not uses:
        obstacle = "nothing reads it"
    if not obstacle and len(orders) > 1:
        obstacle = "operations sum over different axes of it"
    shape = _permuted(variable.shape, axes)
    if not obstacle and math.prod(shape[1:]) % _GROUP:
        obstacle = f"its rows have {math.prod(shape[1:])} values, not a multiple of {_GROUP}"
    return StorageUse(gathered, multiplied, axes, obstacle, all(use.addable for use in uses))


def _require(label: str, block_format: str, uses: Mapping[str, StorageUse]) -> None:
    if block_format not in BLOCK_FORMATS:
        raise GraphError(f"tensor {label!r}: block format {block_format!r} is unknown.")
    use = uses.get(label, StorageUse(obstacle="the graph has no float matrix with that name"))
    reason = may_store(use, block_format)
    if reason:
        raise GraphError(f"tensor {label!r} cannot be stored as {block_format}: {reason}.", "Keep it in f16 or f32.")


# --- writing the new one ------------------------------------------------------------------------


def _permuted(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> tuple[int, ...]:
    return shape if axes is None else tuple(shape[axis] for axis in axes)


def _block_variable(op: NnefOperation, block_format: str, axes: tuple[int, ...] | None) -> NnefOperation:
    sizes = attribute(op, "shape")
    elements = sizes.elements if isinstance(sizes, ArrayLiteral) else ()
    ordered = elements if axes is None else tuple(elements[axis] for axis in axes)
    note = f"{block_format} [{','.join(str(size) for size in ordered)}]"
    return replace(with_attribute(op, "shape", ArrayLiteral(ordered)), note=note)


def _permuted_product(op: NnefOperation, moved: Mapping[str, tuple[int, ...] | None]) -> NnefOperation:
    """Return an einsum that reads its weights with their axes in another order."""
    terms, output, operands = _einsum(op)
    for index, operand in enumerate(operands):
        axes = moved.get(operand.name) if isinstance(operand, Reference) else None
        if axes is not None:
            terms[index] = "".join(terms[index][axis] for axis in axes)
    return with_attribute(op, "expr", f"{','.join(terms)}->{output}")


def _blocks_first(op: NnefOperation, blocks: set[str]) -> NnefOperation:
    """Return an einsum whose first operand is the one in blocks."""
    # tract moves a reshape that joins axes of the other operand (heads after attention) behind the product, which then sums
    # over two axes; with blocks as the second operand and a batch axis it gives wrong numbers
    # (docs/contributing/engine-facts.md#where-blocks-may-be-used).
    terms, output, operands = _einsum(op)
    if len(operands) != 2 or not isinstance(operands[1], Reference) or operands[1].name not in blocks:
        return op
    swapped = replace(op, inputs=(ArrayLiteral(operands[::-1]), *op.inputs[1:]))
    return with_attribute(swapped, "expr", f"{terms[1]},{terms[0]}->{output}")


def _wide_product(op: NnefOperation, names: FreeNames) -> list[NnefOperation]:
    """Return the einsum accumulating in f32, and the cast that rounds it where its result was f16."""
    # On x86 the Q4_0 kernels accumulate in f32 whatever is said; those of ARM with f16 arithmetic do as they are told.
    if attribute(op, "acc") != "f16":
        return [op]
    sums = names.take(f"{op.outputs[0]}_sum")
    product = replace(with_attribute(op, "acc", "f32"), outputs=(sums,), note=op.note.replace("f16", "f32", 1))
    return [product, cast_operation(sums, op.outputs[0], "f16", op, op.note)]


def _copied_variable(
    graph: NnefGraph, name: str, copy: str, labels: Mapping[str, str], reader: NnefOperation
) -> NnefOperation:
    original = next(op for op in graph.operations if op.operator == "variable" and op.outputs == (name,))
    label = labels[str(attribute(original, "label"))]
    return replace(with_attribute(original, "label", label), outputs=(copy,), block=reader.block)
