"""Operators that cannot stay, written with others: PyTorch's own decompositions, one level at a time.

In: an exported program and a predicate of operators that may stay. Out: a program of those. Only the nodes in question
are traced anew; retracing a whole model takes longer than capturing it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from generic_export.compat import COMPOSITE, OpOverload, detect_fake_mode, is_mapped_over, pytree, schema_of
from generic_export.errors import UnsupportedOperatorError
from generic_export.torch_graph.decompose.in_place import without_writes
from generic_export.torch_graph.decompose.region_features import roi_align
from generic_export.torch_graph.decompose.rewrites import REWRITES

Decomposition = Callable[..., Any]

_MAX_ROUNDS = 8
ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")
"""What an inserted node takes over from the one it replaces: where the user wrote it."""

aten = torch.ops.aten

# Calls that only check or annotate: they make no value that the graph needs.
_NAMES = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)
SCALAR_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place operators and `torch.vmap`: edited in place, or retraced by PyTorch."""
    if any(is_mapped_over(node) for module in _graph_modules(program) for node in module.graph.nodes):
        program = program.run_decompositions({})
    if _has_writes(program):
        without_writes(program)
    return program.run_decompositions({}) if _has_writes(program) else program


def _has_writes(program: ExportedProgram) -> bool:
    return any(schema_of(overload).is_mutable for overload in _overloads(program))


def decomposed(program: ExportedProgram, keep: Callable[[OpOverload], bool]) -> ExportedProgram:
    """Rewrite the operators that cannot stay, one level at a time, until all can or nothing more can be done.

    Args:
        program: just exported; its graph is edited in place.
        keep: says whether an operator can stay as it is.
    """
    rewritten = {**REWRITES, **torchvision_rewrites(), **grouped_rewrites()}
    known: Any = None  # a custom table of PyTorch's, made when it is needed: that takes a while
    for _ in range(_MAX_ROUNDS):
        unwanted = {op for op in _overloads(program) if not keep(op) and not is_annotation(op)}
        if not unwanted:
            return program
        known = known if known is not None else torch.export.default_decompositions()
        table = {op: rewritten.get(op) or known[op] for op in unwanted if op in rewritten or op in known}
        # Operators that PyTorch writes with others, and that torch.export keeps whole: `expand_as`, `hsplit`, `mT`.
        table |= {op: op.decompose for op in unwanted - table.keys() if op.has_kernel_for_dispatch_key(COMPOSITE)}
        if not table:
            return program
        helps = _helps(keep, known)
        left = {op for module in _graph_modules(program) for op in _rewrite_nodes(module, table, helps)}
        if left:
            program = program.run_decompositions({op: table[op] for op in left})
        program = functional(program)
    return program


def _helps(
    keep: Callable[[OpOverload], bool], known: Mapping[OpOverload, Decomposition]
) -> Callable[[OpOverload], bool]:
    """Return what says whether an operator that a decomposition makes can stay, or be decomposed in turn."""
    return lambda op: (
        keep(op) or is_annotation(op) or op in REWRITES or op in known or op.has_kernel_for_dispatch_key(COMPOSITE)
    )


def _graph_modules(program: ExportedProgram) -> list[GraphModule]:
    return [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]


def _overloads(program: ExportedProgram) -> set[OpOverload]:
    return {
        node.target
        for graph_module in _graph_modules(program)
        for node in graph_module.graph.nodes
        if _is_operator(node)
    }


def _is_operator(node: Node) -> bool:
    # Arithmetic on sizes is no operator of the graph: PyTorch has its result as an expression.
    return isinstance(node.target, OpOverload) and not isinstance(node.meta.get("val"), SCALAR_TYPES)


def _rewrite_nodes(
    graph_module: GraphModule, table: Mapping[OpOverload, Decomposition], helps: Callable[[OpOverload], bool]
) -> set[OpOverload]:
    """Rewrite the operators of a table where they stand; returns those that need the whole program retraced.

    A tensor that a decomposition makes must be stored in the program; and traced alone, operators that PyTorch writes
    with others (`linalg_solve`) are taken apart at once, also where their whole is what can be translated.
    """
    left = set()
    for node in list(graph_module.graph.nodes):
        if _is_operator(node) and node.target in table and not _replaced(node, table[node.target], helps):
            left.add(node.target)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return left


def _replaced(node: Node, decomposition: Decomposition, helps: Callable[[OpOverload], bool]) -> bool:
    """Put what the decomposition does in the place of a node; False when that cannot be done here."""
    arguments, layout = pytree.tree_flatten((node.args, dict(node.kwargs)), is_leaf=_is_symbolic)
    inputs = [argument for argument in arguments if _is_symbolic(argument)]

    def function(*values: Any) -> Any:
        given = iter(values)
        leaves = [next(given) if _is_symbolic(argument) else argument for argument in arguments]
        args, kwargs = _mutable(pytree.tree_unflatten(leaves, layout))
        result = decomposition(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    examples = [argument.meta["val"] for argument in inputs]
    # Tensors that the decomposition makes are fake too, and of the same program: where it is given nothing but sizes (`torch.eye`,
    # `linspace`) the result says so.
    with detect_fake_mode([*examples, *pytree.tree_leaves(node.meta.get("val"))]) or nullcontext():
        body = make_fx(function)(*examples)
    if not _is_flat(body) or not all(_fits(inner, helps) for inner in body.graph.nodes):
        return False
    with node.graph.inserting_before(node):
        results = _inlined(body, inputs, node)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):  # getitem
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def _fits(inner: Node, helps: Callable[[OpOverload], bool]) -> bool:
    if isinstance(inner.target, OpOverload):
        return not _is_operator(inner) or helps(inner.target)
    return inner.op != "get_attr"


def _is_flat(body: GraphModule) -> bool:
    result = next(inner for inner in body.graph.nodes if inner.op == "output").args[0]
    return isinstance(result, Node) or all(isinstance(item, Node) for item in result)


def _mutable(value: Any) -> Any:
    """Return arguments as a caller gives them: torch.fx keeps lists and dicts that cannot be changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_mutable, value)) if isinstance(value, tuple) else [_mutable(item) for item in value]
    return {key: _mutable(item) for key, item in value.items()} if isinstance(value, dict) else value


def _is_symbolic(argument: object) -> bool:
    return isinstance(argument, Node)


def _inlined(body: GraphModule, inputs: list[Node], origin: Node) -> Any:
    """Copy the nodes of a traced decomposition before `origin`; returns its result, or the sequence of them."""
    copies: dict[Node, Node] = {}
    given = iter(inputs)
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(given)
        elif inner.op == "output":
            return pytree.tree_map_only(Node, lambda result: copies[result], inner.args[0])
        else:
            copies[inner] = origin.graph.node_copy(inner, lambda argument: copies[argument])
            copies[inner].meta |= {key: origin.meta[key] for key in ORIGIN if key in origin.meta}
    return None


# Products of groups of rows with a matrix of each group's own, as mixtures of experts compute them, with tensors of
# PyTorch alone.
# The groups' ends are values, so that no size is known: every row is multiplied with every matrix, and its own product
# is kept.
def grouped_rewrites() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return the functions that stand for such operators, where a library has registered them."""
    name = "grouped_mm_fallback"  # registered by transformers for what torch.nn.functional.grouped_mm does not take
    library = torch.ops.transformers
    return {getattr(library, name).default: grouped_products} if hasattr(library, name) else {}


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return `input[s] @ weight[g]` for each row s of group g, [S, N]; rows behind the last group are 0.

    Args:
        input: [S, K], the rows of each group together.
        weight: [G, K, N].
        offs: where each group ends, [G].
    """
    rows = torch.arange(input.shape[0], device=input.device)
    begins = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    own = (rows >= begins[:, None]) & (rows < offs[:, None])
    products = torch.matmul(input.unsqueeze(0), weight)
    return torch.where(own.unsqueeze(2), products, torch.zeros_like(products)).sum(0)


def torchvision_rewrites() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return the functions of tensors that stand for torchvision's operators; none where they are not there."""
    if "torchvision" not in sys.modules:
        return {}
    operators = torch.ops.torchvision  # a build without its extension has none of them
    return {getattr(operators, name).default: made for name, made in _MADE.items() if hasattr(operators, name)}


def _nms(*args: Any) -> NoReturn:
    raise UnsupportedOperatorError(
        "torchvision.nms keeps as many boxes as the data say, and a graph has no such size.",
        "generic_export.detection.bounded_nms (and bounded_batched_nms) keeps the same ones in a fixed number of places; "
        "generic_export.detection.exportable_detector does so for a whole detector.",
    )


_MADE: Mapping[str, Callable[..., Any]] = {"roi_align": roi_align, "nms": _nms}


# Nodes of a captured program that are no operators of the graph: checks, annotations, arithmetic on sizes.
def is_annotation(overload: OpOverload) -> bool:
    """Say whether an operator only checks or annotates."""
    return schema_of(overload).name.split("::")[-1] in _NAMES
