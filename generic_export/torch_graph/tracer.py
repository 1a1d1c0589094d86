"""torch.export front end: an `nn.Module` and example arguments in, a `TorchModuleIRGraph` out.

Runs on fake tensors with symbolic sizes, so meta modules work and no weight is read. Results bear provisional names here
(`%linear_3.0`); `naming.name_results` gives them those that people read.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree

from generic_export.errors import CaptureError, OptionError, SpecializedAxisError
from generic_export.torch_graph.dims import Dim as Size
from generic_export.torch_graph.dims import dim_symbol, simplify_dim
from generic_export.torch_graph.ir import (
    Argument,
    FixedTensorList,
    SymbolRange,
    TensorKind,
    TensorVariable,
    TorchModuleIRGraph,
    TorchOp,
)
from generic_export.torch_graph.naming import module_frame, user_source

DynamicAxes = Mapping[str, Mapping[int, str]]
"""`{input name: {axis: symbol name}}`; the same symbol name means the same size."""

# Calls that only check or annotate: they make no value that the graph needs.
_IGNORED_OVERLOAD_PACKETS = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)

_MAX_DECOMPOSITION_ROUNDS = 8
_SCALAR_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


@dataclass(frozen=True)
class _Strategy:
    """One way of asking torch.export about symbolic sizes.

    By default PyTorch reasons as if a size were at least 2, then lets it be 0 or 1 too, unless its reasoning needed the
    difference; then it refuses, although the graph itself may hold everywhere.

    Attributes:
        oblivious: reason about any size from the start.
        lenient: accept what the reasoning about memory layout needed, for symbols that one axis alone has.
    """

    oblivious: bool = False
    lenient: bool = False


_STRATEGIES = (_Strategy(), _Strategy(oblivious=True), _Strategy(lenient=True))


@dataclass(frozen=True)
class TorchModuleTracer:
    """Capture a module with `torch.export`.

    Attributes:
        module: the module to capture, in eval mode; parameters may be on the meta device. It is not modified.
        args: example positional arguments (tensors, or nests of tensors); only shapes and dtypes matter.
        kwargs: example keyword arguments.
        input_names: a name per input tensor, in flattened order; None takes those of `forward`.
        output_names: a name per output tensor, in flattened order; None numbers them.
        dynamic_axes: the axes that stay symbolic.
        strip_prefix: leading path removed from module paths and parameter names (a wrapper's attribute).
        keep: says whether an operator can stay as it is; others go through PyTorch's own decompositions.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes = field(default_factory=dict)
    strip_prefix: str = ""
    keep: Callable[[OpOverload], bool] | None = None

    def trace(self) -> TorchModuleIRGraph:
        """Run torch.export and convert its graph.

        Raises:
            CaptureError: torch.export failed; the message carries its reason and the user's source line.
            SpecializedAxisError: a dynamic axis was frozen to one size by the model.
            OptionError: `input_names` or `dynamic_axes` do not match the arguments.
        """
        program = _functional(self._export())
        if self.keep is not None:
            program = _decomposed(program, self.keep)
        return _Conversion(self, program).graph()

    def _export(self) -> ExportedProgram:
        """Try the strategies in order; when none captures the module the first one's error is told."""
        first_error: Exception | None = None
        for strategy in _STRATEGIES:
            try:
                return self._export_once(strategy)
            except OptionError:
                raise
            except Exception as error:  # torch.export raises many unrelated classes, none of them documented
                first_error = first_error or error
                if "Constraints violated" not in str(error) and not isinstance(error, AssertionError):
                    break
        if first_error is None:
            raise CaptureError(f"{type(self.module).__name__}: torch.export was not tried.")
        raise _capture_error(self.module, first_error) from first_error

    def _export_once(self, strategy: _Strategy) -> ExportedProgram:
        shapes = self._shapes_collection(strategy)
        kwargs = dict(self.kwargs)
        oblivious = fx_config.patch(backed_size_oblivious=strategy.oblivious)  # type: ignore[attr-defined]
        with torch.no_grad(), oblivious, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own pytree code
            return torch.export.export(
                self.module,
                self.args,
                kwargs,
                dynamic_shapes=shapes.dynamic_shapes(self.module, self.args, kwargs),
                strict=False,
            )

    def _shapes_collection(self, strategy: _Strategy) -> ShapesCollection:
        tensors = _tensor_leaves(self.args, self.kwargs)
        names = list(self.input_names) if self.input_names is not None else list(self.dynamic_axes)
        unknown = [name for name in self.dynamic_axes if name not in names]
        if unknown:
            raise OptionError(f"dynamic axes are declared for unknown input {unknown[0]!r}.", f"Inputs: {names}.")
        if self.dynamic_axes and len(names) != len(tensors):
            raise OptionError(
                f"{len(tensors)} input tensors but {len(names)} input names.",
                "Give input_names, one per input tensor, when axes are dynamic.",
            )
        uses = Counter(symbol for axes in self.dynamic_axes.values() for symbol in axes.values())
        dims = {
            symbol: Dim.DYNAMIC if strategy.lenient and count == 1 else Dim(symbol) for symbol, count in uses.items()
        }
        collection = ShapesCollection()
        for name, tensor in zip(names, tensors, strict=False):
            axes = self.dynamic_axes.get(name)
            if axes:
                collection[tensor] = {axis: dims[symbol] for axis, symbol in axes.items()}
        return collection


def _tensor_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _capture_error(module: nn.Module, error: Exception) -> CaptureError:
    """Turn whatever torch.export raised into one error that keeps its first lines and the user's line."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    specialised = re.search(r"(was inferred to be a constant|specialized|not all values of .* valid)[^\n]*", text)
    source = user_source(text)
    where = f" at {source}" if source else ""
    name = type(module).__name__
    if specialised:
        detail = next((line for line in lines if specialised.group(1) in line), specialised.group(0))
        return SpecializedAxisError(
            f"{name}{where}: a dynamic axis is frozen to one size by the model: {detail}",
            "Make the axis static, or change the line that depends on its value.",
        )
    return CaptureError(
        f"{name}{where}: torch.export cannot capture the module: {type(error).__name__}: {reason}",
        "Change that line so that it does not depend on values or on one size; the cause carries PyTorch's full account.",
    )


def _overloads(program: ExportedProgram) -> set[OpOverload]:
    return {
        node.target
        for graph_module in program.graph_module.modules()
        if isinstance(graph_module, GraphModule)
        for node in graph_module.graph.nodes
        # Arithmetic on sizes is no operator of the graph: PyTorch has its result as an expression.
        if isinstance(node.target, OpOverload) and not isinstance(node.meta.get("val"), _SCALAR_TYPES)
    }


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place operators (retraced by PyTorch only when it has some)."""
    if any(overload._schema.is_mutable for overload in _overloads(program)):
        return program.run_decompositions({})
    return program


def _decomposed(program: ExportedProgram, keep: Callable[[OpOverload], bool]) -> ExportedProgram:
    """Rewrite the operators that cannot stay, one level of PyTorch's decompositions at a time."""
    known = None
    for _ in range(_MAX_DECOMPOSITION_ROUNDS):
        unwanted = {op for op in _overloads(program) if not keep(op) and not _is_annotation(op)}
        if not unwanted:
            return program
        known = known if known is not None else torch.export.default_decompositions()
        table = {op: known[op] for op in unwanted if op in known}
        if not table:
            return program
        program = program.run_decompositions(table)
    return program


def _is_annotation(overload: OpOverload) -> bool:
    return overload._schema.name.split("::")[-1] in _IGNORED_OVERLOAD_PACKETS


class _Conversion:
    """The state of one conversion from an ExportedProgram to the IR; used once."""

    def __init__(self, tracer: TorchModuleTracer, program: ExportedProgram) -> None:
        self.tracer = tracer
        self.program = program
        self.symbols = _symbol_names(tracer, program)
        self.values: dict[Node, Argument] = {}
        self.ops: list[TorchOp] = []
        self.parameters: dict[str, TensorVariable] = {}
        self.constants: dict[str, torch.Tensor] = {}

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
        if self.tracer.output_names is None:
            return ("output",) if len(outputs) == 1 else tuple(f"output_{index}" for index in range(len(outputs)))
        if len(self.tracer.output_names) != len(outputs):
            raise OptionError(
                f"the module has {len(outputs)} output tensors but {len(self.tracer.output_names)} output names were given."
            )
        return tuple(self.tracer.output_names)

    def _convert_placeholders(self) -> list[TensorVariable]:
        inputs: list[TensorVariable] = []
        names = iter(self.tracer.input_names or ())
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        canonical = _canonical_names(self.tracer.module)
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                value = node.meta.get("val")
                if not isinstance(value, torch.Tensor):
                    self.values[node] = value
                    continue
                variable = self._variable(next(names, node.name), value, TensorKind.INPUT)
                inputs.append(variable)
                self.values[node] = variable
            else:
                self.values[node] = self._state(node, spec, canonical)
        return inputs

    def _state(self, node: Node, spec: InputSpec, canonical: Mapping[str, str]) -> TensorVariable:
        value = node.meta["val"]
        target = str(spec.target)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = canonical.get(target, target).removeprefix(self.tracer.strip_prefix)
            return self.parameters.setdefault(name, self._variable(name, value, TensorKind.PARAMETER))
        if spec.kind is InputKind.CONSTANT_TENSOR:
            name = target.removeprefix(self.tracer.strip_prefix)
            self.constants[name] = self.program.constants[target]
            return self._variable(name, value, TensorKind.CONSTANT)
        raise CaptureError(f"the module takes an input of kind {spec.kind.name} ({target}), which has no NNEF form.")

    def _convert_nodes(self, graph_module: GraphModule) -> Node:
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return node
            if node.op == "call_function":
                self._convert_call(node, graph_module)
        raise CaptureError("the captured graph has no output.")

    def _convert_call(self, node: Node, owner: GraphModule) -> None:
        value = node.meta.get("val")
        if isinstance(node.target, HigherOrderOperator):
            self._inline(node, owner)
        elif isinstance(value, _SCALAR_TYPES):
            self.values[node] = self._scalar(value)
        elif node.target is operator.getitem:
            container, index = node.args
            self.values[node] = self.values[container][index]  # type: ignore[index]
        elif isinstance(node.target, OpOverload):
            if not _is_annotation(node.target):
                self._convert_op(node, value)
        else:
            raise CaptureError(
                f"call of {node.target} at {user_source(node.meta.get('stack_trace', ''))} is not an op."
            )

    def _convert_op(self, node: Node, value: object) -> None:
        path, kind = module_frame(node, self.tracer.strip_prefix)
        values = value if isinstance(value, (tuple, list)) else (value,)
        outputs = tuple(
            self._variable(f"%{node.name}.{index}", item, TensorKind.RESULT) if isinstance(item, torch.Tensor) else None
            for index, item in enumerate(values)
        )
        op = TorchOp(
            target=node.target,  # type: ignore[arg-type]
            args=tuple(self._argument(arg) for arg in node.args),
            kwargs={name: self._argument(arg) for name, arg in node.kwargs.items()},
            outputs=outputs,
            module_path=path,
            module_type=kind,
            source=user_source(node.meta.get("stack_trace") or ""),
        )
        self.ops.append(op)
        self.values[node] = FixedTensorList(outputs).elements if isinstance(value, (tuple, list)) else outputs[0]

    def _inline(self, node: Node, owner: GraphModule) -> None:
        """Replace a grad-mode or (disabled) autocast region by its body: neither changes an inference result."""
        name = str(node.target)
        body_position = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(name)
        if body_position is None or (name == "wrap_with_autocast" and node.args[2]):
            raise CaptureError(
                f"{name} at {user_source(node.meta.get('stack_trace', ''))} has no NNEF form.",
                "Remove it from the forward, or export a module without it.",
            )
        body_node = node.args[body_position]
        body = getattr(owner, str(body_node.target))  # type: ignore[union-attr]
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        for placeholder, argument in zip(placeholders, node.args[body_position + 1 :], strict=True):
            self.values[placeholder] = self._argument(argument)
        result = self._convert_nodes(body)
        self.values[node] = tuple(self._argument(arg) for arg in pytree.tree_leaves(result.args[0]))

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

    def _named(self, expr: sympy.Expr) -> Size:
        renamed = expr.subs(self.symbols) if isinstance(expr, sympy.Basic) else sympy.sympify(expr)
        unknown = renamed.free_symbols - set(self.symbols.values())
        if unknown:
            raise CaptureError(
                f"size {renamed} depends on {sorted(map(str, unknown))}, which is not a declared dynamic axis.",
                "Sizes that depend on the data have no NNEF form; declare the axis dynamic when it is an input's.",
            )
        return simplify_dim(renamed)

    def _variable(self, name: str, value: torch.Tensor, kind: TensorKind) -> TensorVariable:
        shape = tuple(
            self._named(size.node.expr) if isinstance(size, torch.SymInt) else int(size) for size in value.shape
        )
        return TensorVariable(name, shape, value.dtype, kind)

    def _outputs(self, node: Node) -> list[TensorVariable]:
        outputs = []
        for leaf in pytree.tree_leaves(node.args[0]):
            value = self._argument(leaf)
            if isinstance(value, TensorVariable):
                outputs.append(value)
            elif value is not None:
                raise CaptureError(f"output {value!r} is not a tensor.", "Return tensors only.")
        return outputs

    def _symbol_ranges(self) -> tuple[SymbolRange, ...]:
        ranges = []
        for symbol, named in self.symbols.items():
            found = self.program.range_constraints.get(symbol)
            lower = int(found.lower) if found is not None and found.lower.is_Integer else 0
            upper = int(found.upper) if found is not None and found.upper.is_Integer else None
            ranges.append(SymbolRange(named.name, lower, upper))
        return tuple(ranges)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter and buffer name to the first name of the same tensor (tied weights)."""
    first: dict[int, str] = {}
    named: Iterable[tuple[str, torch.Tensor]] = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _symbol_names(tracer: TorchModuleTracer, program: ExportedProgram) -> dict[sympy.Symbol, sympy.Symbol]:
    """Map PyTorch's symbols (`s0`) to the user's (`S`), checking that each declared axis stayed symbolic."""
    user_names = set(program.graph_signature.user_inputs)
    tensors = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in user_names and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    names = list(tracer.input_names) if tracer.input_names is not None else list(tracer.dynamic_axes)
    if len(names) != len(tensors) and tracer.input_names is not None:
        raise OptionError(f"{len(tensors)} input tensors but {len(names)} input names ({', '.join(names)}).")
    mapping: dict[sympy.Symbol, sympy.Symbol] = {}
    for name, tensor in zip(names, tensors, strict=False):
        for axis, symbol in tracer.dynamic_axes.get(name, {}).items():
            size = tensor.shape[axis]
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if not isinstance(expr, sympy.Symbol):
                raise SpecializedAxisError(
                    f"axis {axis} of input {name!r} was declared dynamic ({symbol}) but the model needs it to be {expr}.",
                    "Make the axis static, or change the line of the model that depends on its value.",
                )
            known = mapping.setdefault(expr, dim_symbol(symbol))
            if known.name != symbol:
                raise OptionError(
                    f"axes {known.name} and {symbol} (axis {axis} of {name!r}) must be equal in this model.",
                    "Give both the same symbol.",
                )
    return mapping


def torch_version() -> str:
    """Return the version of PyTorch that captures, without its local build tag."""
    return str(torch.__version__).split("+")[0]
