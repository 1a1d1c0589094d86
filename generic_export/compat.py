"""Names of PyTorch that no release promises, once each: what each is for, and the releases that have it.

In: torch. Out: the same things under names that say what they are; every other module of the four packages takes them from here.
All of them are in torch 2.10 to 2.15, where they were tried; where releases differ, the line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, wraps
from traceback import StackSummary
from typing import Any
from unittest import mock

import sympy
import torch
from torch import nn

# TorchScript's graphs, which the interpreter walks and the hardening passes edit; operators give plain tensors inside of
# DisableTorchFunctionSubclass, not ones of a subclass of ours; inside of DisableTorchFunction no mode sees them either.
from torch._C import Block as JitBlock
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, DispatchKey, FunctionSchema, parse_schema
from torch._C import Graph as JitGraph
from torch._C import Node as JitNode
from torch._C import Value as JitValue
from torch._decomp import global_decomposition_table

# The mode that some fake tensors were made in.
from torch._guards import detect_fake_mode

# What the operators of a graph are.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# Tensors of shapes and dtypes alone: in an exported program, or in a file that is opened without its values.
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

# The trees that torch.export flattens arguments with.
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

# A mode that sees operators (that of torch.overrides sees functions), and a block in which none is entered.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# What expressions of symbolic sizes are made of, beside sympy's own functions, and their text in Python.
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

COMPOSITE = DispatchKey.CompositeImplicitAutograd
"""The key of operators that PyTorch writes with others."""


# --- sizes -------------------------------------------------------------------------------------------

SMALLER = (torch_sympy.Min, sympy.Min)
"""The smaller of sizes, in PyTorch's expressions and in sympy's."""

EXTREMA = (*SMALLER, torch_sympy.Max, sympy.Max)
"""The smaller and the larger of sizes, in PyTorch's expressions and in sympy's."""

INFINITY = int_oo
"""The end of a range without end."""

REMAINDERS = (sympy.Mod, torch_sympy.Mod, torch_sympy.PythonMod)
"""Remainders of sizes, in sympy's expressions and in PyTorch's."""


def shape_guards(program: ExportedProgram) -> list[Any]:
    """Return what PyTorch assumed of sizes while it captured a program: `expr`, and `sloc`, the code that asked for it."""
    environment = _shape_environment(program)
    return list(environment.guards) if environment else []


@contextmanager
def guards_noted(program: ExportedProgram) -> Iterator[None]:
    """Let what is done to a captured program note what it assumes of sizes, as the capture did, for the length of the block."""
    environment = _shape_environment(program)
    if environment is None:
        yield
        return
    with mock.patch.object(environment, "frozen", False):
        yield


def over_sizes_of_inputs(program: ExportedProgram, expr: sympy.Basic) -> sympy.Basic:
    """Return an expression with the symbols that PyTorch found to be equal to others in the places of those."""
    environment = _shape_environment(program)
    replaced: sympy.Basic = environment.replace(expr) if environment else expr
    return replaced


def _shape_environment(program: ExportedProgram) -> Any:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, FakeTensor):
            return value.fake_mode.shape_env
    return None


# --- operators ---------------------------------------------------------------------------------------


def schema_of(operator: Any) -> FunctionSchema:
    """Return an operator's schema: its name, and its arguments with their defaults."""
    schema: FunctionSchema = operator._schema
    return schema


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments that it writes to, as its schema says."""
    for position, argument in enumerate(schema_of(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))


def present_operators(*names: str) -> tuple[OpOverload, ...]:
    """Return those of some aten operators that this release has: `cholesky` ended with 2.15."""
    return tuple(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def quantized_decomposed() -> Any:
    """Return the namespace of PyTorch's `quantized_decomposed` operators, which exist once a private module was imported."""
    import torch.ao.quantization.fx._decomposed

    return torch.ops.quantized_decomposed


def scan_operator() -> Any:
    """Return the operator of a loop over time: `torch.scan` is not public, and its front end compiles the step at each call."""
    from torch._higher_order_ops.scan import scan_op

    return scan_op


@contextmanager
def sparse_values_unread() -> Iterator[None]:
    """Let `torch.load` make sparse tensors without a look at their values, which fake ones do not have.

    It notes each one, and looks at all that are noted at its end; where it fails before that, the next call looks at them.
    """
    utilities: Any = torch._utils  # each release has one of two names, which types do not tell
    if hasattr(utilities, "_get_sparse_tensors_to_validate"):  # 2.15
        pending = utilities._get_sparse_tensors_to_validate()
    else:
        pending = utilities._sparse_tensors_to_validate
    with mock.patch.object(utilities, "_validate_loaded_sparse_tensors", lambda *_, **__: None):
        try:
            yield
        finally:
            pending.clear()


@contextmanager
def kernels_replaced(kernels: dict[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Let operators be computed by functions of ours for the length of the block, in place of what they are made of.

    Entered where PyTorch registers its unrolled versions (torch/_decomp/decompositions.py): in two tables of each overload, and in
    the one that fake tensors with symbolic sizes ask before the kernels.
    """
    keys = (COMPOSITE, DispatchKey.Autograd)
    saved = {(op, key): op.py_kernels.get(key) for op in kernels for key in keys}
    try:
        for op, function in kernels.items():
            op.py_kernels.update(dict.fromkeys(keys, function))
            op._dispatch_cache.clear()
        with mock.patch.dict(global_decomposition_table["post_autograd"], kernels):
            yield
    finally:
        for (op, key), original in saved.items():
            if original is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = original
            op._dispatch_cache.clear()


def forget_operators(library: torch.library.Library) -> None:
    """Take the operators of a library back now, not when nobody refers to it any more."""
    library._destroy()


# --- tensors -----------------------------------------------------------------------------------------


def wrapper_tensor(kind: type[torch.Tensor], shape: Any, **options: Any) -> Any:
    """Make a tensor of a subclass that has a shape and a dtype, and no values of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, **options)  # type: ignore[attr-defined]


def writes_to(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; one made in inference mode does not count, and raises."""
    return int(tensor._version)


def checkpoint_offset(storage: torch.UntypedStorage) -> int | None:
    """Return where the bytes of a storage begin in the file that it was loaded from as a fake tensor."""
    offset: int | None = getattr(storage, "_checkpoint_offset", None)
    return offset


# --- modules -----------------------------------------------------------------------------------------

# What an nn.Module keeps its state in.
MODULE_STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own table of parameters: setting one there leaves hooks and `register_parameter`'s checks out."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own table of buffers, each under its own name, also those that share a tensor."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own table of children: a child set there need not be of the class that `__setattr__` checks."""
    return module._modules


def forward_hooks_of(module: nn.Module) -> dict[str, Any]:
    """Return the tables of hooks that run around a module's forward, by attribute; empty when there is no such hook."""
    tables = ("_forward_pre_hooks", "_forward_hooks")
    if not any(getattr(module, name, None) for name in tables):
        return {}
    flags = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    return {name: getattr(module, name) for name in (*tables, *flags)}


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` made another one of; None for any that it did not make."""
    from torch._dynamo.eval_frame import OptimizedModule

    if not isinstance(module, OptimizedModule):
        return None
    inner: nn.Module = module._orig_mod
    return inner


# --- TorchScript -------------------------------------------------------------------------------------

TracerWarning: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
"""What torch.jit.trace warns with; in torch.jit, but not among what that exports."""


def remove_dead_code(graph: JitGraph) -> None:
    """Remove the nodes of a graph whose results nobody reads."""
    torch._C._jit_pass_dce(graph)


def inline_calls(graph: JitGraph) -> None:
    """Put the graphs of submodules and functions in the place of their calls."""
    torch._C._jit_pass_inline(graph)


def script_function(name: str) -> Any:
    """Return the compiled function of a qualified name, such as `__torch__.scaled`; None where there is none."""
    return torch.jit._state._python_cu.find_function(name)


def wrapped_script(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a script in a new wrapper, which knows the submodules that `torch.jit.freeze` has left."""
    wrapped: torch.jit.ScriptModule = torch.jit._recursive.wrap_cpp_module(module._c)
    return wrapped


def become(module: torch.jit.ScriptModule, other: torch.jit.ScriptModule) -> None:
    """Make a script what another is. Traced modules, and subclasses of ScriptModule, keep what they are in a module inside."""
    inside = module.__dict__.get("_actual_script_module", module)
    inside._reconstruct(other._c)


# --- capture -----------------------------------------------------------------------------------------

CAPTURE_LOGGERS = ("torch.export", "torch._dynamo", "torch.fx")
"""Where PyTorch reports what it does while it captures."""


def without_printed_graphs() -> AbstractContextManager[Any]:
    """Let torch.export not print the graph of a capture that failed, for the length of the block; older releases do not."""
    return mock.patch("torch.export._trace.print", lambda *args, **options: None, create=True)


# math.sqrt(size) asks a symbolic size for its value; these do not. torch.export accepts no others of their kind in a graph.
SYMBOLIC_MATH: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, f"_sym_{name}") for name in ("sqrt", "sin", "cos", "tanh")
}


_OF_LARGER_SIZES = {
    sympy.Eq: False, sympy.Ne: True, sympy.Ge: True, sympy.Gt: True, sympy.Le: False, sympy.Lt: False,
}  # fmt: skip
"""What comparisons of a size with 0, 1 or 2 are where it is larger."""


_COMPARED_IN_KERNELS = "c10/core/SymInt.h"
"""The operators of sizes in C++; what kernels require of sizes is asked elsewhere."""


COMPARING_STRIDES = frozenset({"_compute_stride", "_hinted_eq", "_is_contiguous_with_hinted_checks", "is_contiguous"})
"""Functions of PyTorch's shape code in Python that ask for layouts alone; 2.15 has the second and the third."""


@contextmanager
def captured_for_any_size(
    of_kernels: Callable[[], bool], of_layouts: Callable[[bool], bool], asking_for_models: Iterable[str] = ()
) -> Iterator[None]:
    """Let captures reason about sizes that may be 0, 1 or many, and leave what they assume to us, for the length of the block.

    PyTorch's kernels ask whether a size is 0 or 1 in order to lay out memory (`reshape` of a batch of 1), and get the answer of
    any larger size. Whether two strides are equal decides the layout of memory alone: `reshape` gives the same values whether it
    copies or not. What torch.export solves and refuses at the end of a capture is in `sizes/guards.py`.

    Args:
        of_kernels: returns True when the question comes from PyTorch's own Python code.
        of_layouts: returns True when it comes from what compares strides alone; given whether a kernel in C++ asks.
        asking_for_models: files of ours that ask what the code that called them would ask.
    """
    guard_bool = SymNode.guard_bool

    def answered(node: SymNode, file: str, line: int) -> bool:
        known = _of_larger_sizes(node) if isinstance(node.expr, sympy.Basic) else None
        if known is not None and (file or of_kernels()):  # C++ says where it asks
            return known
        if _is_equality_of_sizes(node):
            in_kernel, differ = file.endswith(_COMPARED_IN_KERNELS), node.hint is isinstance(node.expr, sympy.Ne)
            if (in_kernel and differ) or of_layouts(in_kernel):
                return bool(node.hint)
        return guard_bool(node, file, line)

    def left_open(fake_mode: FakeTensorMode, **_: Any) -> None:
        if fake_mode.shape_env is not None:
            fake_mode.shape_env.frozen = True

    # PyTorch says of each guard which line asked for it, and those here are none.
    passed_over = frozenset({*symbolic_shapes.uninteresting_files(), __file__, *asking_for_models})
    with (
        mock.patch.object(symbolic_shapes, "uninteresting_files", lambda: passed_over),
        fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        mock.patch.object(SymNode, "guard_bool", answered),
        mock.patch("torch.export._trace.produce_guards_and_solve_constraints", left_open),
    ):
        yield


def _is_equality_of_sizes(node: SymNode) -> bool:
    return isinstance(node.expr, (sympy.Eq, sympy.Ne)) and _is_of_inputs(node)


def _of_larger_sizes(node: SymNode) -> bool | None:
    """Return what a comparison of a size with 0, 1 or 2 is where it is larger, and None of anything else."""
    expr = node.expr
    if isinstance(expr, sympy.Or):
        found = [_compared_with_few(part, node) for part in expr.args]
        return True if True in found else None if None in found else False
    return _compared_with_few(expr, node)


def _compared_with_few(expr: Any, node: SymNode) -> bool | None:
    kind = next((kind for kind in _OF_LARGER_SIZES if isinstance(expr, kind)), None)
    if kind is None or expr.has(*REMAINDERS) or not _is_of_inputs(node):
        return None
    if expr.lhs.is_number:
        return _compared_with_few(expr.reversed, node)
    factor = _common_factor(expr.lhs)
    if not expr.rhs.is_number or factor <= 0 or expr.rhs / factor not in (0, 1, 2):
        return None
    environment: Any = node.shape_env
    known = environment._maybe_evaluate_static(expr)
    is_ordering = kind not in (sympy.Eq, sympy.Ne)
    if not is_ordering and expr.rhs / factor == 2 and node.hint is not _OF_LARGER_SIZES[kind]:
        return None  # two sizes that have to be equal, one of which is 2: no question about memory
    if known is None and is_ordering and environment._maybe_evaluate_static(sympy.Ge(expr.lhs, 0)) != sympy.true:
        return None
    return _OF_LARGER_SIZES[kind] if known is None else bool(known)


@lru_cache(maxsize=1024)  # the sizes of a layer are those of the one before
def _common_factor(expr: sympy.Expr) -> Any:
    factor, _ = sympy.factor_terms(expr).as_coeff_Mul()
    return factor


def _is_of_inputs(node: SymNode) -> bool:
    """Say whether a number is made of sizes of inputs, and of no tensor's values."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(node.expr.free_symbols) and not free_unbacked_symbols(node.expr)


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that another one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_over_values(error: BaseException) -> bool:
    """Say whether a capture failed because a decision, or a size, depends on the values of a tensor."""
    return isinstance(error, GuardOnDataDependentSymNode)


def depends_on_data(size: torch.SymInt | torch.SymFloat) -> bool:
    """Say whether a symbolic number is read from a tensor rather than made of sizes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def list_device_constructors() -> None:
    """Let PyTorch list what `with torch.device(...)` acts on, which it does once, at its first use."""
    _device_constructors()


def without_causal_hint(function: Callable[..., bool]) -> AbstractContextManager[Any]:
    """Put a function in the place of the one that compares a transformer layer's mask with a causal one."""
    return mock.patch("torch.nn.modules.transformer._detect_is_causal_mask", function)


def without_strides_of_transforms() -> AbstractContextManager[Any]:
    """Let the shapes of Fourier transforms be computed without ordering axes by their strides, which fixes dynamic sizes."""
    return mock.patch("torch._meta_registrations._exec_fft", lambda out, *_, **__: out)


@contextmanager
def slice_ends_decided(note: Callable[[Any], None], within: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Let `x[:, T // 2 - 4 :]` ask whether it counts from the end, and tell `note` the answer, for the length of the block.

    PyTorch does not ask where it reasons about any size, and makes the length a number that is known at run time only.

    Args:
        note: given a condition on sizes that the graph holds under.
        within: given a size and a place that may be beyond it, says whether to take it for a place within.
    """
    known = fake_impls._compute_slice_index

    def place(size: Any, index: Any) -> Any:
        found = known(size, index)
        if isinstance(found, torch.SymInt) and isinstance(found.node.expr, EXTREMA) and within(size, index):
            return index
        if found is not None:
            return found
        from_start = index >= 0
        if from_start:
            note(from_start.node.expr)
            return torch.sym_min(index, size)
        note(sympy.Not(from_start.node.expr))
        return torch.sym_max(index + size, 0)

    with mock.patch.object(fake_impls, "_compute_slice_index", place):
        yield


def pool_windows_counted(count: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Let `count` say how many windows a pool has along an axis, for the length of the block.

    It is given size, kernel, padding before and after, stride, dilation and whether a last window may be incomplete.
    """
    return mock.patch("torch._meta_registrations.pooling_output_shape_pad_lr", count)


def is_mapped_over(node: Node) -> bool:
    """Say whether a node begins or ends a part of a graph that `torch.vmap` maps over an axis, and that is not traced yet."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


@contextmanager
def comparisons_answered(answer: Callable[[Any, Mapping[Any, int]], bool | None]) -> Iterator[None]:
    """Ask `answer` what PyTorch cannot say of a comparison of sizes without an example, for the length of the block.

    `answer` is given the comparison and the smallest value of each symbol that has one; None leaves the matter to PyTorch.
    """
    evaluate = ShapeEnv._maybe_evaluate_static

    @wraps(evaluate)  # with the functions that clear its cache
    def answered(env: ShapeEnv, expr: Any, **options: Any) -> Any:
        known = evaluate(env, expr, **options)
        if known is not None or options.get("compute_hint") or options.get("unbacked_only"):
            return known
        asked = env.simplify(expr)
        said = answer(asked, _least_of(env, asked))
        return None if said is None else sympy.true if said else sympy.false

    with mock.patch.object(ShapeEnv, "_maybe_evaluate_static", answered):
        yield


@contextmanager
def extrema_simplified(simplify: Callable[[Any, Mapping[Any, int]], Any]) -> Iterator[None]:
    """Let `simplify` rewrite each smaller or larger of two sizes as a model computes it, for the length of the block.

    It is given the expression and the smallest value of each symbol that has one. Without it, sizes grow with each layer that pads.
    """

    def simplified(compute: Callable[..., SymNode]) -> Callable[..., SymNode]:
        @wraps(compute)
        def extremum(node: SymNode, other: SymNode) -> SymNode:
            result = compute(node, other)
            if isinstance(result.expr, EXTREMA):
                result._expr = simplify(result.expr, _least_of(result.shape_env, result.expr))
            return result

        return extremum

    with ExitStack() as stack:
        for name in ("_sym_min", "_sym_max"):
            stack.enter_context(mock.patch.object(SymNode, name, simplified(getattr(SymNode, name))))
        yield


def _least_of(environment: Any, expr: sympy.Basic) -> dict[sympy.Symbol, int]:
    """Return the smallest value of each symbol of an expression that has one."""
    ranges = {symbol: environment.var_to_range.get(symbol) for symbol in expr.free_symbols}
    return {symbol: int(found.lower) for symbol, found in ranges.items() if found and found.lower.is_Integer}


@contextmanager
def fixed_sizes_seen(note: Callable[[Any], None]) -> Iterator[None]:
    """Tell `note` what a capture fixes a symbol to, before it does, for the length of the block."""
    replace = ShapeEnv._set_replacement

    def recorded(env: ShapeEnv, symbol: Any, target: Any, message: str) -> None:
        note(target)
        replace(env, symbol, target, message)

    with mock.patch.object(ShapeEnv, "_set_replacement", recorded):
        yield


@contextmanager
def cut_sizes_seen(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at each assumption that a size equals one that was cut (`T == min(512, T)`), for the length of the block."""
    refine = ShapeEnv._refine_ranges

    def refined(env: ShapeEnv, expr: Any) -> None:
        if isinstance(expr, sympy.Eq) and expr.has(*EXTREMA):
            note()
        refine(env, expr)

    with mock.patch.object(ShapeEnv, "_refine_ranges", refined):
        yield


# What PyTorch computes with the shapes of each tensor that it makes. Remainders are not among them: what it makes of one depends
# on the ranges that it knows by then.
_ARITHMETIC = (
    *("_add", "_sub", "_mul", "_int_floordiv", "_sym_min", "_sym_max"),
    *("_eq", "_ne", "_gt", "_ge", "_lt", "_le", "_and", "_or", "_sym_and", "_sym_or"),
)


@contextmanager
def size_arithmetic_remembered() -> Iterator[None]:
    """Compute each sum, product and comparison of symbolic sizes once, for the length of the block.

    A layer's tensors have the sizes of the layer before, and PyTorch asks of each whether it is contiguous, in every layout.
    """
    with ExitStack() as stack:
        for name in _ARITHMETIC:
            if compute := getattr(SymNode, name, None):
                stack.enter_context(mock.patch.object(SymNode, name, _remembered(compute)))
        yield


def _remembered(compute: Callable[..., SymNode]) -> Callable[..., SymNode]:
    known: dict[tuple[Any, ...], SymNode] = {}

    @wraps(compute)
    def remembered(node: SymNode, other: SymNode) -> SymNode:
        if get_proxy_mode() is not None:  # part of what is captured
            return compute(node, other)
        key = (node.shape_env, *_operand(node), *_operand(other))
        result = known.get(key)
        if result is None:
            result = known[key] = compute(node, other)
        fresh = SymNode.__new__(SymNode)  # PyTorch tells nodes apart by their identity
        fresh.__dict__.update(result.__dict__)
        return fresh

    return remembered


def _operand(node: SymNode) -> tuple[Any, ...]:
    return node._expr, node.pytype, node._hint, node.constant, node.fx_node


def stacks_taken_from(frames: Callable[[], StackSummary]) -> AbstractContextManager[Any]:
    """Let captured operators note the calls that `frames` returns, not all of PyTorch's own too, for the length of the block."""

    class Stack:
        extract = staticmethod(lambda: Stack())

        def summary(self) -> StackSummary:
            return frames()

    return mock.patch("torch.fx.proxy.CapturedTraceback", Stack)


__all__ = [
    "CAPTURE_LOGGERS",
    "COMPARING_STRIDES",
    "COMPOSITE",
    "EXTREMA",
    "MODULE_STATE",
    "REMAINDERS",
    "SMALLER",
    "SYMBOLIC_MATH",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionSchema",
    "HigherOrderOperator",
    "JitBlock",
    "JitGraph",
    "JitNode",
    "JitValue",
    "OpOverload",
    "OpOverloadPacket",
    "PythonPrinter",
    "TorchDispatchMode",
    "TracerWarning",
    "become",
    "buffers_of",
    "captured_for_any_size",
    "checkpoint_offset",
    "children_of",
    "comparisons_answered",
    "compiled_module",
    "cut_sizes_seen",
    "depends_on_data",
    "detect_fake_mode",
    "extrema_simplified",
    "fixed_sizes_seen",
    "forget_operators",
    "forward_hooks_of",
    "inline_calls",
    "is_mapped_over",
    "is_over_values",
    "kernels_replaced",
    "list_device_constructors",
    "parameters_of",
    "parse_schema",
    "pool_windows_counted",
    "pytree",
    "quantized_decomposed",
    "remove_dead_code",
    "scan_operator",
    "schema_of",
    "script_function",
    "shape_guards",
    "size_arithmetic_remembered",
    "slice_ends_decided",
    "stacks_taken_from",
    "torch_sympy",
    "viewed",
    "without_causal_hint",
    "without_modes",
    "without_printed_graphs",
    "without_strides_of_transforms",
    "wrapped_script",
    "wrapper_tensor",
    "writes_to",
    "written_arguments",
]
