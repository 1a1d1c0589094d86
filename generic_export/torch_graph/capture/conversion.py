"""An `ExportedProgram` to the IR: placeholders, operators, inner graphs, symbols under the user's names."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import GraphModule, Node

from generic_export.compat import HigherOrderOperator, OpOverload, pytree, schema_of
from generic_export.errors import CaptureError, NotCapturableError, OptionError
from generic_export.torch_graph.capture.causes import WITHOUT_VALUES, frozen_axis
from generic_export.torch_graph.decompose.decomposition import SCALAR_TYPES, is_annotation
from generic_export.torch_graph.dims import Dim, dim_symbol, floor_div, plain_size, simplify_dim, whole_size
from generic_export.torch_graph.ir import (
    Argument,
    FixedTensorList,
    SizeCondition,
    SymbolRange,
    TensorKind,
    TensorVariable,
    TorchModuleIRGraph,
    TorchOp,
)
from generic_export.torch_graph.loops import SCAN
from generic_export.torch_graph.naming import module_frame
from generic_export.torch_graph.request import CaptureRequest, auto_symbols, declared_sizes, symbol_name
from generic_export.torch_graph.sizes.guards import bounds_of, larger_sizes
from generic_export.torch_graph.sizes.multiples import DivisibleAxes
from generic_export.torch_graph.sizes.proofs import without_needless_extrema
from generic_export.torch_graph.source_lines import node_source

_HIGHER_ORDER_HINTS = {
    "cond": "The branch is taken by a size: export once per branch, or write the branches as one expression.",
    "while_loop": "tract loops over an axis, a known number of times: use torch's scan, or a fixed number of steps.",
}


class _UnknownSizeError(Exception):
    """A size is made of values; never seen outside a conversion."""


def _by_values(node: Node, module: nn.Module) -> NotCapturableError:
    """Return the error of a result whose size depends on values: it names operator, line and what to write."""
    maker = next((each for each in _before(node) if _operator_name(each) in WITHOUT_VALUES), node)
    name, source = _operator_name(maker), node_source(maker) or node_source(node)
    where = f" at {source}" if source else ""
    return NotCapturableError(
        f"{type(module).__name__}{where}: the size of the result of {name} depends on values, which NNEF cannot express.",
        WITHOUT_VALUES.get(name, "Change that line so that sizes do not depend on values."),
    )


def _before(node: Node) -> Iterator[Node]:
    """Yield a node, and what it is made of, nearest first."""
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop(0)
        yield current
        queue += [each for each in current.all_input_nodes if each not in seen]
        seen.update(queue)


def _operator_name(node: Node) -> str:
    return schema_of(node.target).name.split("::")[-1] if isinstance(node.target, OpOverload) else str(node.target)


class Conversion:
    """The state of one conversion from an ExportedProgram to the IR; used once."""

    def __init__(
        self,
        request: CaptureRequest,
        program: ExportedProgram,
        conditions: Sequence[SizeCondition] = (),
    ) -> None:
        """Begin; `conditions` are those on sizes under which the program is right."""
        self.request = request
        self.program = program
        self.symbols = symbol_names(request, program)
        self.known = set().union(*(size.free_symbols for size in self.symbols.values()))
        self.bounds = bounds_of(conditions)
        self.larger = larger_sizes(conditions)
        self.least = {symbol: self._range(symbol)[0] for symbol in self.symbols}
        self.folds = DivisibleAxes.of(request.dynamic_axes)
        # Inputs as PyTorch has them, while they wait to be made whole: by name, as the user has them.
        self.folded: dict[str, TensorVariable] = {}
        self.values: dict[Node, Argument] = {}
        self.ops: list[TorchOp] = []
        self.parameters: dict[str, TensorVariable] = {}
        self.constants: dict[str, torch.Tensor] = {}
        # Inner graphs have node names of their own: their results are told apart by a number.
        self.scope = ""
        self.scopes = itertools.count(1)

    def graph(self) -> TorchModuleIRGraph:
        inputs = self._convert_placeholders()
        output_node = self._convert_nodes(self.program.graph_module)
        outputs = self._outputs(output_node)
        used = {tensor.name for op in self.ops for tensor in op.tensor_inputs()} | {out.name for out in outputs}
        return TorchModuleIRGraph(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            ops=tuple(self.ops),
            parameters=tuple(p for p in self.parameters.values() if p.name in used),
            constants={name: value for name, value in self.constants.items() if name in used},
            symbols=self._symbol_ranges(),
            output_names=self._output_names(outputs),
        )

    def _output_names(self, outputs: Sequence[TensorVariable]) -> tuple[str, ...]:
        if self.request.output_names is None:
            return ("output",) if len(outputs) == 1 else tuple(f"output_{index}" for index in range(len(outputs)))
        if len(self.request.output_names) != len(outputs):
            raise OptionError(
                f"the module has {len(outputs)} output tensors but {len(self.request.output_names)} output names were given."
            )
        return tuple(self.request.output_names)

    def _convert_placeholders(self) -> list[TensorVariable]:
        inputs: list[TensorVariable] = []
        names = iter(self.request.input_names or ())
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        canonical = _canonical_names(self.request.module)
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                value = node.meta.get("val")
                if not isinstance(value, torch.Tensor):
                    self.values[node] = value
                    continue
                variable = self._variable(next(names, node.name), value, TensorKind.INPUT)
                whole = self.folds.whole_shape(variable.name, variable.shape)
                inputs.append(replace(variable, shape=whole))
                self.values[node] = variable
                if whole != variable.shape:
                    self.folded[variable.name] = inputs[-1]
            else:
                self.values[node] = self._state(node, spec, canonical)
        return inputs

    def _unfolded(self, whole: TensorVariable, result: TensorVariable) -> None:
        """Make of an input what the module sees: all of it, by sizes that the engine too knows for multiples."""
        if result.rank > whole.rank:  # another axis is folded still
            self.folded[result.name] = whole
            return
        source = whole
        for axis in self.folds.sizes[whole.name]:
            shape = (*result.shape[: axis + 1], *whole.shape[axis + 1 :])
            part = result if shape == result.shape else replace(result, name=f"%{whole.name}_{axis}.0", shape=shape)
            self.ops.append(TorchOp(torch.ops.aten.slice.Tensor, (source, axis, 0, shape[axis], 1), {}, (part,)))
            source = part

    def _state(self, node: Node, spec: InputSpec, canonical: Mapping[str, str]) -> TensorVariable:
        value = node.meta["val"]
        target = str(spec.target)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = canonical.get(target, target).removeprefix(self.request.strip_prefix)
            return self.parameters.setdefault(name, self._variable(name, value, TensorKind.PARAMETER))
        if spec.kind is InputKind.CONSTANT_TENSOR:
            name = target.removeprefix(self.request.strip_prefix)
            self.constants[name] = self.program.constants[target]
            return self._variable(name, value, TensorKind.CONSTANT)
        raise CaptureError(f"the module takes an input of kind {spec.kind.name} ({target}), which has no NNEF form.")

    def _convert_nodes(self, graph_module: GraphModule) -> Node:
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return node
            if node.op == "call_function":
                try:
                    self._convert_call(node, graph_module)
                except _UnknownSizeError as unknown:
                    raise _by_values(node, self.request.module) from unknown
        raise CaptureError("the captured graph has no output.")

    def _convert_call(self, node: Node, owner: GraphModule) -> None:
        value = node.meta.get("val")
        if isinstance(node.target, HigherOrderOperator):
            self._higher_order(node, owner)
        elif isinstance(value, SCALAR_TYPES):
            self.values[node] = self._scalar(value)
        elif node.target is operator.getitem:
            container, index = node.args
            self.values[node] = self.values[container][index]  # type: ignore[index]
        elif isinstance(node.target, OpOverload):
            if not is_annotation(node.target):
                self._convert_op(node, value)
        else:
            raise CaptureError(f"call of {node.target} at {node_source(node)} is not an op.")

    def _convert_op(self, node: Node, value: object) -> None:
        path, kind = module_frame(node, self.request.strip_prefix)
        values = value if isinstance(value, (tuple, list)) else (value,)
        outputs = tuple(
            self._variable(f"%{self.scope}{node.name}.{index}", item, TensorKind.RESULT)
            if isinstance(item, torch.Tensor)
            else None
            for index, item in enumerate(values)
        )
        op = TorchOp(
            target=node.target,  # type: ignore[arg-type]
            args=tuple(self._argument(arg) for arg in node.args),
            kwargs={name: self._argument(arg) for name, arg in node.kwargs.items()},
            outputs=outputs,
            module_path=path,
            module_type=kind,
            source=node_source(node),
        )
        whole = self.folded.get(next((tensor.name for tensor in op.tensor_inputs()), ""))
        if whole is None:
            self.ops.append(op)
        else:
            self._unfolded(whole, op.output)
        self.values[node] = FixedTensorList(outputs).elements if isinstance(value, (tuple, list)) else outputs[0]

    def _higher_order(self, node: Node, owner: GraphModule) -> None:
        """Convert a call that takes graphs: a region to inline, a branch, a loop over an axis."""
        name = str(node.target)
        position = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(name)
        if position is not None and not (name == "wrap_with_autocast" and node.args[2]):
            # A grad-mode or (disabled) autocast region: neither changes an inference result.
            self.values[node] = self._inlined(node.args[position], node.args[position + 1 :], owner)
        elif name == "cond" and isinstance(self._argument(node.args[0]), TensorVariable):
            self._convert_branch(node, owner)
        elif name == "scan":
            self._convert_scan(node, owner)
        else:
            raise CaptureError(
                f"{name} at {node_source(node)} has no NNEF form.",
                _HIGHER_ORDER_HINTS.get(name, "Remove it from the forward, or export a module without it."),
            )

    def _inlined(self, body_node: object, arguments: Sequence[object], owner: GraphModule) -> tuple[Argument, ...]:
        """Convert the operators of an inner graph in place, and return its results."""
        body = getattr(owner, str(body_node.target))  # type: ignore[attr-defined]
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            self.values[placeholder] = self._argument(argument)
        outer_scope, self.scope = self.scope, f"{self.scope}{next(self.scopes)}:"
        result = self._convert_nodes(body)
        self.scope = outer_scope
        return tuple(self._argument(arg) for arg in pytree.tree_leaves(result.args[0]))

    def _convert_branch(self, node: Node, owner: GraphModule) -> None:
        """Both branches are computed (they have no effects), then one is selected."""
        predicate, if_true, if_false, operands = node.args
        taken, other = (self._inlined(branch, operands, owner) for branch in (if_true, if_false))  # type: ignore[arg-type]
        path, kind = module_frame(node, self.request.strip_prefix)
        results = []
        for index, (value, left, right) in enumerate(zip(node.meta["val"], taken, other, strict=True)):
            output = self._variable(f"%{self.scope}{node.name}.{index}", value, TensorKind.RESULT)
            arguments = (self._argument(predicate), left, right)
            self.ops.append(TorchOp(torch.ops.aten.where.self, arguments, {}, (output,), path, kind))
            results.append(output)
        self.values[node] = tuple(results)

    def _convert_scan(self, node: Node, owner: GraphModule) -> None:
        body_node, initial, sequences, constants = node.args
        body = getattr(owner, str(body_node.target))  # type: ignore[union-attr]
        outer_ops, self.ops = self.ops, []
        inner_inputs = []
        scope, self.scope = self.scope, f"{self.scope}{next(self.scopes)}:"
        for placeholder in (inner for inner in body.graph.nodes if inner.op == "placeholder"):
            variable = self._variable(f"%{self.scope}{placeholder.name}", placeholder.meta["val"], TensorKind.INPUT)
            inner_inputs.append(variable)
            self.values[placeholder] = variable
        result = self._convert_nodes(body)
        results = tuple(self._argument(arg) for arg in pytree.tree_leaves(result.args[0]))
        graph = TorchModuleIRGraph(tuple(inner_inputs), results, tuple(self.ops))
        self.ops, self.scope = outer_ops, scope
        outputs = tuple(
            self._variable(f"%{self.scope}{node.name}.{index}", value, TensorKind.RESULT)
            for index, value in enumerate(node.meta["val"])
        )
        path, kind = module_frame(node, self.request.strip_prefix)
        arguments = tuple(
            FixedTensorList(tuple(self._argument(item) for item in items))  # type: ignore[union-attr]
            for items in (initial, sequences, constants)
        )
        source = node_source(node)
        self.ops.append(TorchOp(SCAN, (*arguments, graph), {}, outputs, path, kind, source))
        self.values[node] = outputs

    def _argument(self, argument: object) -> Argument:
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            items = tuple(self._argument(item) for item in argument)
            if any(isinstance(item, TensorVariable) for item in items):
                return FixedTensorList(items)
            return items
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._scalar(argument)
        return argument

    def _scalar(self, value: object) -> Argument:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._named(value.node.expr)
        return value

    def _named(self, expr: sympy.Expr) -> Dim:
        plain = plain_size(expr, self.least) if isinstance(expr, sympy.Basic) else sympy.sympify(expr)
        renamed = plain.subs(self.symbols)
        unknown = renamed.free_symbols - self.known
        if unknown:
            raise _UnknownSizeError(f"{renamed} is none of {sorted(map(str, self.known))}")
        return simplify_dim(without_needless_extrema(renamed, self.larger) if self.larger else renamed)

    def _variable(self, name: str, value: torch.Tensor, kind: TensorKind) -> TensorVariable:
        shape = tuple(
            self._named(size.node.expr) if isinstance(size, torch.SymInt) else int(size) for size in value.shape
        )
        return TensorVariable(name, shape, value.dtype, kind)

    def _outputs(self, node: Node) -> list[TensorVariable]:
        outputs = []
        specs = self.program.graph_signature.output_specs
        for leaf, spec in zip(pytree.tree_leaves(node.args[0]), specs, strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                self._warn_of_write(str(spec.target or "an argument"), leaf)
                continue
            value = self._argument(leaf)
            if isinstance(value, TensorVariable):
                outputs.append(value)
            elif value is not None:
                raise CaptureError(f"output {value!r} is not a tensor.", "Return tensors only.")
        return outputs

    def _warn_of_write(self, target: str, value: object) -> None:
        """The engine remembers nothing between runs: a state that matters has to be an input and an output."""
        source = node_source(value) if isinstance(value, Node) else ""
        where = f" at {source}" if source else ""
        warnings.warn(
            f"{type(self.request.module).__name__}: the forward writes into {target}{where}, which the archive does not keep; "
            "return it to have it as an output.",
            stacklevel=2,
        )

    def _range(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Return the smallest and the largest value of a symbol, as they were declared and as conditions have it."""
        found = self.program.range_constraints.get(symbol)
        lower = int(found.lower) if found is not None and found.lower.is_Integer else 0
        upper = int(found.upper) if found is not None and found.upper.is_Integer else None
        whole, factor = whole_size(self.symbols[symbol])
        least, most = self.bounds.get(str(whole), (0, None))
        tops = [top for top in (upper, None if most is None else most // factor) if top is not None]
        return max(lower, -(-least // factor)), min(tops, default=None)

    def _symbol_ranges(self) -> tuple[SymbolRange, ...]:
        ranges: dict[str, SymbolRange] = {}  # inputs that share a size may have symbols of their own for it
        for symbol, named in self.symbols.items():
            lower, upper = self._range(symbol)
            whole, factor = whole_size(named)
            last = None if upper is None else upper * factor
            ranges.setdefault(whole.name, SymbolRange(whole.name, lower * factor, last))
        return tuple(ranges.values())


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter and buffer name to the first name of the same tensor (tied weights)."""
    first: dict[int, str] = {}
    named: Iterable[tuple[str, torch.Tensor]] = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _declared_sizes(request: CaptureRequest, program: ExportedProgram) -> Iterator[tuple[str, int, str, sympy.Expr]]:
    """Yield input, axis, symbol, and what PyTorch calls that size, for each axis declared dynamic."""
    user_names = set(program.graph_signature.user_inputs)
    tensors = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in user_names and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    folds = DivisibleAxes.of(request.dynamic_axes)
    for name, tensor in zip(request.input_names or (), tensors, strict=True):
        for axis, symbol in request.dynamic_axes.get(name, {}).items():
            size = tensor.shape[folds.place(name, axis)]
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            yield name, axis, symbol_name(symbol), expr


def check_symbolic(request: CaptureRequest, program: ExportedProgram, specializations: Sequence[str]) -> None:
    """Refuse a capture in which an axis declared dynamic is a number after all."""
    auto = auto_symbols(request.dynamic_axes)
    for name, axis, symbol, expr in _declared_sizes(request, program):
        if not isinstance(expr, sympy.Symbol) and symbol not in auto:
            declared = declared_sizes(request.dynamic_axes).get(symbol)
            size = expr * declared.multiple_of if declared is not None else expr
            told = f"to one size by the model: axis {axis} of input {name!r} ({symbol}) is {size}"
            raise frozen_axis(request.module, next(iter(specializations), ""), told, "make the axis static.", (symbol,))


def symbol_names(request: CaptureRequest, program: ExportedProgram) -> dict[sympy.Symbol, sympy.Expr]:
    """Map PyTorch's symbols (`s0`) to the user's (`S`), or to what PyTorch saw of a declared multiple (`S//8`)."""
    names: dict[sympy.Symbol, str] = {}
    auto = auto_symbols(request.dynamic_axes)
    # Those that were given by name first: an axis with `Dim.AUTO` takes the symbol of the axis that it must be equal to.
    for name, axis, symbol, expr in sorted(_declared_sizes(request, program), key=lambda each: each[2] in auto):
        if not isinstance(expr, sympy.Symbol):
            continue
        known = names.setdefault(expr, symbol)
        if known != symbol and symbol not in auto:
            raise OptionError(
                f"axes {known} and {symbol} (axis {axis} of {name!r}) must be equal in this model.",
                "Give both the same symbol.",
                symbols=(known, symbol),
            )
    declared = declared_sizes(request.dynamic_axes)
    factors = {symbol: declared[name].multiple_of if name in declared else 1 for symbol, name in names.items()}
    return {symbol: sympy.sympify(floor_div(dim_symbol(name), factors[symbol])) for symbol, name in names.items()}
