"""The tree of a model's modules, each with what it received and returned, and the exports tried on it.

In: a recording. Out: `ModelDiagnoseOutput`, a view that follows `named_modules()`; the work is done by the rest of this folder.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from generic_export.compat import pytree
from generic_export.diagnose.piece_by_piece.exporters import ExportRequest, exporter_named
from generic_export.diagnose.piece_by_piece.node_text import Looks, export_report, recorded_text
from generic_export.diagnose.piece_by_piece.opaque import OpaqueModule, ShapeFunction, Shapes
from generic_export.diagnose.piece_by_piece.status import CustomOpStrategy, StatusExport, StatusExportCode
from generic_export.diagnose.record.axes import Symbols, infer_axes
from generic_export.diagnose.record.leaves import take_apart
from generic_export.diagnose.record.pieces import Case, cases_of
from generic_export.diagnose.record.recording import RecordedCall, Recording
from generic_export.errors import CaptureError, OptionError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_NESTS = (list, tuple, dict)


class ModelDiagnoseOutput:
    """A module in the tree of a traced model; iterating gives it and everything below it, parents first.

    Args:
        parent: None for the root.
        name: within the parent: `layers.0`, `self_attn`.
        model: the module.
        level: depth in the tree.
        method_name: the method that was traced.

    Attributes:
        inputs: `(args, kwargs)` of each call.
        outputs: what each call returned, as a tuple.
        exporter_status: the last status by exporter.
        exporter_outputs: what each exporter made.
        last_error: why the last export failed, or None.
    """

    def __init__(
        self,
        parent: ModelDiagnoseOutput | None,
        name: str,
        model: nn.Module,
        level: int = 0,
        method_name: str = "forward",
    ) -> None:
        self.parent = parent
        self.name = name
        self.model = model
        self.level = level
        self.method_name = method_name
        self.children: list[ModelDiagnoseOutput] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[tuple[Any, ...]] = []
        self.exporter_status: dict[str, StatusExport] = {}
        self.exporter_outputs: dict[str, Any] = {}
        self.last_error: str | None = None
        self.signature = inspect.signature(getattr(model, method_name))
        self._calls: list[RecordedCall] = []
        self._cases: list[Case] = []
        self._opaque: OpaqueModule | None = None

    def __iter__(self) -> Iterator[ModelDiagnoseOutput]:
        yield self
        for child in self.children:
            yield from child

    def __repr__(self) -> str:
        return f"ModelDiagnoseOutput({self.full_name}, {len(self.children)} children, {len(self.inputs)} calls)"

    # --- names ----------------------------------------------------------------------------------------

    @property
    def true_model_name(self) -> str:
        """Class of the module."""
        return type(self.model).__name__

    @property
    def full_name(self) -> str:
        """`name:Class`, with the method when it is not forward."""
        method = "" if self.method_name == "forward" else f".{self.method_name}"
        return f"{self.name}:{self.true_model_name}{method}"

    @property
    def dot_name(self) -> str:
        """The name, indented by the level."""
        return f"{'..' * self.level}{self.name}"

    @property
    def custom_op_name(self) -> str:
        """Name of the opaque operator: `C_<RootClass>_<child>_<grandchild>`."""
        if self.parent is None:
            return f"C_{self.true_model_name}"
        return f"{self.parent.custom_op_name}_{re.sub(r'[^A-Za-z0-9]+', '_', self.name).strip('_')}"

    @property
    def path(self) -> str:
        """As in `named_modules()`."""
        return "" if self.parent is None else f"{self.parent.path}.{self.name}".removeprefix(".")

    # --- shapes ---------------------------------------------------------------------------------------

    def guess_dynamic_shape_object(self, *objs: Any, msg: Callable[[], str] | None = None) -> Any:
        """Return the dynamic axes of one value, seen once per call, in the nest of the value.

        Args:
            objs: the value in each call: tensors, constants, or nests of them.
            msg: what to say of the place in an error.

        Returns:
            None for what is no tensor; `{axis: Dim.DYNAMIC}` for each axis that varies, or is 0 in every call.

        Raises:
            CaptureError: the value has another type, rank, length or keys in some call.
        """
        where = msg() if msg is not None else self.full_name
        flat = [pytree.tree_flatten(value, lambda inner: not isinstance(inner, _NESTS)) for value in objs]
        if any(spec != flat[0][1] for _, spec in flat):
            raise CaptureError(f"{where}: a value has another type, length or keys in some calls.")
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._moving(column, where) for column in columns], flat[0][1])

    def _moving(self, values: Sequence[Any], where: str) -> Any:
        """Return the dynamic axes of a value that is no nest."""
        kinds = {f"tensor of {v.ndim} axes" if isinstance(v, torch.Tensor) else type(v).__name__ for v in values}
        if len(kinds) != 1:
            raise CaptureError(f"{where}: a value is {', '.join(sorted(kinds))} in different calls.")
        if isinstance(values[0], torch.Tensor):
            return _moving_axes([tuple(value.shape) for value in values])
        return self._state_shapes(values)

    def _state_shapes(self, objs: Sequence[Any]) -> Any:
        """Return a list of axes per tensor of a state; None for what holds no tensor."""
        tensors = [list(take_apart([("state", value)], keep_states=False)[1].tensors.values()) for value in objs]
        if not any(tensors):
            return None
        if len({len(found) for found in tensors}) != 1:
            raise CaptureError(f"{self.full_name}: a state has another number of tensors in some calls.")
        return [_moving_axes([tuple(tensor.shape) for tensor in column]) for column in zip(*tensors, strict=True)]

    def guess_dynamic_shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the dynamic axes of the positional and of the keyword arguments.

        Raises:
            CaptureError: there is no call, or the calls have other arguments.
        """
        if not self.inputs:
            raise CaptureError(f"{self.full_name} was not called.")
        counts = {len(args) for args, _ in self.inputs}
        keywords = {tuple(sorted(kwargs)) for _, kwargs in self.inputs}
        if len(counts) != 1 or len(keywords) != 1:
            raise CaptureError(f"{self.full_name} was called with other arguments in some calls.")
        positional = tuple(
            self.guess_dynamic_shape_object(*(args[index] for args, _ in self.inputs)) for index in range(counts.pop())
        )
        named = {
            name: self.guess_dynamic_shape_object(*(kwargs[name] for _, kwargs in self.inputs))
            for name in self.inputs[0][1]
        }
        return positional, named

    def build_shape_mapping_indices(
        self, shape_functions: Mapping[str, ShapeFunction] | None = None, verbose: int = 0
    ) -> list[tuple[int | tuple[int, ...], torch.dtype, Callable[..., torch.Tensor] | None]]:
        """Say for each output tensor which inputs its shape follows from.

        Returns:
            Per output: the number of an input of the same shape and element type, or the numbers of those that its sizes
            come from; its element type; and None, or a function that makes a tensor of that shape from the inputs.

        Raises:
            CaptureError: a size follows from no input, and no shape function is given.
        """
        del verbose
        given = self._given_shape_function(shape_functions)
        found: list[tuple[int | tuple[int, ...], torch.dtype, Callable[..., torch.Tensor] | None]] = []
        for output in self._opaque_module(shape_functions).shapes():
            if output.like is not None:
                found.append((output.like, output.dtype, None))
            else:
                sources = tuple(sorted({number for number, _ in output.origins.values()}))
                found.append((sources, output.dtype, given or output.made))
        return found

    def _given_shape_function(self, shape_functions: Mapping[str, ShapeFunction] | None) -> ShapeFunction | None:
        names = (self.true_model_name, self.custom_op_name)
        return next((shape_functions[name] for name in names if shape_functions and name in shape_functions), None)

    def determine_shape_fct(
        self,
        output_index: int,
        flattened_inputs: Sequence[Sequence[torch.Tensor]],
        flattened_outputs: Sequence[Sequence[torch.Tensor]],
        verbose: int = 0,
        shape_functions: Mapping[str, ShapeFunction] | None = None,
    ) -> Callable[..., torch.Tensor]:
        """Return a function that makes a tensor shaped like an output from input tensors.

        Args:
            output_index: which output.
            flattened_inputs, flattened_outputs: the tensors of each call.
            verbose: not used.
            shape_functions: `{class or operator name: function}`, taken as it is when this module is named.

        Raises:
            CaptureError: a size follows from no input.
            OptionError: inputs and outputs are not of the same calls.
        """
        del verbose
        given = self._given_shape_function(shape_functions)
        if given is not None:
            return given
        if not flattened_inputs or len(flattened_inputs) != len(flattened_outputs):
            raise OptionError(f"{len(flattened_inputs)} calls of inputs, {len(flattened_outputs)} of outputs.")
        shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in flattened_inputs]
        outputs = [tensors[output_index] for tensors in flattened_outputs]
        learnt = Shapes(shapes, [tensor.dtype for tensor in flattened_inputs[0]])
        return learnt.of([tuple(tensor.shape) for tensor in outputs], outputs[0].dtype, self.full_name).made

    # --- opaque operators -----------------------------------------------------------------------------

    def _opaque_module(self, shape_functions: Mapping[str, ShapeFunction] | None) -> OpaqueModule:
        if not self._calls:
            raise CaptureError(f"{self.full_name} was not called: nothing is known of its shapes.")
        return OpaqueModule(self.custom_op_name, self._calls, shape_functions)

    def put_custom_op_inplace(
        self, shape_functions: Mapping[str, ShapeFunction] | None = None, verbose: int = 0
    ) -> None:
        """Replace the module by the operator `diag_lib::<custom_op_name>`, which runs it, until it is removed.

        Raises:
            CaptureError: the module was not called, or the shape of an output follows from no input.
            OptionError: it is replaced already.
        """
        del verbose
        if self._opaque is not None:
            raise OptionError(f"{self.full_name} is a custom operator already.")
        opaque = self._opaque_module(shape_functions)
        opaque.put()
        self._opaque = opaque

    def remove_custom_op_inplace(self, verbose: int = 0) -> None:
        """Put the module back; does nothing when it is there."""
        del verbose
        if self._opaque is not None:
            self._opaque.remove()
            self._opaque = None

    # --- exports --------------------------------------------------------------------------------------

    def try_export(
        self,
        exporter: str = "nnef",
        exporter_kwargs: Mapping[str, Any] | None = None,
        verbose: int = 0,
        quiet: bool = True,
        discrepancies: bool = True,
        use_dynamic_shapes: bool | None = None,
        replace_by_custom_op: CustomOpStrategy | bool | int | str = CustomOpStrategy.NONE,
        atol: float = 1e-2,
        rtol: float = 1e-1,
        shape_functions: Mapping[str, ShapeFunction] | None = None,
    ) -> StatusExport:
        """Export the module, and what is below it as the strategy asks.

        Args:
            exporter: `nnef`, `fx`, `onnx_dynamo` or `torch_script`.
            exporter_kwargs: options of the exporter.
            verbose: not used; see `get_export_report`.
            quiet: an error is a status; False raises it.
            discrepancies: also run what was exported, on every recorded call, and compare.
            use_dynamic_shapes: keep moving axes symbolic; None: when there are two calls or more.
            replace_by_custom_op: see `CustomOpStrategy`.
            atol, rtol: limits of a comparison.
            shape_functions: for modules whose shapes cannot be learnt.

        Raises:
            OptionError, MissingExtraError: the exporter or the strategy does not exist, or a package is missing.
            CaptureError: `quiet` is False and the export failed.
        """
        del verbose
        exporter_named(exporter)
        strategy = CustomOpStrategy.of(replace_by_custom_op)
        request = ExportRequest(
            keywords=dict(exporter_kwargs or {}),
            discrepancies=discrepancies,
            dynamic=use_dynamic_shapes,
            atol=atol,
            rtol=rtol,
        )
        return self._try(exporter, request, strategy, shape_functions, quiet=quiet)

    def _try(
        self,
        exporter: str,
        request: ExportRequest,
        strategy: CustomOpStrategy,
        shape_functions: Mapping[str, ShapeFunction] | None,
        *,
        quiet: bool,
    ) -> StatusExport:
        status = self._export_here(exporter, request, strategy, shape_functions)
        self.exporter_status[exporter] = status
        self.exporter_outputs[exporter] = status.exported
        self.last_error = None if status.is_ok() else status.reason
        if not quiet and not status.is_ok():
            raise CaptureError(f"{self.full_name}: {status.step}: {status.reason.splitlines()[0]}")
        if strategy is not CustomOpStrategy.NONE or not status.is_ok():
            for child in self.children:
                child._try(exporter, request, strategy, shape_functions, quiet=quiet)
        return status

    def _export_here(
        self,
        exporter: str,
        request: ExportRequest,
        strategy: CustomOpStrategy,
        shape_functions: Mapping[str, ShapeFunction] | None,
    ) -> StatusExport:
        if not self._cases:
            return StatusExport(StatusExportCode.FAIL_NOINPUT, "EXPORT", "no input set reaches this module")
        if request.dynamic is None:
            request = replace(request, dynamic=len(self._calls) > 1)
        if strategy is CustomOpStrategy.ALWAYS:
            return self._export_as_custom_op(exporter, request, shape_functions)
        replaced = strategy is CustomOpStrategy.LOCAL and bool(self.children)
        status = self._export_cases(exporter, replace(request, isolated=replaced), shape_functions)
        if strategy is CustomOpStrategy.ONLY_IF_FAILING and not status.is_ok() and self.children:
            status = self._export_cases(exporter, replace(request, isolated=True), shape_functions)
        return status

    def _export_cases(
        self, exporter: str, request: ExportRequest, shape_functions: Mapping[str, ShapeFunction] | None
    ) -> StatusExport:
        """Export every variant of the call; the first that fails is the answer."""
        run = exporter_named(exporter)
        status = StatusExport(StatusExportCode.NONE)
        with ExitStack() as stack:
            if request.isolated and exporter != "nnef":
                for child in self.children:
                    if child._calls and child._opaque is None:
                        try:
                            child.put_custom_op_inplace(shape_functions)
                        except CaptureError as error:
                            return StatusExport(StatusExportCode.FAIL_CHILDC, "EXPORT", str(error))
                        stack.callback(child.remove_custom_op_inplace)
            for case in self._cases:
                status = run(case, request)
                if not status.is_ok():
                    return status
        return status

    def _export_as_custom_op(
        self, exporter: str, request: ExportRequest, shape_functions: Mapping[str, ShapeFunction] | None
    ) -> StatusExport:
        """Export the module as one operator: says that its shapes are known, and little else."""
        if exporter != "fx":
            raise OptionError(
                f"ALWAYS makes the module one operator that {exporter!r} cannot hold.", "Use exporter='fx', or LOCAL."
            )
        try:
            self.put_custom_op_inplace(shape_functions)
        except CaptureError as error:
            return StatusExport(StatusExportCode.FAIL_CUSTOM, "EXPORT", str(error))
        try:
            status = self._export_cases(exporter, request, shape_functions)
        finally:
            self.remove_custom_op_inplace()
        return replace(status, status=status.status | StatusExportCode.CUSTOM)

    # --- reports --------------------------------------------------------------------------------------

    def get_export_report(self, exported_program: bool = False, fx: bool = False) -> str:
        """Return a line per module: name, class and status, with graphs when asked for."""
        return export_report(self, exported_program=exported_program, fx=fx)

    def pretty_text(
        self,
        with_dynamic_shape: bool = False,
        with_shape: bool = True,
        with_min_max: bool = True,
        with_device: bool = True,
        with_inputs: bool = True,
    ) -> str:
        """Return the tree with what each module was called with."""
        looks = Looks(shape=with_shape, min_max=with_min_max, device=with_device)
        return recorded_text(self, looks, dynamic=with_dynamic_shape, inputs=with_inputs)


def build_tree(recording: Recording, method_names: Mapping[nn.Module, str]) -> ModelDiagnoseOutput:
    """Return the tree of a recorded model, filled with its calls.

    Args:
        recording: the recording.
        method_names: of modules of which another method than forward was traced.
    """
    symbols, _ = infer_axes(recording) if recording.calls else (Symbols(), None)
    cases = cases_of(recording, symbols, every_member=True)
    method = method_names.get(recording.model, "forward")
    root = ModelDiagnoseOutput(None, type(recording.model).__name__.lower(), recording.model, 0, method)
    _add_children(root, root.model, "", method_names, set(recording.paths))
    for node in root:
        node._cases = [_with_method(case, node.method_name) for case in cases if case.module is node.model]
        node._calls = [recorded for case in node._cases for recorded in case.calls]
        node._calls.sort(key=lambda recorded: recorded.call.index)
        for recorded in node._calls:
            _add_call(node, recorded)
    return root


class _Method(nn.Module):
    """Another method of a module, as the forward of one."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.forward = getattr(module, method)


def _with_method(case: Case, method: str) -> Case:
    return case if method == "forward" else replace(case, module=_Method(case.module, method))


def _add_children(
    node: ModelDiagnoseOutput,
    module: nn.Module,
    prefix: str,
    method_names: Mapping[nn.Module, str],
    visible: set[nn.Module],
) -> None:
    """Add the modules directly inside one; lists and dicts of modules are looked through."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if isinstance(child, _CONTAINERS):
            _add_children(node, child, f"{full}.", method_names, visible)
        elif child in visible:
            made = ModelDiagnoseOutput(node, full, child, node.level + 1, method_names.get(child, "forward"))
            node.children.append(made)
            _add_children(made, child, "", method_names, visible)


def _add_call(node: ModelDiagnoseOutput, recorded: RecordedCall) -> None:
    inputs, results = recorded.inputs(), {name: held.tensor for name, held in recorded.results.items()}
    if not recorded.whole:
        return
    node.inputs.append(recorded.arguments.rebuilt(inputs.__getitem__))
    result = recorded.result.rebuilt(results.__getitem__)  # type: ignore[arg-type]
    node.outputs.append(result if isinstance(result, tuple) and not hasattr(result, "_fields") else (result,))


def _moving_axes(shapes: Sequence[tuple[int, ...]]) -> dict[int, Any]:
    columns = enumerate(zip(*shapes, strict=True))
    return {axis: Dim.DYNAMIC for axis, sizes in columns if len(set(sizes)) > 1 or set(sizes) == {0}}


__all__ = ["ModelDiagnoseOutput", "build_tree"]
