"""A TorchScript graph run node by node in Python: on real tensors, or on fake ones while torch.export looks on.

In: a graph, who answers for its module, and arguments. Out: results. A condition on data selects between both branches while
a graph is captured; one on sizes becomes torch.export's guard.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure

from generic_export.compat import JitBlock, JitGraph, JitNode, JitValue, pytree, script_function
from generic_export.errors import CaptureError, SpecializedAxisError
from generic_export.torchscript.scalars import NOT_HERE, NUMBERS, OF_TENSOR, as_declared, evaluate
from generic_export.torchscript.schema import as_dtype, overload_named, parsed_schema, place_of, spelled_call


@dataclass(frozen=True)
class ModuleRef:
    """A module as a value of the graph, by its dotted path ("" for the root)."""

    path: str


class Home(Protocol):
    """What a graph asks of the module that it belongs to."""

    def attribute(self, path: str, name: str) -> Any:
        """Return an attribute of the module at a path: a ModuleRef, tensor, number, list, ..."""

    def constant(self, value: JitValue) -> tuple[Any, Any]:
        """Return a constant of the graph, and the number that it is when it is a tensor of no axes (else None)."""

    def placed(self, node: JitNode, call: Callable[[], Any]) -> Any:
        """Call a function as if the module that a node belongs to did."""

    def method(self, path: str, name: str) -> Callable[..., Any]:
        """Return a method of the module at a path, for graphs whose calls are not inlined."""


class _Unset:
    """The value of a variable that no path through the graph reads."""


@dataclass
class Interpreter:
    """One run of a graph.

    Attributes:
        home: the module.
        watched: numbers of values (`Value.unique()`) to note, with the list that takes what they were.
    """

    home: Home
    watched: Mapping[int, list[Any]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    written: dict[tuple[str, str], Any] = field(default_factory=dict)
    # Tensors of the graph that are constant numbers, such as the 2 that a trace has for `2 * x`.
    numbers: dict[int, Any] = field(default_factory=dict)

    def run(self, graph: JitGraph, arguments: Sequence[Any]) -> Any:
        """Run a graph.

        Raises:
            CaptureError: a node has no meaning here, or the model raised; the message has its line.
        """
        for value, argument in zip(graph.inputs(), (ModuleRef(""), *arguments), strict=True):
            self.values[value.unique()] = argument
        self._run_nodes(graph.nodes())
        results = [self._value(value) for value in graph.outputs()]
        return results[0] if len(results) == 1 else tuple(results)

    def _run_nodes(self, nodes: Iterator[JitNode]) -> None:
        for node in nodes:
            try:
                results = self._results(node)
            except Exception as error:
                _tell_place(error, node)
                raise
            for value, result in zip(node.outputs(), results, strict=True):
                self.values[value.unique()] = result
                if value.unique() in self.watched:
                    self.watched[value.unique()].append(result)

    def _value(self, value: JitValue) -> Any:
        return self.values[value.unique()]

    def _results(self, node: JitNode) -> Sequence[Any]:
        """Run one node; returns a value per output."""
        kind = node.kind()
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(self, node)
        arguments = [self._value(value) for value in node.inputs()]
        result = self._plain(node, kind, arguments)
        return _per_output(result, node.outputsSize())

    def _plain(self, node: JitNode, kind: str, arguments: list[Any]) -> Any:
        name = kind.partition("::")[2]
        if arguments and isinstance(arguments[0], torch.Tensor):
            if name in OF_TENSOR:
                return OF_TENSOR[name](*arguments)
            if name in _ON_TENSOR:
                return _ON_TENSOR[name](self, node, *arguments)
        plain = [self.numbers.get(id(value), value) for value in arguments]
        if not any(isinstance(value, torch.Tensor) for value in plain) or _is_list_call(name, arguments):
            chosen = arguments if _is_list_call(name, arguments) else plain
            result = evaluate(name, chosen)
            if result is not NOT_HERE:
                return as_declared(node.output().type().kind(), result) if node.outputsSize() == 1 else result
        return self.operator(node, kind, arguments)

    def operator(self, node: JitNode, kind: str, arguments: list[Any]) -> Any:
        """Call an ATen operator on tensors, as Python code would."""
        schema = parsed_schema(node.schema()) if kind != _PYTHON else None  # to call that would end the process
        overload = overload_named(kind, schema.overload_name) if schema is not None else None
        if overload is None:
            raise CaptureError(
                f"TorchScript operator {kind}{_at(node)} has no meaning outside of TorchScript.",
                "Remove it from the scripted module, or trace the module instead.",
            )
        call = spelled_call(overload, [self._as_operand(value, arguments) for value in arguments])
        function: Callable[..., Any] = overload
        if call.numbers:
            function = getattr(torch, overload.overloadpacket.__name__, overload.overloadpacket)
        elif call.tensors:
            function = overload.overloadpacket
        return self.home.placed(node, lambda: function(*call.args, **call.kwargs))

    def _as_operand(self, value: Any, arguments: Sequence[Any]) -> Any:
        """Return a constant number as such beside a tensor: PyTorch captures `2 * x` so."""
        number = self.numbers.get(id(value))
        others = [other for other in arguments if isinstance(other, torch.Tensor) and other is not value]
        return number if number is not None and any(other.ndim for other in others) else value


def _per_output(result: Any, count: int) -> Sequence[Any]:
    if count == 0:
        return ()
    return (result,) if count == 1 else tuple(result)


def _at(node: JitNode) -> str:
    place = place_of(node)
    where = " in " + place.path if place.path else ""
    return f"{where} at {place.source}" if place.source else where


def _tell_place(error: Exception, node: JitNode) -> None:
    """Note where in the model an error comes from, once, for whoever reports it."""
    if not getattr(error, "t2n_source", None):
        error.t2n_source = place_of(node).source  # type: ignore[attr-defined]


def _is_list_call(name: str, arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], (list, tuple, dict, str)) and name in _LIST_CALLS


_PYTHON = "prim::PythonOp"  # a torch.autograd.Function, as a trace holds it

_LIST_CALLS = frozenset(
    {"append", "extend", "insert", "pop", "len", "copy", "list", "clear", "reverse", "_set_item", "__getitem__"}
    | {"slice", "keys", "values", "items", "get", "add", "add_", "mul", "select"}
)


# --- prim nodes --------------------------------------------------------------------------------


def _constant(run: Interpreter, node: JitNode) -> Sequence[Any]:
    value, number = run.home.constant(node.output())
    if number is not None:
        run.numbers[id(value)] = number
    return (value,)


def _get_attribute(run: Interpreter, node: JitNode) -> Sequence[Any]:
    owner, name = run._value(node.input()), node.s("name")
    if isinstance(owner, dict):
        return (owner[name],)
    written = run.written.get((owner.path, name), NOT_HERE)
    return (run.home.attribute(owner.path, name) if written is NOT_HERE else written,)


def _set_attribute(run: Interpreter, node: JitNode) -> Sequence[Any]:
    owner, value = (run._value(value) for value in node.inputs())
    if isinstance(owner, dict):
        owner[node.s("name")] = value
    else:
        run.written[owner.path, node.s("name")] = value
    return ()


def _call_method(run: Interpreter, node: JitNode) -> Sequence[Any]:
    owner, *arguments = (run._value(value) for value in node.inputs())
    result = run.home.method(owner.path, node.s("name"))(*arguments)
    return _per_output(result, node.outputsSize())


def _call_function(run: Interpreter, node: JitNode) -> Sequence[Any]:
    callee, *arguments = node.inputs()
    kind: Any = callee.type()
    function = script_function(kind.str())
    if function is None:
        raise CaptureError(f"function {kind.str()}{_at(node)} cannot be called from outside of its graph.")
    return _per_output(function(*(run._value(value) for value in arguments)), node.outputsSize())


def _branch(run: Interpreter, node: JitNode) -> Sequence[Any]:
    condition = run._value(node.input())
    if_true, if_false = node.blocks()
    if isinstance(condition, torch.Tensor):
        return _select(run, node, condition)
    if isinstance(condition, torch.SymBool) and not (is_sure(condition) or is_sure(torch.sym_not(condition))):
        taken = "true" if condition else "false"
        warnings.warn(
            f"the `if`{_at(node)} is on a dynamic size: its {taken} branch is kept, as for the example's size; the archive "
            "asserts for which sizes that holds.",
            stacklevel=2,
        )
    return run_block(run, if_true if condition else if_false)


def run_block(run: Interpreter, block: JitBlock) -> list[Any]:
    """Run a block; returns its results."""
    run._run_nodes(block.nodes())
    return [run._value(value) for value in block.outputs()]


def _select(run: Interpreter, node: JitNode, condition: torch.Tensor) -> Sequence[Any]:
    """Compute both branches and select: the condition is on data."""
    blocks = list(node.blocks())
    for index, block in enumerate(blocks):
        if any(inner.kind() == "prim::RaiseException" for inner in block.nodes()):
            return run_block(run, blocks[1 - index])  # a check of the data: no engine raises
        _refuse_effects(block)
    taken, other = (run_block(run, block) for block in blocks)
    return [
        run.home.placed(node, lambda left=left, right=right: _selected(node, condition, left, right))  # type: ignore[misc]
        for left, right in zip(taken, other, strict=True)
    ]


def _selected(node: JitNode, condition: torch.Tensor, left: Any, right: Any) -> Any:
    if left is right or isinstance(right, _Unset):
        return left
    if isinstance(left, _Unset):
        return right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return type(left)(_selected(node, condition, *pair) for pair in zip(left, right, strict=True))
    operands = (torch.Tensor, int, float)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.ndim == right.ndim and left.dtype is right.dtype and tuple(left.shape) == tuple(right.shape):
            return torch.where(condition, left, right)
    elif isinstance(left, operands) and isinstance(right, operands):
        if not isinstance(left, torch.Tensor) and not isinstance(right, torch.Tensor) and left == right:
            return left
        return torch.where(condition, left, right)
    raise CaptureError(
        f"the branches of the `if` on data{_at(node)} return values of different kinds or shapes ({_said(left)}, {_said(right)}).",
        "Give both branches results of one shape and type, or keep one branch with harden_jit_for_export.",
    )


def _said(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


_EFFECTS = frozenset({"aten::append", "aten::extend", "aten::insert", "aten::pop", "aten::clear", "aten::_set_item"})


def _refuse_effects(block: JitBlock) -> None:
    """Refuse a branch that changes what exists outside of it: both branches are computed."""
    inside = {value.unique() for inner in block.nodes() for value in inner.outputs()}
    for inner in block.nodes():
        schema = parsed_schema(inner.schema())
        changes = inner.kind() in _EFFECTS or bool(schema and schema.is_mutable)
        if inner.kind() == "prim::SetAttr" or (changes and next(inner.inputs()).unique() not in inside):
            raise CaptureError(
                f"{inner.kind()}{_at(inner)} changes a value from outside of its `if` on data.",
                "Compute a new value in both branches instead, or keep one branch with harden_jit_for_export.",
            )
        for nested in inner.blocks():
            _refuse_effects(nested)


def _loop(run: Interpreter, node: JitNode) -> Sequence[Any]:
    trips, condition, *carried = (run._value(value) for value in node.inputs())
    body = next(iter(node.blocks()))
    index_value, *carried_values = body.inputs()
    if isinstance(trips, torch.SymInt):
        raise SpecializedAxisError(
            f"the loop{_at(node)} runs as often as a dynamic axis is long.",
            "Make the axis static, write the loop as operations on whole tensors, or use torch's scan.",
        )
    trips = run.numbers.get(id(trips), trips)
    index = 0
    while index < trips:
        if isinstance(condition, torch.Tensor):
            raise CaptureError(
                f"the loop{_at(node)} runs until a condition on data holds.",
                "An engine needs to know how often: loop a fixed number of times, or keep the loop outside of the model.",
            )
        if not condition:
            break
        run.values[index_value.unique()] = index
        for value, given in zip(carried_values, carried, strict=True):
            run.values[value.unique()] = given
        condition, *carried = run_block(run, body)
        index += 1
    return carried


def _number_as_tensor(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return (run._value(node.input()),)  # stays a number: sizes remain symbolic


def _raise(run: Interpreter, node: JitNode) -> Sequence[Any]:
    message = run._value(next(node.inputs()))
    raise CaptureError(f"the model raises{_at(node)}: {message}")


def _list(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return ([run._value(value) for value in node.inputs()],)


def _dict(run: Interpreter, node: JitNode) -> Sequence[Any]:
    values = [run._value(value) for value in node.inputs()]
    return (dict(zip(values[::2], values[1::2], strict=True)),)


def _tuple(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return (tuple(run._value(value) for value in node.inputs()),)


def _unpacked(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return list(run._value(node.input()))


def _tuple_item(run: Interpreter, node: JitNode) -> Sequence[Any]:
    container, index = (run._value(value) for value in node.inputs())
    return (container[index],)


def _tuple_piece(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return (run._value(node.input())[node.i("beg") : node.i("end")],)


def _first(run: Interpreter, node: JitNode) -> Sequence[Any]:
    return (run._value(next(node.inputs())),)


def _nothing(_run: Interpreter, node: JitNode) -> Sequence[Any]:
    return (None,) * node.outputsSize()


def _unset(_run: Interpreter, _node: JitNode) -> Sequence[Any]:
    return (_Unset(),)


def _object(_run: Interpreter, _node: JitNode) -> Sequence[Any]:
    return ({},)


def _tensor_of(run: Interpreter, node: JitNode) -> Sequence[Any]:
    data, *rest = (run._value(value) for value in node.inputs())
    dtype = as_dtype(rest[0]) if rest and rest[0] is not None else None

    def made() -> torch.Tensor:
        leaves = pytree.tree_leaves(data)
        if not any(isinstance(leaf, torch.Tensor) or not isinstance(leaf, (int, float, complex)) for leaf in leaves):
            return torch.tensor(data, dtype=dtype)
        if isinstance(data, (*NUMBERS, torch.Tensor)):
            return torch.as_tensor(data, dtype=dtype)
        scalars = [
            torch.as_tensor(leaf) if isinstance(leaf, torch.Tensor) else torch.scalar_tensor(leaf, dtype=torch.int64)
            for leaf in leaves
        ]
        stacked = torch.stack([scalar.reshape(()) for scalar in scalars])
        return stacked if dtype is None else stacked.to(dtype)

    return (run.home.placed(node, made),)


_SPECIAL: dict[str, Callable[[Interpreter, JitNode], Sequence[Any]]] = {
    "prim::Constant": _constant,
    "prim::GetAttr": _get_attribute,
    "prim::SetAttr": _set_attribute,
    "prim::CallMethod": _call_method,
    "prim::CallFunction": _call_function,
    "prim::If": _branch,
    "prim::Loop": _loop,
    "prim::ListConstruct": _list,
    "prim::DictConstruct": _dict,
    "prim::TupleConstruct": _tuple,
    "prim::ListUnpack": _unpacked,
    "prim::TupleUnpack": _unpacked,
    "prim::TupleIndex": _tuple_item,
    "prim::TupleSlice": _tuple_piece,
    "prim::NumToTensor": _number_as_tensor,
    "prim::unchecked_cast": _first,
    "prim::unchecked_unwrap_optional": _first,
    "aten::_unwrap_optional": _first,
    "aten::detach": _first,
    "prim::RaiseException": _raise,
    "prim::Uninitialized": _unset,
    "prim::CreateObject": _object,
    "prim::Enter": _nothing,
    "prim::Exit": _nothing,
    "prim::Print": _nothing,
    "aten::tensor": _tensor_of,
    "aten::as_tensor": _tensor_of,
}

# --- what a tensor is asked through the run -------------------------------------------------------


def _number(run: Interpreter, _node: JitNode, tensor: torch.Tensor, kind: type | None = None) -> Any:
    """Return the number in a tensor; while a graph is captured it stays a tensor of no axes."""
    known = run.numbers.get(id(tensor))
    if known is None and not torch.compiler.is_exporting():
        known = tensor.item()
    if known is not None:
        return known if kind is None else kind(known)
    scalar = tensor.reshape(())
    if kind is bool:
        return scalar if scalar.dtype is torch.bool else scalar.ne(0)
    if kind is int:
        return scalar.to(torch.int64)
    return scalar if kind is None or scalar.is_floating_point() else scalar.to(torch.float32)


def _cast(run: Interpreter, node: JitNode, tensor: torch.Tensor, *rest: Any) -> Any:
    """`aten::to` in the forms that TorchScript alone has, and the others."""
    schema = parsed_schema(node.schema())
    if schema is None or not schema.overload_name.startswith("prim_"):
        return run.operator(node, "aten::to", [tensor, *rest])
    if schema.overload_name == "prim_other":
        target = rest[0].dtype
    else:
        dtypes = [value for value in rest[:2] if isinstance(value, int) and not isinstance(value, bool)]
        target = as_dtype(dtypes[0]) if dtypes else None
    return tensor if target is None else run.home.placed(node, lambda: tensor.to(target))


def _convolution(run: Interpreter, node: JitNode, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The form that a trace has of every convolution, as the function that the user called."""
    weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_ = rest
    axes = len(stride)
    options: tuple[Any, ...]
    if transposed:
        function = getattr(torch, f"conv_transpose{axes}d")
        options = (bias, stride, padding, output_padding, groups, dilation)
    else:
        function = getattr(torch, f"conv{axes}d")
        options = (bias, stride, padding, dilation, groups)
    result: torch.Tensor = run.home.placed(node, lambda: function(tensor, weight, *options))
    return result


_ON_TENSOR: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("item", "ScalarImplicit"), _number),
    **dict.fromkeys(("Int", "IntImplicit"), partial(_number, kind=int)),
    **dict.fromkeys(("Float", "FloatImplicit"), partial(_number, kind=float)),
    "Bool": partial(_number, kind=bool),
    "to": _cast,
    "_convolution": _convolution,
}


__all__ = ["Home", "Interpreter", "ModuleRef"]
