"""The tree of a model's modules, each with what it received and returned, and the exports tried on it.

In: a recording. Out: `ModelDiagnoseOutput`, a view that follows `named_modules()`; the work is done by the rest of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.debug.piece_by_piece.exporters import ExportRequest, exporter_named
from generic_export.debug.piece_by_piece.module_node import ModuleNode
from generic_export.debug.piece_by_piece.narration import Narration
from generic_export.debug.piece_by_piece.node_text import Looks, export_report, recorded_text
from generic_export.debug.piece_by_piece.opaque import OpaqueModule, learnt_maker
from generic_export.debug.piece_by_piece.shapes import (
    ShapeFunction,
    ShapeFunctions,
    Shapes,
    moving_arguments,
    moving_axes,
)
from generic_export.debug.piece_by_piece.status import CustomOpStrategy, StatusExport, StatusExportCode, Strategies
from generic_export.debug.piece_by_piece.watching import watch_of, watching, with_method
from generic_export.debug.record.axes import Symbols, infer_axes
from generic_export.debug.record.leaves import call_layout, take_apart
from generic_export.debug.record.pieces import Case, cases_of, with_children
from generic_export.debug.record.recording import RecordedCall, Recording
from generic_export.errors import CaptureError, OptionError
from generic_export.torch_graph.state import state_kept

Maker = Callable[..., torch.Tensor]
"""Input tensors in; a tensor of the shape and element type of an output out."""


class ModelDiagnoseOutput(ModuleNode):
    """A module in the tree of a traced model. Iterating yields it and all modules below it, parents first.

    Args:
        parent: node of the enclosing module; None for the root.
        name: name within the parent, such as `layers.0` or `self_attn`.
        model: the module.
        level: depth in the tree, 0 for the root.
        method_name: name of the traced method.

    Attributes:
        children: nodes of the direct submodules.
        inputs: `(args, kwargs)` of each call.
        outputs: the results of each call, as a tuple.
        forward_custom_op_schema: schema of the operator that last replaced the module, or None.
        exporter: name of the last exporter. Its result is the attribute of that name.
        exporter_status: status of the last export, or None.
        statuses: last status of each exporter, by name.
        last_error: the error of the last export, or None.
    """

    def __init__(
        self,
        parent: ModelDiagnoseOutput | None,
        name: str,
        model: nn.Module,
        level: int = 0,
        method_name: str = "forward",
    ) -> None:
        super().__init__(name, model, level, method_name)
        self.parent = parent
        self.children: list[ModelDiagnoseOutput] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[tuple[Any, ...]] = []
        self.forward_custom_op_schema: str | None = None
        self.exporter: str | None = None
        self.exporter_status: StatusExport | None = None
        self.statuses: dict[str, StatusExport] = {}
        self.last_error: str | None = None
        self._recording: Recording | None = None
        self._calls: list[RecordedCall] = []
        self._cases: list[Case] = []
        self._opaque: OpaqueModule | None = None

    def __iter__(self) -> Iterator[ModelDiagnoseOutput]:
        yield self
        for child in self.children:
            yield from child

    def __repr__(self) -> str:
        return f"ModelDiagnoseOutput({self.full_name}, {len(self.children)} children, {len(self.inputs)} calls)"

    # --- what it was called with ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter or buffer, or of its first input if it has none."""
        own = next(iter((*self.model.parameters(), *self.model.buffers())), None)
        given = own if own is not None else next(iter(_tensors(self.inputs)), None)
        return torch.device("cpu") if given is None else given.device

    @property
    def forward_need_serialization(self) -> bool:
        """Whether any argument of any call is not a plain tensor."""
        return any(
            not isinstance(value, torch.Tensor) for args, kwargs in self.inputs for value in (*args, *kwargs.values())
        )

    # --- a tree made by hand ---------------------------------------------------------------------------

    def add_child(self, diag: ModelDiagnoseOutput) -> None:
        """Add the node of a submodule.

        Args:
            diag: node to add.

        Raises:
            OptionError: `diag` is not a `ModelDiagnoseOutput`, or already has another parent.
        """
        if not isinstance(diag, ModelDiagnoseOutput):
            raise OptionError(f"add_child was given a {type(diag).__name__}.", "Give a ModelDiagnoseOutput.")
        if diag.parent not in (None, self):
            raise OptionError(f"{diag.full_name} is a child of {diag.parent.full_name} already.")
        diag.parent = self
        self.children.append(diag)

    def add_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call with a copy of its arguments. The module runs on them when the results are first needed.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
        """
        layout = call_layout(self.forward, args, kwargs)
        copies = {name: tensor.detach().clone() for name, tensor in layout.tensors.items()}
        self.inputs.append(layout.rebuilt(copies.__getitem__))

    def _fill(self, recording: Recording, cases: Sequence[Case]) -> None:
        """Take over the calls of this module out of a recording."""
        own = [case for case in cases if case.module is self.model]
        self._recording = recording
        self._cases = [with_method(case, self.method_name) for case in own]
        self._calls = sorted((r for case in own for r in case.calls), key=lambda recorded: recorded.call.index)
        self.inputs, self.outputs = [], []
        for recorded in self._calls:
            if recorded.whole:
                inputs, results = recorded.inputs(), {name: held.tensor for name, held in recorded.results.items()}
                self.inputs.append(recorded.arguments.rebuilt(inputs.__getitem__))
                result = recorded.result.rebuilt(results.__getitem__)  # type: ignore[arg-type]
                plain = isinstance(result, tuple) and not hasattr(result, "_fields")
                self.outputs.append(result if plain else (result,))

    def _run_what_was_added(self) -> None:
        """Run the module on the calls that were added by hand, once."""
        if len(self.inputs) <= len(self._calls):
            return
        watch = watch_of(self.model, {type(self.model): self.method_name})
        run = self.model if self.method_name == "forward" else self.forward
        with watching(watch), evaluation_mode(self.model), state_kept(self.model), torch.no_grad():
            for args, kwargs in self.inputs:
                run(*args, **kwargs)
        fill([self, *(inner for inner in self if not inner.inputs)], watch.recording)

    # --- shapes ---------------------------------------------------------------------------------------

    def guess_dynamic_shape_object(self, *objs: Any, msg: Callable[[], str] | None = None) -> Any:
        """Return the dynamic axes of one argument, compared over all calls.

        Args:
            objs: the argument in each call: tensors, constants, or nested containers of them.
            msg: returns a description of the argument for error messages.

        Returns:
            The structure of the argument. Tensors become `{axis: Dim.DYNAMIC}` with the axes that differ between calls or have
            size 0 in every call. Other values become None.

        Raises:
            OptionError: `objs` is empty.
            CaptureError: calls disagree in type, rank, length or keys.
        """
        if not objs:
            raise OptionError("guess_dynamic_shape_object was given nothing.", "Give one value per call.")
        return moving_axes(objs, msg() if msg is not None else self.full_name)

    def guess_dynamic_shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the dynamic axes of the positional and of the keyword arguments.

        Raises:
            CaptureError: there is no call, or the calls have different arguments.
        """
        return moving_arguments(self.inputs, self.guess_dynamic_shape_object, self.full_name)

    def build_shape_mapping_indices(
        self, shape_functions: ShapeFunctions | None = None, verbose: int = 0
    ) -> list[tuple[int | tuple[int, ...], torch.dtype, Maker | None]]:
        """Determine for each output tensor which inputs its shape depends on.

        Args:
            shape_functions: `{class or operator name: function}`, for shapes that cannot be inferred; see `ShapeFunction`.
            verbose: 1 prints the inferred mapping.

        Returns:
            For each output: the index of an input with the same shape and dtype, or the indices of the inputs that its sizes
            come from (all of them if a shape function is used); its dtype; and a function that makes a tensor of that shape from
            the inputs, or None.

        Raises:
            CaptureError: a size depends on no input, and no shape function is given.
        """
        narration, opaque = Narration.of(verbose), self._opaque_module(shape_functions)
        found: list[tuple[int | tuple[int, ...], torch.dtype, Maker | None]] = []
        for maker in opaque.makers:
            if maker.given is not None:
                found.append((tuple(range(len(opaque.calls[0].held))), maker.dtype, maker))
            else:
                found.append((maker.shape.sources, maker.dtype, maker if maker.shape.like is None else None))
            where = f"{self.full_name}: output {maker.index}"
            narration.say(1, f"[build_shape_mapping_indices] {where} follows from input {found[-1][0]}", self)
        return found

    def _given_shape_function(self, shape_functions: ShapeFunctions | None) -> ShapeFunction | None:
        names = (self.true_model_name, self.custom_op_name)
        return next((shape_functions[name] for name in names if shape_functions and name in shape_functions), None)

    def determine_shape_fct(
        self,
        output_index: int,
        flattened_inputs: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] | Sequence[Sequence[torch.Tensor]],
        flattened_outputs: Sequence[Sequence[torch.Tensor]],
        verbose: int = 0,
        shape_functions: ShapeFunctions | None = None,
    ) -> Maker:
        """Return a function that makes a tensor with the shape of an output from the input tensors.

        Args:
            output_index: index of the output.
            flattened_inputs: of each call the positional and keyword arguments, or only the tensors.
            flattened_outputs: output tensors of each call.
            verbose: 1 prints what was inferred.
            shape_functions: `{class or operator name: function}`; see `ShapeFunction`.

        Raises:
            CaptureError: a size depends on no input and no shape function returns it, or the calls have different tensors.
            OptionError: the numbers of inputs and outputs differ, or there is no output with this index.
        """
        if not flattened_inputs or len(flattened_inputs) != len(flattened_outputs):
            raise OptionError(f"{len(flattened_inputs)} calls of inputs, {len(flattened_outputs)} of outputs.")
        if not all(0 <= output_index < len(tensors) for tensors in flattened_outputs):
            raise OptionError(f"there is no output {output_index}.", f"A call has {len(flattened_outputs[0])}.")
        calls = [list(_tensors(call)) for call in flattened_inputs]
        dtypes = [tensor.dtype for tensor in calls[0]]
        learnt = Shapes([[tuple(t.shape) for t in call] for call in calls], dtypes, self.full_name)
        outputs = [tensors[output_index] for tensors in flattened_outputs]
        shapes, given = [tuple(tensor.shape) for tensor in outputs], self._given_shape_function(shape_functions)
        maker = learnt_maker(learnt, output_index, shapes, outputs[0].dtype, self.full_name, given)
        if given is None:
            text = f"{self.full_name}: output {output_index} follows from input {maker.shape.sources}"
            Narration.of(verbose).say(1, f"[determine_shape_fct] {text}", self)
        return maker

    # --- opaque operators -----------------------------------------------------------------------------

    def _opaque_module(self, shape_functions: ShapeFunctions | None) -> OpaqueModule:
        self._run_what_was_added()
        if not self._calls:
            raise CaptureError(f"{self.full_name} was not called: nothing is known of its shapes.")
        given = self._given_shape_function(shape_functions)
        return OpaqueModule(self.custom_op_name, self._calls, given, self.method_name)

    def put_custom_op_inplace(self, shape_functions: ShapeFunctions | None = None, verbose: int = 0) -> None:
        """Replace the module by the operator `diag_lib::<custom_op_name>`, which runs it. Undo with `remove_custom_op_inplace`.

        Args:
            shape_functions: `{class or operator name: function}`; see `ShapeFunction`.
            verbose: 1 prints the name of the operator.

        Raises:
            CaptureError: the module was not called, or the shape of an output cannot be inferred.
            OptionError: the module is already replaced.
        """
        if self._opaque is not None:
            raise OptionError(f"{self.full_name} is a custom operator already.")
        opaque = self._opaque_module(shape_functions)
        opaque.put()
        self._opaque, self.forward_custom_op_schema = opaque, opaque.schema
        Narration.of(verbose).say(1, f"[put_custom_op_inplace] {self.full_name} is {opaque.schema}", self)

    def remove_custom_op_inplace(self, verbose: int = 0) -> None:
        """Put the original module back. Does nothing if it was not replaced.

        Args:
            verbose: 1 prints the name of the module.
        """
        if self._opaque is not None:
            self._opaque.remove()
            self._opaque = None
            Narration.of(verbose).say(1, f"[remove_custom_op_inplace] {self.full_name} is itself again", self)

    # --- exports --------------------------------------------------------------------------------------

    def try_export(
        self,
        exporter: str = "fx",
        exporter_kwargs: Mapping[str, Any] | None = None,
        verbose: int = 0,
        quiet: bool = True,
        discrepancies: bool = True,
        use_dynamic_shapes: bool | None = None,
        replace_by_custom_op: bool
        | CustomOpStrategy
        | Mapping[type | str, CustomOpStrategy]
        | int
        | str = CustomOpStrategy.NONE,
        atol: float = 1e-2,
        rtol: float = 1e-1,
        shape_functions: ShapeFunctions | None = None,
    ) -> StatusExport:
        """Export the module and, depending on the strategy, its submodules.

        Args:
            exporter: `fx`, `nnef`, `onnx_dynamo`, `torch_script`, or `to_onnx`, which is `onnx_dynamo`.
            exporter_kwargs: further options of the exporter; they override the defaults set here.
            verbose: 1 prints each attempt and its result, 2 also the reasons of failures.
            quiet: report an error as a status; False raises it.
            discrepancies: also run the exported program on every recorded call and compare the outputs.
            use_dynamic_shapes: keep axes that vary symbolic. None: if there are at least two calls. False: export the first call.
            replace_by_custom_op: a `CustomOpStrategy`, or a dict of them; see `Strategies`.
            atol: absolute tolerance of the comparison.
            rtol: relative tolerance of the comparison.
            shape_functions: for modules whose output shapes cannot be inferred; see `ShapeFunction`.

        Raises:
            OptionError: the exporter or the strategy does not exist.
            MissingExtraError: a package that the exporter needs is not installed.
            CaptureError: the export failed and `quiet` is False.
        """
        keywords = dict(exporter_kwargs or {})
        exporter_named(exporter, keywords)
        strategies = Strategies.of(replace_by_custom_op)
        strategies.check(self)
        if strategies.at(self) is CustomOpStrategy.ALWAYS and exporter != "fx":
            raise OptionError(
                f"ALWAYS makes the module one operator that {exporter!r} cannot hold.", "Use exporter='fx', or LOCAL."
            )
        request = ExportRequest(keywords, discrepancies, use_dynamic_shapes, atol=atol, rtol=rtol)
        narration = Narration.of(verbose)
        return self._try(_Trial(exporter, request, strategies, shape_functions or {}, narration, quiet=quiet))

    def _try(self, trial: _Trial) -> StatusExport:
        trial.narration.say(1, f"[try_export] {self.dot_name}: {self.true_model_name} by {trial.exporter}", self)
        status = self._export_here(trial)
        self.exporter, self.exporter_status = trial.exporter, status
        self.statuses[trial.exporter] = status
        self.last_error = None if status.is_ok() else status.reason
        setattr(self, trial.exporter, status.exported)
        trial.narration.tell(self, status)
        not_called = StatusExportCode.NOINPUT in status.status
        if not (trial.quiet and not trial.narration.watches(self)) and not status.is_ok() and not not_called:
            first = status.reason.splitlines()[0]
            raise CaptureError(f"{self.full_name}: {status.step}: {first}") from status.error
        plain = trial.strategies.at(self) is CustomOpStrategy.NONE and StatusExportCode.CHILDC not in status.status
        if not (plain and status.is_ok()):
            for child in self.children:
                if trial.exporter == "fx" or trial.strategies.at(child) is not CustomOpStrategy.ALWAYS:
                    child._try(trial)
        return status

    def _export_here(self, trial: _Trial) -> StatusExport:
        self._run_what_was_added()
        if not self._cases:
            return StatusExport(StatusExportCode.FAIL_NOINPUT, "EXPORT", "no input set reaches this module")
        if trial.request.dynamic is None:
            trial = replace(trial, request=replace(trial.request, dynamic=len(self._calls) > 1))
        strategy = trial.strategies.at(self)
        if strategy is CustomOpStrategy.ALWAYS:
            return self._export_as_custom_op(trial)
        left_out = self.children if strategy is CustomOpStrategy.LOCAL else list(self._always_inside(trial))
        status = self._export_cases(trial, left_out)
        if strategy is CustomOpStrategy.ONLY_IF_FAILING and not status.is_ok() and self.children:
            status = self._export_cases(trial, self.children)
        return status

    def _always_inside(self, trial: _Trial) -> Iterator[ModelDiagnoseOutput]:
        """Yield the outermost modules inside this one that are operators whatever is exported."""
        for child in self.children:
            if trial.strategies.at(child) is CustomOpStrategy.ALWAYS:
                yield child
            else:
                yield from child._always_inside(trial)

    def _export_cases(self, trial: _Trial, left_out: Sequence[ModelDiagnoseOutput]) -> StatusExport:
        """Export every variant of the call; the first that fails is the answer."""
        request = replace(trial.request, isolated=bool(left_out))
        run = exporter_named(trial.exporter, request.keywords)
        status = StatusExport(StatusExportCode.NONE)
        with ExitStack() as stack:
            for inner in left_out if trial.exporter != "nnef" else ():
                if inner._calls and inner._opaque is None:
                    try:
                        inner.put_custom_op_inplace(trial.shape_functions)
                    except CaptureError as error:
                        return StatusExport(StatusExportCode.FAIL_CHILDC, "EXPORT", str(error), error=error)
                    stack.callback(inner.remove_custom_op_inplace)
            cases = self._cases
            if self._recording is not None and left_out:
                cases = [with_children(case, self._recording, {inner.model for inner in left_out}) for case in cases]
            for case in cases:
                status = run(case, request)
                if not status.is_ok():
                    return status
        return status

    def _export_as_custom_op(self, trial: _Trial) -> StatusExport:
        """Export the module as one operator: says that its shapes are known, and little else."""
        try:
            self.put_custom_op_inplace(trial.shape_functions)
        except CaptureError as error:
            return StatusExport(StatusExportCode.FAIL_CUSTOM, "EXPORT", str(error), error=error)
        try:
            status = self._export_cases(trial, ())
        finally:
            self.remove_custom_op_inplace()
        return replace(status, status=status.status | StatusExportCode.CUSTOM)

    # --- reports --------------------------------------------------------------------------------------

    def get_export_report(self, exported_program: bool = False, fx: bool = False) -> str:
        """Return one line per module with its name, class and status.

        Args:
            exported_program: add the captured `ExportedProgram`.
            fx: add the `torch.fx` graph.
        """
        return export_report(self, exported_program=exported_program, fx=fx)

    def pretty_text(
        self,
        with_dynamic_shape: bool = False,
        with_shape: bool = True,
        with_min_max: bool = True,
        with_device: bool = True,
        with_inputs: bool = True,
    ) -> str:
        """Return the tree of modules as text, with the arguments of each call.

        Args:
            with_dynamic_shape: show the dynamic axes.
            with_shape: show shapes and dtypes.
            with_min_max: show the smallest and largest value of each tensor.
            with_device: show devices.
            with_inputs: show the arguments.
        """
        looks = Looks(shape=with_shape, min_max=with_min_max, device=with_device)
        return recorded_text(self, looks, dynamic=with_dynamic_shape, inputs=with_inputs)


@dataclass(frozen=True)
class _Trial:
    """What a tree is tried with; see `try_export`."""

    exporter: str
    request: ExportRequest
    strategies: Strategies
    shape_functions: ShapeFunctions
    narration: Narration
    quiet: bool


def fill(nodes: Iterable[ModelDiagnoseOutput], recording: Recording) -> None:
    """Give modules the calls that were recorded of them."""
    symbols, _ = infer_axes(recording) if recording.calls else (Symbols(), None)
    cases = cases_of(recording, symbols, every_member=True)
    for node in nodes:
        node._fill(recording, cases)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nest, in order."""
    yield from take_apart([("", value)], keep_states=False)[1].named_tensors().values()


__all__ = ["ModelDiagnoseOutput", "fill"]
