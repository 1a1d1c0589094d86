"""A captured graph on its example inputs: sizes are numbers, tensors have values, each operator can be called alone.

In: a `TorchModuleTracer`. Out: nodes of data and of operators that are the reader's own: changing one changes no export. The
package's `TorchModuleIRGraph`, `TorchOp`, `TensorVariable` and `FixedTensorList` are these; `ir.py` has those that are exported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from generic_export.compat import pytree, schema_of
from generic_export.errors import CaptureError, described
from generic_export.torch_graph.capture.quantised_modules import spelled_out
from generic_export.torch_graph.capture.replay import number_of, replay, sizes_of
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.fusion import without_dead_ops
from generic_export.torch_graph.ir import Argument, FixedTensorList, TensorVariable, TorchOp
from generic_export.torch_graph.loops import SCAN
from generic_export.torch_graph.naming import name_results
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.printing import graph_listing

_NOT_CALLED_ALONE = frozenset({SCAN, torch.ops.t2n.unit.default})  # they hold graphs, or modules: `replay` runs them

_Values = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Computes tensors of a graph, by name; those that cannot be computed are missing."""


@dataclass(eq=False)
class Data:
    """A node of data: something that an operator takes or makes."""

    name: str


@dataclass(eq=False)
class PythonConstant(Data):
    """An argument that is no tensor: a number, a size, a dtype, None, or a tuple of those."""

    data: Any


@dataclass(eq=False)
class TensorSnapshot(Data):
    """One tensor of a graph.

    Attributes:
        data: its values where they are known without running anything: a parameter, a buffer, a constant; else None.
        shape: its sizes, for the example inputs.
        dtype: PyTorch element type.
        quant: scale and zero point of a quantised tensor; None for others.
    """

    data: torch.Tensor | None
    shape: list[int] | None
    dtype: torch.dtype | None
    quant: dict[str, Any] | None = None
    _traced_data: torch.Tensor | None = field(default=None, repr=False)

    @property
    def value(self) -> torch.Tensor | None:
        """Its values, or those it had for the example inputs; None while nobody asked for them."""
        return self._traced_data if self.data is None else self.data

    def realise(self, result: torch.Tensor, *, constant: bool) -> None:
        """Take over what a run gave.

        Args:
            result: the tensor.
            constant: it is the same for any input.
        """
        self.shape, self.dtype, self.quant = list(result.shape), result.dtype, _quantisation(result)
        self._traced_data = result
        self.data = result if constant else self.data


@dataclass(eq=False)
class TensorListSnapshot(Data):
    """A list of tensors that an operator takes, such as `cat`; None stands for one that was left out."""

    data: list[TensorSnapshot | None]


@dataclass(eq=False)
class OpSnapshot:
    """One call of an operator.

    Attributes:
        kind: the operator as TorchScript spells it, such as `aten::linear`.
        module_path: dotted path of the module whose forward called it ("" for the root).
        inputs: its arguments, in the order of its signature.
        outputs: the tensors that it makes.
        scope: that module and those around it, as TorchScript spells them.
        op_ref: the function that computes it; None where `kind` says enough, or where it cannot be called alone.
        call_name: the operator without its namespace.
        keywords: names of the last inputs, where `op_ref` takes them by name.
    """

    kind: str
    module_path: str
    inputs: list[Data]
    outputs: list[TensorSnapshot]
    scope: str
    op_ref: Callable[..., Any] | None
    call_name: str | None
    keywords: tuple[str, ...] = ()
    _computed: _Values | None = field(default=None, repr=False)

    def call_op(self) -> Any:
        """Compute the operator in PyTorch from the values that its inputs had, and return what it returns.

        Values that nobody has computed yet are computed first, when the operator is of a graph.

        Raises:
            CaptureError: an input has no value; nothing computes such an operator; PyTorch refuses the call.
        """
        missing = [tensor for tensor in self._tensors() if tensor.value is None]
        found = self._computed([tensor.name for tensor in missing]) if missing and self._computed else {}
        for tensor in missing:
            if tensor.name not in found:
                raise CaptureError(
                    f"{self.kind}: its input {tensor.name!r} has no value.",
                    "Set the data of the tensor, or its _traced_data.",
                )
            tensor.realise(found[tensor.name], constant=False)
        function = self.op_ref or _operator(self.kind)
        if function is None:
            return self._as_computed()
        arguments = [_plain(data) for data in self.inputs]
        positional = len(arguments) - len(self.keywords)
        try:
            with torch.no_grad():
                return function(
                    *arguments[:positional], **dict(zip(self.keywords, arguments[positional:], strict=True))
                )
        except Exception as error:  # kernels raise many classes
            raise CaptureError(
                f"{self.kind} at {self.module_path or '(root)'}: PyTorch refused the call: {described(error)}"
            ) from error

    def realise_output_type_and_size(self) -> bool:
        """Compute the operator, and note shape, dtype and values of what it makes.

        Outputs that depend on parameters and constants alone get their values as `data`: they are constants too.

        Returns:
            Whether the operator could be computed.
        """
        try:
            result = self.call_op()
        except CaptureError:
            return False
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if len(results) != len(self.outputs):
            return False
        constant = all(tensor.data is not None for tensor in self._tensors())
        for output, tensor in zip(self.outputs, results, strict=True):
            output.realise(tensor, constant=constant)
        return True

    def _tensors(self) -> Iterator[TensorSnapshot]:
        for data in self.inputs:
            elements = data.data if isinstance(data, TensorListSnapshot) else [data]
            yield from (element for element in elements if isinstance(element, TensorSnapshot))

    def _as_computed(self) -> Any:
        names = [output.name for output in self.outputs]
        found = self._computed(names) if self._computed else {}
        if not all(name in found for name in names):
            raise CaptureError(
                f"{self.kind} at {self.module_path or '(root)'} is not an operator that can be called separately."
            )
        results = [found[name] for name in names]
        return results[0] if len(results) == 1 else results


class GraphSnapshot:
    """A captured module with its example inputs: nodes of data, and operators in execution order.

    Args:
        torch_module_tracer: captures it.
        omit_useless_nodes: leave out what no output depends on.
        is_root_module: the module is a model, whose inputs are its interface; of a part of one (False), inputs that nothing
            reads are useless nodes too.

    Attributes:
        tracer: what captured it.
        captured: the graph with its symbolic sizes, as exports translate it.
        inputs, outputs: some of `data_nodes`.
        data_nodes: inputs, parameters, constants, results and arguments, each once.
        op_nodes: the operators.

    Raises:
        CaptureError, OptionError: as `TorchModuleTracer.trace`.
    """

    inputs: list[TensorSnapshot]
    outputs: list[TensorSnapshot]
    data_nodes: list[Data]
    op_nodes: list[OpSnapshot]

    def __init__(
        self, torch_module_tracer: TorchModuleTracer, omit_useless_nodes: bool = True, is_root_module: bool = False
    ) -> None:
        self.tracer = torch_module_tracer
        module = torch_module_tracer.module
        with spelled_out(module):
            graph = name_results(torch_module_tracer.trace())
            stored = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self.captured = without_dead_ops(graph) if omit_useless_nodes else graph
        self._examples = FlatCall.of(module, torch_module_tracer.args, torch_module_tracer.kwargs).tensors
        self._stored: dict[str, torch.Tensor] = {
            **{name.removeprefix(torch_module_tracer.strip_prefix): value.detach() for name, value in stored.items()},
            **graph.constants,
        }
        self._sizes = sizes_of(self.captured, self._examples)
        self._tensors: dict[str, TensorSnapshot] = {}
        self.data_nodes = []
        self.inputs = list(self._input_nodes(keep_unread=is_root_module or not omit_useless_nodes))
        self._add_stored()
        self.op_nodes = [self._op(op) for op in self.captured.ops]
        self.outputs = [self._tensors[output.name] for output in self.captured.outputs]

    def __repr__(self) -> str:
        return f"<graph of {type(self.tracer.mod).__name__}.{self.tracer.fn_name}: {len(self.op_nodes)} operators>"

    def __str__(self) -> str:
        return graph_listing(self.captured)

    def _input_nodes(self, *, keep_unread: bool) -> Iterator[TensorSnapshot]:
        read = self.captured.use_counts()
        for variable, example in zip(self.captured.inputs, self._examples, strict=True):
            if keep_unread or variable.name in read:
                node = self._tensor(variable)
                node.realise(example.detach(), constant=False)
                yield node

    def _add_stored(self) -> None:
        for variable in self.captured.parameters:
            node = self._tensor(variable)
            if variable.name in self._stored:
                node.realise(self._stored[variable.name], constant=True)
        for name, value in self.captured.constants.items():
            node = TensorSnapshot(name, value, list(value.shape), value.dtype)
            self._tensors[name] = node
            self.data_nodes.append(node)

    def _tensor(self, variable: TensorVariable) -> TensorSnapshot:
        """Return the node of a tensor; a new one is added to the nodes of data."""
        if variable.name not in self._tensors:
            shape = [int(self._number(size)) for size in variable.shape]
            node = TensorSnapshot(variable.name, None, shape, variable.dtype)
            self._tensors[variable.name] = node
            self.data_nodes.append(node)
        return self._tensors[variable.name]

    def _op(self, op: TorchOp) -> OpSnapshot:
        schema = schema_of(op.target)
        name = next((output.name for output in op.outputs if output is not None), schema.name)
        parameters = [argument.name for argument in schema.arguments]
        inputs = [self._data(value, f"{name}.{of}") for of, value in zip(parameters, op.args, strict=False)]
        inputs += [self._data(value, f"{name}.{of}") for of, value in op.kwargs.items()]
        return OpSnapshot(
            kind=schema.name,
            module_path=op.module_path,
            inputs=inputs,
            outputs=[self._tensor(output) for output in op.outputs if output is not None],
            scope=_scope(op.module_path),
            op_ref=None if op.target in _NOT_CALLED_ALONE else op.target,
            call_name=schema.name.split("::")[-1],
            keywords=tuple(op.kwargs),
            _computed=self._values,
        )

    def _data(self, argument: Argument, name: str) -> Data:
        if isinstance(argument, TensorVariable):
            return self._tensor(argument)
        if isinstance(argument, FixedTensorList):
            made: Data = TensorListSnapshot(name, [None if item is None else self._tensor(item) for item in argument])
        else:
            made = PythonConstant(name, self._number(argument))
        self.data_nodes.append(made)
        return made

    def _number(self, argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [self._number(item) for item in argument]
        return number_of(argument, self._sizes) if isinstance(argument, sympy.Basic) else argument

    def _values(self, names: Collection[str]) -> Mapping[str, torch.Tensor]:
        return replay(self.captured, self._examples, self._stored.get, names)


def _plain(data: Data) -> Any:
    """Return what PyTorch is called with for a node."""
    if isinstance(data, TensorSnapshot):
        return data.value
    if isinstance(data, TensorListSnapshot):
        return [None if item is None else item.value for item in data.data]
    return data.data if isinstance(data, PythonConstant) else data


def _operator(kind: str) -> Callable[..., Any] | None:
    """Return PyTorch's operator of a name such as `aten::add`, all its overloads; None for those of captured graphs only."""
    namespace, _, name = kind.partition("::")
    found: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), name, None)
    return None if namespace == "t2n" else found


def _scope(path: str) -> str:
    parts = path.split(".") if path else []
    return "/".join(f"__module.{'.'.join(parts[: end + 1])}" for end in range(len(parts)))


def _quantisation(tensor: torch.Tensor) -> dict[str, Any] | None:
    if not tensor.is_quantized:
        return None
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "scale": tensor.q_per_channel_scales(),
        "zero_point": tensor.q_per_channel_zero_points(),
        "axis": tensor.q_per_channel_axis(),
    }


__all__ = ["Data", "GraphSnapshot", "OpSnapshot", "PythonConstant", "TensorListSnapshot", "TensorSnapshot"]
