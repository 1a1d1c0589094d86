"""torch.export front end: an `nn.Module` and example arguments in, a `TorchModuleIRGraph` out.

Runs on fake tensors with symbolic sizes, so meta modules work and no weight is read. Results bear provisional names here
(`%linear_3.0`); `naming.name_results` gives them those that people read.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.export import Dim, ExportedProgram

from generic_export.compat import (
    CAPTURE_LOGGERS,
    JitGraph,
    OpOverload,
    is_over_sizes,
    is_over_values,
    oblivious_to_sizes,
    without_printed_graphs,
)
from generic_export.errors import CaptureError, NotCapturableError, OptionError, SpecializedAxisError, T2NError
from generic_export.logs import logging_at
from generic_export.torch_graph.branches import Branch, OneWay
from generic_export.torch_graph.conversion import Conversion, check_symbolic, symbol_names
from generic_export.torch_graph.declared_axes import check_names, check_outputs, check_ranks
from generic_export.torch_graph.decomposition import decomposed, functional
from generic_export.torch_graph.early_bounds import (
    SizesBoundedError,
    SizesMixedError,
    told_of_bounds,
)
from generic_export.torch_graph.freezes import Freezes, recorded_freezes, with_whole_sizes
from generic_export.torch_graph.guard_bounds import Bounds, joined_bounds, suggested_bounds
from generic_export.torch_graph.guards import freezing_guards, unproved_equalities
from generic_export.torch_graph.ir import SizeCondition, TorchModuleIRGraph
from generic_export.torch_graph.jit_trace import checked_trace, graph_of, trace_of
from generic_export.torch_graph.known_buffers import forward_decided_by, small_buffers
from generic_export.torch_graph.methods import as_forward
from generic_export.torch_graph.multiples import Folds, assumed, counted, counted_dim, divided_in
from generic_export.torch_graph.naming import NotesSources, user_source
from generic_export.torch_graph.nested import FlatCall, flat_forward
from generic_export.torch_graph.other_sizes import repeated
from generic_export.torch_graph.patches import capture_patches
from generic_export.torch_graph.request import (
    AxisSymbol,
    CaptureRequest,
    DynamicAxes,
    DynamicSize,
    declared_sizes,
    symbol_name,
)
from generic_export.torch_graph.size_conditions import (
    agrees,
    minima,
    needed_conditions,
    questions_of_one,
    slices_decided,
)
from generic_export.torch_graph.state import buffers_kept
from generic_export.torch_graph.units import kept_whole


@dataclass(frozen=True)
class _Strategy:
    """One way of asking torch.export about symbolic sizes.

    Oblivious of the example's sizes, PyTorch keeps the shapes of cuts as `Min` and `Max`, and what it assumes of sizes is what the
    model itself asks for. By default it answers `T <= 8?` from the example and reasons as if a size were at least 2, then lets it
    be 0 or 1 too, unless its reasoning needed the difference; then it refuses, although the graph itself may hold everywhere.

    Attributes:
        oblivious: reason about any size from the start.
        lenient: accept what the reasoning about memory layout needed, for symbols that one axis alone has.
        bounded_below: accept the smallest size that PyTorch asks for (4 for `x[:, :4]`): the graph then holds from there on.
    """

    oblivious: bool = False
    lenient: bool = False
    bounded_below: bool = False

    @property
    def of_any_size(self) -> bool:
        """Whether it is the first one, which neither reasons from the example nor accepts more than PyTorch proves."""
        return self.oblivious and not self.lenient


_STRATEGIES = (
    _Strategy(oblivious=True),
    _Strategy(),
    _Strategy(oblivious=True, lenient=True),
    _Strategy(lenient=True),
    _Strategy(bounded_below=True),
)


_MOST_EARLY_BOUNDS = 4  # beginnings of a capture: one for each table, and one for sums of sizes


@dataclass(frozen=True, init=False)
class TorchModuleTracer(CaptureRequest):
    """Captures a module with `torch.export`, as it was asked for; `traced_module` is what `torch.jit.trace` makes of it.

    Args:
        module, args, kwargs, input_names, output_names, dynamic_axes, strip_prefix, keep, whole, conditional: see
            `CaptureRequest`.
        traced_module: a trace of the module that there is already; None traces it when `traced_module` is read.
        fn_name: the method that is captured; other ones than `forward` become the forward of `self.module`.

    Attributes:
        mod: the module as it was given.

    Raises:
        OptionError: there is no such method, or the trace is none.
    """

    mod: nn.Module = field(init=False, repr=False)
    fn_name: str = field(init=False)

    def __init__(
        self,
        module: nn.Module,
        traced_module: torch.jit.ScriptModule | None = None,
        fn_name: str = "forward",
        args: tuple[Any, ...] | torch.Tensor | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        strip_prefix: str = "",
        keep: Callable[[OpOverload], bool] | None = None,
        whole: Collection[type[nn.Module]] = (),
        conditional: bool = False,
    ) -> None:
        super().__init__(
            module=as_forward(module, fn_name),
            args=(args,) if isinstance(args, torch.Tensor) else tuple(args or ()),
            kwargs=dict(kwargs or {}),
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes or {},
            strip_prefix=strip_prefix,
            keep=keep,
            whole=whole,
            conditional=conditional,
        )
        vars(self).update(mod=module, fn_name=fn_name)
        if traced_module is not None:
            vars(self)["traced_module"] = checked_trace(traced_module, fn_name)

    @cached_property
    def traced_module(self) -> torch.jit.ScriptModule:
        """The module as `torch.jit.trace` sees it on the example arguments; traced once, when it is first read.

        Raises:
            JitTraceError: it cannot be traced.
        """
        return trace_of(self.mod, self.fn_name, self.args, self.kwargs)

    @property
    def torch_graph(self) -> JitGraph:
        """PyTorch's own graph of that trace: of `fn_name`, which need not be the forward.

        Raises:
            JitTraceError: it cannot be traced.
        """
        return graph_of(self.traced_module, self.fn_name)

    def trace(self) -> TorchModuleIRGraph:
        """Run torch.export and convert its graph.

        Raises:
            CaptureError: torch.export failed; the message carries its reason and the user's source line.
            SpecializedAxisError: a dynamic axis was frozen to one size by the model.
            OptionError: `input_names` or `dynamic_axes` do not match the arguments.
        """
        return with_whole_sizes(self._traced)

    def _traced(self, freezes: Freezes) -> TorchModuleIRGraph:
        call, names = self._call()
        whole = kept_whole(self.module, self.whole)
        with capture_patches(), whole, flat_forward(self.module, call) as result_names, recorded_freezes(freezes):
            with questions_of_one() as asked, slices_decided() as decided:
                program = self._export(call, names, freezes.lines)
            conditions = self._declared()
            if self.conditional:
                conditions += self._conditions(program, call, names, asked, decided)
            program = functional(program)
            if self.keep is not None:
                program = decomposed(program, self.keep)
        outputs = self.output_names if self.output_names is not None else tuple(result_names)
        named = replace(self, input_names=names, output_names=outputs)
        check_symbolic(named, program, freezes.lines)
        converted = Conversion(named, program, minima(conditions))
        declarations = assumed(program, converted.symbols)
        graph = replace(converted.graph(), conditions=conditions, declarations=declarations)
        check_outputs(self.dynamic_axes, names, dict(zip(graph.output_names, graph.outputs, strict=True)))
        return graph

    def program(self) -> ExportedProgram:
        """Run torch.export alone; nothing is decomposed (`keep`) or converted.

        Raises:
            CaptureError, SpecializedAxisError, OptionError: as for `trace`.
        """
        return with_whole_sizes(self._program)

    def _program(self, freezes: Freezes) -> ExportedProgram:
        call, names = self._call()
        whole = kept_whole(self.module, self.whole)
        with capture_patches(), whole, flat_forward(self.module, call), recorded_freezes(freezes), slices_decided():
            return functional(self._export(call, names, freezes.lines))

    def _call(self) -> tuple[FlatCall, tuple[str, ...]]:
        """Return the example as it is captured, and the names of its tensors."""
        call = FlatCall.of(self.module, self.args, self.kwargs)
        names = self._checked_names(call)
        return Folds.of(self.dynamic_axes).call(call, names), names

    def _checked_names(self, call: FlatCall) -> tuple[str, ...]:
        names = call.names if self.input_names is None else tuple(self.input_names)
        if len(names) != len(call.tensors):
            raise OptionError(
                f"{len(call.tensors)} input tensors but {len(names)} input names ({', '.join(names)}).",
                f"The tensors are: {', '.join(call.names)}.",
            )
        check_names(self.dynamic_axes, names, self.output_names)
        check_ranks(self.dynamic_axes, names, [tensor.shape for tensor in call.tensors])
        return names

    def _export(self, call: FlatCall, names: Sequence[str], freezes: Sequence[str]) -> ExportedProgram:
        """Try the strategies in order; when none captures the module the first error over sizes is told, or the first one."""
        program, errors = self._tried(call, names)
        if program is not None:
            return program
        if not errors:
            raise CaptureError(f"{type(self.module).__name__}: torch.export was not tried.")
        error = next(filter(is_over_sizes, errors), errors[0])
        said = [str(each).strip() for each in errors]
        told = Folds.of(self.dynamic_axes).told(str(error).strip(), names)
        refusal = _capture_error(self.module, error, told, freezes)
        refusal.declarations = divided_in("\n".join(said), self._moved_axes(names))
        raise refusal from error

    def _tried(self, call: FlatCall, names: Sequence[str]) -> tuple[ExportedProgram | None, list[Exception]]:
        """Return what the first strategy that works captures, and the errors of those before it."""
        errors: list[Exception] = []
        suggested: dict[str, dict[str, int]] = {}
        # An interpreted script tells of the branches that it takes, which it knows only when PyTorch has answered.
        attempts, early = list(_STRATEGIES), 0 if self._is_interpreted() else _MOST_EARLY_BOUNDS
        axes = self._moved_axes(names)
        while attempts:
            strategy = attempts.pop(0)
            bounds = _accepted(suggested, strategy)
            try:
                shapes = self._dynamic_shapes(names, strategy, bounds)
                told = told_of_bounds(axes, of_sums=strategy.of_any_size)
                with told if early and not strategy.lenient else nullcontext():
                    program = self._export_once(call, shapes, strategy)
                if strategy.of_any_size and unproved_equalities(program):
                    continue  # of sizes that another strategy bounds, or captures as multiples
                if not strategy.lenient:
                    return program, errors
                if not freezing_guards(program):
                    whole = replace(call, names=tuple(names))
                    return self._whichever_way(program, whole, shapes, strategy), errors
            except SizesBoundedError as found:
                suggested = joined_bounds(suggested, found.bounds)
                early = early - 1 if _accepted(suggested, strategy) != bounds else 0
                attempts.insert(0, strategy)
            except SizesMixedError:
                continue
            except T2NError:
                raise
            except Exception as error:  # torch.export raises many unrelated classes, none of them documented
                errors.append(error)
                if is_over_values(error) or not (strategy.of_any_size or _is_over_sizes(error)):
                    break  # another strategy would do no better
                # A table of 512 positions bounds the length: that is no reason to refuse, it becomes an assertion.
                suggested = joined_bounds(suggested, suggested_bounds(str(error)))
                if _accepted(suggested, strategy) != bounds:
                    attempts.insert(0, strategy)
                elif strategy.of_any_size and is_over_sizes(error):
                    attempts = [each for each in attempts if each != _Strategy()]  # it assumes more of sizes
        return None, errors

    def _moved_axes(self, names: Sequence[str]) -> list[dict[int, AxisSymbol]]:
        """Return the dynamic axes of each input, where PyTorch has them."""
        folds = Folds.of(self.dynamic_axes)
        return [folds.moved(name, self.dynamic_axes.get(name, {})) for name in names]

    def _is_interpreted(self) -> bool:
        return any(isinstance(module, NotesSources) for module in self.module.modules())

    def _declared(self) -> tuple[SizeCondition, ...]:
        """Return what the user said of sizes, which the engine is to hold inputs to."""
        sizes = declared_sizes(self.dynamic_axes).values()
        return tuple(
            SizeCondition(relation, relation, "", stated=True) for size in sizes for relation in size.relations
        )

    def _conditions(
        self,
        program: ExportedProgram,
        call: FlatCall,
        names: Sequence[str],
        asked: Sequence[Branch],
        decided: Sequence[Branch],
    ) -> tuple[SizeCondition, ...]:
        """Return what sizes must be for a program to say what the module says.

        Raises:
            SpecializedAxisError: tract has no words for one of them.
        """
        symbols = symbol_names(replace(self, input_names=names), program)
        with buffers_kept(self.module):
            found = needed_conditions(program, self._flat, call.tensors, asked, symbols, decided)
        for condition in found:
            if condition.relation is None:
                raise _one_way(self.module, condition.source, condition.text)
        return found

    def _flat(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the module, while its forward takes flat tensors."""
        return self.module(*tensors)

    def _whichever_way(
        self, program: ExportedProgram, call: FlatCall, shapes: tuple[dict[int, Any], ...], strategy: _Strategy
    ) -> ExportedProgram:
        """Return a program that is right on either side of the conditions on sizes that the model's code asks for.

        What fills sizes up to a multiple is taken for all of them with a warning where that cannot be seen.

        Raises:
            SpecializedAxisError: neither the example's side nor the other one is right for both.
        """
        found = OneWay.of(program)
        if not found.branches:
            return program
        elsewhere = found.shapes_of_another_way([tensor.shape for tensor in call.tensors])
        tensors = tuple(map(repeated, call.tensors, elsewhere))
        try:
            other = OneWay.of(self._export_once(replace(call, tensors=tensors), shapes, strategy))
        except Exception:  # whatever the model says to sizes that it does not take: there is no other side
            return program
        for one, another in ((found, other), (other, found)):
            if one.stands_for(another):
                return one.program
        filling = next((way for way in (found, other) if way.fills_up), None)
        if self.conditional:  # which sizes are right is found out by running it
            places = (call.tensors, tensors)
            everywhere = filling is not None and all(agrees(filling.program, self._flat, place) for place in places)
            return filling.program if filling is not None and everywhere else program
        if filling is not None:  # a whole block where nothing is missing, hidden by a mask (Pegasus-X)
            warnings.warn(
                f"{type(self.module).__name__} at {filling.branches[0].source}: sizes that are no multiple are filled up. "
                "The archive does so with whole ones too, which is right where what is filled in is masked: compare such a size.",
                stacklevel=2,
            )
            return filling.program
        branch = found.branches[0]
        condition = branch.condition.xreplace(symbol_names(replace(self, input_names=call.names), program))
        raise _one_way(self.module, branch.source, str(condition))

    def _export_once(
        self, call: FlatCall, dynamic_shapes: tuple[dict[int, Any], ...], strategy: _Strategy
    ) -> ExportedProgram:
        """Ask torch.export; once more with the values of small buffers, where values decide."""
        values = small_buffers(self.module)
        try:
            program = self._asked(call, dynamic_shapes, strategy)
            if not values or not _reads_values(program):
                return program
        except Exception as error:
            if not values or not is_over_values(error):
                raise
        with forward_decided_by(self.module, values):
            return self._asked(call, dynamic_shapes, strategy)

    def _asked(
        self, call: FlatCall, dynamic_shapes: tuple[dict[int, Any], ...], strategy: _Strategy
    ) -> ExportedProgram:
        oblivious = oblivious_to_sizes(strategy.oblivious)
        # Interpreted scripts note their own source lines; other modules' are in the stack of Python.
        noted = fx_traceback.preserve_node_meta(self._is_interpreted())
        quiet = logging_at(logging.CRITICAL, *CAPTURE_LOGGERS)  # the error that is raised carries what they would say
        with torch.no_grad(), oblivious, noted, quiet, without_printed_graphs(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own pytree code
            warnings.filterwarnings("ignore", ".*_flat_weights")  # and of what its own LSTM and GRU assign
            return torch.export.export(
                self.module,
                _apart(call.tensors),
                dynamic_shapes=(dynamic_shapes,),
                strict=False,
            )

    def _dynamic_shapes(self, names: Sequence[str], strategy: _Strategy, bounds: Bounds) -> tuple[dict[int, Any], ...]:
        """Return the dynamic axes of each input tensor, as torch.export takes them."""
        symbols = [symbol for name in names for symbol in self.dynamic_axes.get(name, {}).values()]
        given = {symbol_name(symbol): symbol for symbol in symbols if not isinstance(symbol, str)}
        uses = Counter(map(symbol_name, symbols))
        dims = {
            name: _dim(name, given.get(name), bounds, lenient=strategy.lenient and count == 1)
            for name, count in uses.items()
        }
        return tuple(
            {axis: dims[symbol_name(symbol)] for axis, symbol in moved.items()} for moved in self._moved_axes(names)
        )


def _one_way(module: nn.Module, source: str, condition: str) -> SpecializedAxisError:
    where = f" at {source}" if source else ""
    return SpecializedAxisError(
        f"{type(module).__name__}{where}: the model goes one way where {condition} and another one "
        "elsewhere, and an archive of what was captured would hold for one of them only.",
        "Make the axis static, or change that line so that one way is right for both.",
    )


_VALUE_READERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


def _reads_values(program: ExportedProgram) -> bool:
    """Say whether a program makes a number of a tensor while it runs."""
    return any(node.target in _VALUE_READERS for node in program.graph.nodes)


def _dim(name: str, given: Dim | DynamicSize | None, bounds: Bounds, *, lenient: bool) -> Any:
    """Return a symbol as torch.export takes it: as it was given, within its bounds where PyTorch may add its own."""
    if isinstance(given, DynamicSize):
        return counted_dim(given, bounds.get(counted(given), {}), lenient=lenient)
    if given is None:
        return Dim.DYNAMIC if lenient else Dim(name, **bounds.get(name, {}))
    return Dim.DYNAMIC(min=_number(given.min), max=_number(given.max)) if lenient else given


def _is_over_sizes(error: Exception) -> bool:
    return is_over_sizes(error) or isinstance(error, AssertionError)


def _number(bound: Any) -> int | None:
    """Return a bound that is a number; None for infinity."""
    return bound if isinstance(bound, int) else None


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, no two of them one object: torch.export would take `attention(x, x, x)` for one input."""
    first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    return tuple(
        tensor if first[id(tensor)] == index else tensor.view_as(tensor) for index, tensor in enumerate(tensors)
    )


def _accepted(suggested: Bounds, strategy: _Strategy) -> dict[str, dict[str, int]]:
    """Return those of the suggested bounds that a strategy takes: upper ones always, and that there is something at all."""
    chosen = {
        symbol: {
            key: bound
            for key, bound in bounds.items()
            if key == "max" or strategy.bounded_below or (strategy.of_any_size and bound == 1)
        }
        for symbol, bounds in suggested.items()
    }
    return {symbol: bounds for symbol, bounds in chosen.items() if bounds}


_FROZEN = re.compile(r"(was inferred to be a constant|specialized|[Nn]ot all values of .* satisfy)[^\n]*")


def _capture_error(module: nn.Module, error: Exception, text: str, freezes: Sequence[str]) -> CaptureError:
    """Turn whatever torch.export raised, and said, into one error that keeps its first lines and the user's line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    specialised = None if is_over_values(error) else _FROZEN.search(text)
    noted = getattr(error, "t2n_source", "")
    source = noted or user_source(text) or (freezes[0] if specialised and freezes else "")
    where = f" at {source}" if source else ""
    name = type(module).__name__
    if specialised:
        detail = next((line for line in lines if specialised.group(1) in line), specialised.group(0))
        return SpecializedAxisError(
            f"{name}{where}: a dynamic axis is frozen to one size by the model: {detail}",
            "Make the axis static, or change the line that depends on its value.",
        )
    return NotCapturableError(
        f"{name}{where}: torch.export cannot capture the module: {type(error).__name__}: {reason}",
        "Change that line so that it does not depend on values or on one size; the cause carries PyTorch's full account.",
    )


def torch_version() -> str:
    """Return the version of PyTorch that captures, without its local build tag."""
    return str(torch.__version__).split("+")[0]


__all__ = ["TorchModuleTracer", "torch_version"]
