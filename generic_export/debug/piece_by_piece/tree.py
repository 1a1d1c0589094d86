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
    """A module in the tree of a traced model; iterating gives it and everything below it, parents first.

    Args:
        parent: None for the root.
        name: within the parent: `layers.0`, `self_attn`.
        model: the module.
        level: depth in the tree.
        method_name: the method that was traced.

    Attributes:
        children: the modules directly inside.
        inputs: `(args, kwargs)` of each call.
        outputs: what each call returned, as a tuple.
        forward_custom_op_schema: of the operator that it was last replaced by, or None.
        exporter: the last exporter that was tried; what it made is an attribute of that name.
        exporter_status: the last status, or None.
        statuses: the last status of each exporter.
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
        """Where its first parameter or buffer is, or else its first input."""
        own = next(iter((*self.model.parameters(), *self.model.buffers())), None)
        given = own if own is not None else next(iter(_tensors(self.inputs)), None)
        return torch.device("cpu") if given is None else given.device

    @property
    def forward_need_serialization(self) -> bool:
        """Whether some argument of some call is no plain tensor."""
        return any(
            not isinstance(value, torch.Tensor) for args, kwargs in self.inputs for value in (*args, *kwargs.values())
        )

    # --- a tree made by hand ---------------------------------------------------------------------------

    def add_child(self, diag: ModelDiagnoseOutput) -> None:
        """Add a module inside this one.

        Raises:
            OptionError: it is no such tree, or stands in another one.
        """
        if not isinstance(diag, ModelDiagnoseOutput):
            raise OptionError(f"add_child was given a {type(diag).__name__}.", "Give a ModelDiagnoseOutput.")
        if diag.parent not in (None, self):
            raise OptionError(f"{diag.full_name} is a child of {diag.parent.full_name} already.")
        diag.parent = self
        self.children.append(diag)

    def add_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add a call, of which a copy is kept; the module is run on it when its results are first needed."""
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
        """Return the dynamic axes of one value, seen once per call, in the nest of the value.

        Args:
            objs: the value in each call: tensors, constants, or nests of them.
            msg: what to say of the place in an error.

        Returns:
            None for what is no tensor; `{axis: Dim.DYNAMIC}` for each axis that varies, or is 0 in every call.

        Raises:
            OptionError: there is no value.
            CaptureError: the value has another type, rank, length or keys in some call.
        """
        if not objs:
            raise OptionError("guess_dynamic_shape_object was given nothing.", "Give one value per call.")
        return moving_axes(objs, msg() if msg is not None else self.full_name)

    def guess_dynamic_shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the dynamic axes of the positional and of the keyword arguments.

        Raises:
            CaptureError: there is no call, or the calls have other arguments.
        """
        return moving_arguments(self.inputs, self.guess_dynamic_shape_object, self.full_name)

    def build_shape_mapping_indices(
        self, shape_functions: ShapeFunctions | None = None, verbose: int = 0
    ) -> list[tuple[int | tuple[int, ...], torch.dtype, Maker | None]]:
        """Say for each output tensor which inputs its shape follows from.

        Returns:
            Per output: the number of an input of the same shape and element type, or the numbers of those that its sizes
            come from (of all, where a function was given); its element type; and None, or a function that makes a tensor of
            that shape from the inputs.

        Raises:
            CaptureError: a size follows from no input, and no shape function is given.
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
        """Return a function that makes a tensor shaped like an output from input tensors.

        Args:
            output_index: which output.
            flattened_inputs: of each call positionals and keywords, or the tensors alone.
            flattened_outputs: the tensors of each call.
            verbose: 1 says what was learnt.
            shape_functions: `{class or operator name: function}`; see `ShapeFunction`.

        Raises:
            CaptureError: a size follows from no input (where a function is given: once that gives None), or calls have other
                tensors.
            OptionError: inputs and outputs are not of the same calls, or there is no such output.
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
        """Replace the module by the operator `diag_lib::<custom_op_name>`, which runs it, until it is removed.

        Raises:
            CaptureError: the module was not called, or the shape of an output follows from no input.
            OptionError: it is replaced already.
        """
        if self._opaque is not None:
            raise OptionError(f"{self.full_name} is a custom operator already.")
        opaque = self._opaque_module(shape_functions)
        opaque.put()
        self._opaque, self.forward_custom_op_schema = opaque, opaque.schema
        Narration.of(verbose).say(1, f"[put_custom_op_inplace] {self.full_name} is {opaque.schema}", self)

    def remove_custom_op_inplace(self, verbose: int = 0) -> None:
        """Put the module back; does nothing when it is there."""
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
        """Export the module, and what is below it as the strategy asks.

        Args:
            exporter: `fx`, `nnef`, `onnx_dynamo`, `torch_script`, or `to_onnx`, which is `onnx_dynamo`.
            exporter_kwargs: options of the exporter, laid over those that are set here.
            verbose: 1 says what is tried and what comes of it, 2 also why it failed.
            quiet: an error is a status; False raises it.
            discrepancies: also run what was exported, on every recorded call, and compare.
            use_dynamic_shapes: keep moving axes symbolic; None: when there are two calls or more; False: export the first call.
            replace_by_custom_op: see `CustomOpStrategy`, and `Strategies` for a dict.
            atol, rtol: limits of a comparison.
            shape_functions: for modules whose shapes cannot be learnt.

        Raises:
            OptionError, MissingExtraError: the exporter or the strategy does not exist, or a package is missing.
            CaptureError: `quiet` is False and the export failed.
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
