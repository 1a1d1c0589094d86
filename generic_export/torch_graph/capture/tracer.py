"""torch.export front end: an `nn.Module` and example arguments in, a `TorchModuleIRGraph` out.

Runs on fake tensors with symbolic sizes, so meta modules work and no weight is read. Results bear provisional names here
(`%linear_3.0`); `naming.name_results` gives them those that people read.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    guards_noted,
    is_over_values,
    shape_guards,
    without_printed_graphs,
)
from generic_export.errors import OptionError, T2NError
from generic_export.logs import logging_at
from generic_export.torch_graph.capture.branches import OneWay, shapes_with, symbols_at
from generic_export.torch_graph.capture.conversion import Conversion, check_symbolic, symbol_names
from generic_export.torch_graph.capture.freezes import Freezes, recorded_freezes, with_whole_sizes
from generic_export.torch_graph.capture.interpretation import agrees
from generic_export.torch_graph.capture.jit_trace import checked_trace, graph_of, trace_of
from generic_export.torch_graph.capture.known_buffers import forward_decided_by, small_buffers
from generic_export.torch_graph.capture.refusals import capture_error, refused
from generic_export.torch_graph.capture.size_questions import TableEndsError, sizes_decided
from generic_export.torch_graph.capture.units import kept_whole
from generic_export.torch_graph.decompose.decomposition import decomposed, functional
from generic_export.torch_graph.decompose.masked_writes import without_masked_writes
from generic_export.torch_graph.decompose.patches import capture_patches
from generic_export.torch_graph.decompose.strided import with_known_strides
from generic_export.torch_graph.dims import Dim as TracedDim
from generic_export.torch_graph.dims import dim_symbol
from generic_export.torch_graph.ir import SizeCondition, TorchModuleIRGraph
from generic_export.torch_graph.methods import as_forward
from generic_export.torch_graph.naming import NotesSources
from generic_export.torch_graph.nested import FlatCall, flat_forward
from generic_export.torch_graph.request import (
    AutoSize,
    AxisSymbol,
    CaptureRequest,
    DynamicAxes,
    DynamicSize,
    auto_symbols,
    declared_sizes,
    symbol_name,
)
from generic_export.torch_graph.sizes.branch import Branch, Sizes
from generic_export.torch_graph.sizes.declared_axes import check_names, check_outputs, check_ranks
from generic_export.torch_graph.sizes.fixed_axes import join_changes, settled, with_sizes
from generic_export.torch_graph.sizes.guards import (
    assumptions,
    holds_for_many,
    is_largest_size,
    least_size,
    without_weaker,
)
from generic_export.torch_graph.sizes.multiples import Folds, assumed, counted_dim
from generic_export.torch_graph.sizes.other_sizes import repeated
from generic_export.torch_graph.state import buffers_kept


@dataclass(frozen=True)
class _Captured:
    """A program, what was decided of sizes beside PyTorch's guards, and the assumptions under which it is right."""

    program: ExportedProgram
    decided: tuple[Branch, ...] = ()
    branches: tuple[Branch, ...] = ()


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
        outputs: list[str] = []
        with self._capturing(call, freezes) as result_names:
            found = self._captured(call, names, freezes.lines)
            program, later = self._rewritten(found.program, names, freezes.lines)
            outputs += result_names
        named = replace(self, input_names=names, output_names=self.output_names or tuple(outputs))
        held, changed = self._conditions(found.program, (*found.branches, *later), call, names, freezes.lines)
        conditions = (*self._declared(), *self._with_required(held, found.program, call, names))
        converted = Conversion(named, program, conditions)
        declarations = assumed(program, converted.symbols)
        graph = replace(converted.graph(), conditions=conditions, declarations=declarations)
        graph = with_sizes(graph, changed)
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
        with self._capturing(call, freezes):
            found = self._captured(call, names, freezes.lines)
            self._conditions(found.program, found.branches, call, names, freezes.lines)
            return functional(found.program)

    def _rewritten(
        self, program: ExportedProgram, names: Sequence[str], freezes: Sequence[str]
    ) -> tuple[ExportedProgram, list[Branch]]:
        """Return a program of operators that can stay, and what the others' own code takes for granted of sizes."""
        known = len(shape_guards(program))
        with guards_noted(program), sizes_decided(within_tables=False, told=False) as decided:
            try:
                written = functional(program)
                without_masked_writes(written)
                with_known_strides(written)
                if self.keep is not None:
                    written = decomposed(written, self.keep)
            except T2NError:
                raise
            except Exception as error:  # PyTorch's decompositions raise as many classes as its capture
                raise capture_error(self.module, error, freezes) from error
        return written, self._assumed(_Captured(written, tuple(decided)), names, after=known)

    @contextmanager
    def _capturing(self, call: FlatCall, freezes: Freezes) -> Iterator[Sequence[str]]:
        """Yield the names of the results, in a block in which the module is one that PyTorch captures well."""
        whole = kept_whole(self.module, self.whole)
        with capture_patches(), whole, flat_forward(self.module, call) as result_names, recorded_freezes(freezes):
            yield result_names

    def _call(self) -> tuple[FlatCall, tuple[str, ...]]:
        """Return the example as it is captured, and the names of its tensors."""
        call = FlatCall.of(self.module, self.args, self.kwargs)
        names = self._checked_names(call)
        return Folds.of(self.dynamic_axes).call(call, names), names

    def _checked_names(self, call: FlatCall) -> tuple[str, ...]:
        names = call.names if self.input_names is None else tuple(self.input_names)
        if len(names) != len(call.tensors):
            raise OptionError(
                f"{len(call.tensors)} input tensors, but {len(names)} input names ({', '.join(names)}).",
                f"The tensors are: {', '.join(call.names)}.",
            )
        check_names(self.dynamic_axes, names, self.output_names)
        check_ranks(self.dynamic_axes, names, [tensor.shape for tensor in call.tensors])
        return names

    def _captured(self, call: FlatCall, names: Sequence[str], freezes: Sequence[str]) -> _Captured:
        """Return what torch.export captures, and what is assumed of sizes that it is what the module does."""
        shapes = self._dynamic_shapes(call, names)
        try:
            found = self._asked_first(call, shapes)
        except T2NError:
            raise
        except Exception as error:  # torch.export raises many unrelated classes, none of them documented
            raise capture_error(self.module, error, freezes) from error
        check_symbolic(replace(self, input_names=names), found.program, freezes)
        named = replace(call, names=tuple(names))
        found, branches = self._right_elsewhere(found, self._assumed(found, names), named, shapes)
        return replace(found, branches=tuple(branches))

    def _conditions(
        self,
        program: ExportedProgram,
        branches: Sequence[Branch],
        call: FlatCall,
        names: Sequence[str],
        freezes: Sequence[str],
    ) -> tuple[tuple[SizeCondition, ...], dict[str, TracedDim]]:
        """Return the conditions on sizes under which a program is what the module does, and what symbols become for them.

        Raises:
            SpecializedAxisError: tract has no words for one of them, and it is about an axis that was declared by name.
        """
        if not branches:
            return (), {}
        auto = auto_symbols(self.dynamic_axes)
        example = self._example_sizes(program, branches[0], call)
        symbols = symbol_names(replace(self, input_names=names), program)
        conditions: list[SizeCondition] = []
        changed: dict[str, TracedDim] = {}
        for branch in branches:
            held, sizes = settled(branch, example, symbols, auto)
            conditions += held
            join_changes(changed, sizes)
        for condition in conditions:
            if condition.relation is None:
                refusal = refused(self.module, condition, next(iter(freezes), ""))
                refusal.declarations = assumed(program, symbols)
                raise refusal
        return tuple(without_weaker(conditions)), changed

    def _with_required(
        self, conditions: Sequence[SizeCondition], program: ExportedProgram, call: FlatCall, names: Sequence[str]
    ) -> Iterator[SizeCondition]:
        """Yield conditions; in a large graph, a smallest size below which the module raises an error is required by itself."""
        if sum(node.op == "call_function" for node in program.graph.nodes) <= _MOST_OPERATORS_CHECKED:
            yield from conditions
            return
        example = [tensor.shape for tensor in call.tensors]
        symbols = symbol_names(replace(self, input_names=names), program)
        runs: bool | None = None  # whether the module has values to run with, once that is asked
        for condition in conditions:
            name, least = least_size(condition) or ("", 1)
            below = shapes_with(program, symbols, example, dim_symbol(name), least - 1) if least > 1 else None
            if below is not None and runs is None:
                runs = not self._raises(call, example)
            yield replace(condition, required=below is not None and bool(runs) and self._raises(call, below))

    def _raises(self, call: FlatCall, shapes: Sequence[Sequence[int]]) -> bool:
        """Say whether the module raises an error for inputs of these shapes."""
        args, kwargs = call.arguments(list(map(repeated, call.tensors, shapes)))
        with buffers_kept(self.module), torch.no_grad():
            try:
                self.module(*args, **kwargs)
            except Exception:  # a module may raise anything
                return True
        return False

    def _example_sizes(self, program: ExportedProgram, branch: Branch, call: FlatCall) -> Sizes:
        """Return the size of each symbol in the example.

        Raises:
            SpecializedAxisError: a symbol is not the size of an input's axis, so tract cannot check a condition on it.
        """
        sizes = symbols_at(program, [tensor.shape for tensor in call.tensors])
        if sizes is None:
            raise refused(self.module, SizeCondition(None, str(branch.condition), branch.source), "")
        return sizes

    def _assumed(self, found: _Captured, names: Sequence[str], after: int = 0) -> list[Branch]:
        """Return what is to hold, or to be shown to be right elsewhere: sizes of one are left to who checks the archive at them."""
        symbols = symbol_names(replace(self, input_names=names), found.program)
        branches = assumptions(found.program, symbols, found.decided, after)
        return branches if self.conditional else [branch for branch in branches if not holds_for_many(branch)]

    def _asked_first(self, call: FlatCall, shapes: tuple[dict[int, Any], ...]) -> _Captured:
        """Capture; where the model needs cuts to be inside of its tables of positions, so that they are."""
        # An interpreted script tells of the branches that it takes, which it knows only when PyTorch has answered.
        try:
            return self._asked_once(call, shapes, told=not self._is_interpreted())
        except TableEndsError:
            return self._asked_once(call, shapes, within_tables=True)

    def _asked_once(
        self, call: FlatCall, shapes: tuple[dict[int, Any], ...], *, within_tables: bool = False, told: bool = False
    ) -> _Captured:
        with sizes_decided(within_tables=within_tables, told=told) as decided:
            program = self._export_once(call, shapes)
        return _Captured(program, tuple(decided))

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

    def _flat(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the module, while its forward takes flat tensors."""
        return self.module(*tensors)

    def _right_elsewhere(
        self, found: _Captured, branches: Sequence[Branch], call: FlatCall, shapes: tuple[dict[int, Any], ...]
    ) -> tuple[_Captured, Sequence[Branch]]:
        """Return a program that is right on both sides of the conditions in the model's code, and the conditions left.

        A condition that fails at 1 alone is tried there. A program that fills sizes up to a multiple is tried at whole ones,
        or taken with a warning.

        Raises:
            SpecializedAxisError: there is none, and the archive would not be held to the condition (`conditional`).
        """
        named = replace(self, input_names=call.names)
        own = OneWay(found.program, tuple(filter(_is_of_model, branches)), symbol_names(named, found.program))
        at_one = [each for each in own.branches if holds_for_many(each)]
        right = [each for each in at_one if self._agrees_at_one(own, each, call)]
        branches = [each for each in branches if each not in right]
        own = replace(own, branches=tuple(each for each in own.branches if each not in right))
        if all(each in at_one or self._is_auto(own, each) for each in own.branches):
            return found, branches
        elsewhere_shapes = own.shapes_of_another_way([tensor.shape for tensor in call.tensors])
        if sum(map(math.prod, elsewhere_shapes)) > _MOST_VALUES_ELSEWHERE:  # a condition on memory: it stays one
            return found, branches
        tensors = tuple(map(repeated, call.tensors, elsewhere_shapes))
        try:
            elsewhere = self._asked_once(replace(call, tensors=tensors), shapes)
            other = OneWay.of(elsewhere.program, symbol_names(named, elsewhere.program))
        except Exception:  # the model does not accept these sizes: there is no other side
            return found, branches
        pairs = ((own, other, found), (other, own, elsewhere))
        chosen = next((captured for one, another, captured in pairs if one.stands_for(another)), None)
        if chosen is None:
            chosen = next((captured for way, _, captured in pairs if way.fills_up), None)
            if chosen is None or not self._fills_up_everywhere(
                chosen.program, own.branches[0], (call.tensors, tensors)
            ):
                if not self.conditional:
                    self._refuse_one_size(own, call)
                return found, branches
        left = self._assumed(chosen, call.names)
        return chosen, [branch for branch in left if not _is_of_model(branch)]

    def _is_auto(self, way: OneWay, branch: Branch) -> bool:
        """Say whether a condition is on axes of `Dim.AUTO` alone, which are captured once: tract holds them to the condition."""
        names = {str(way.names.get(symbol)) for symbol in branch.condition.free_symbols}
        return names <= auto_symbols(self.dynamic_axes)

    def _agrees_at_one(self, way: OneWay, branch: Branch, call: FlatCall) -> bool:
        """Say whether a program says what its module says at the one size at which a condition fails, by running both."""
        shapes = way.shapes_with_one(branch, [tensor.shape for tensor in call.tensors])
        return shapes is not None and self._agrees(way.program, tuple(map(repeated, call.tensors, shapes)))

    def _agrees(self, program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> bool:
        """Say whether a program and the module say the same, by running both."""
        with buffers_kept(self.module):
            return agrees(program, self._flat, tensors)

    def _refuse_one_size(self, way: OneWay, call: FlatCall) -> None:
        """Refuse a program that is right on one side of a condition on one size, other than up to a largest size.

        Raises:
            SpecializedAxisError: there is such a condition.
        """
        example = self._example_sizes(way.program, way.branches[0], call)
        for branch in way.branches:
            if len(branch.condition.free_symbols) == 1 and not is_largest_size(branch, example):
                text = str(branch.condition.xreplace(dict(way.names)))
                raise refused(self.module, SizeCondition(None, text, branch.source), "")

    def _fills_up_everywhere(
        self, program: ExportedProgram, branch: Branch, places: Sequence[Sequence[torch.Tensor]]
    ) -> bool:
        """Say whether a program that fills sizes up to a multiple is right for whole ones: by running it, or with a warning."""
        if self.conditional:
            return all(self._agrees(program, place) for place in places)
        # a whole block where nothing is missing, hidden by a mask (Pegasus-X)
        warnings.warn(
            f"{type(self.module).__name__} at {branch.source}: sizes that are not a multiple are padded. The "
            "archive pads multiples too, which is correct where the padding is masked: compare such a size.",
            stacklevel=2,
        )
        return True

    def _export_once(self, call: FlatCall, dynamic_shapes: tuple[dict[int, Any], ...]) -> ExportedProgram:
        """Ask torch.export; once more with the values of small buffers, where values decide."""
        values = small_buffers(self.module)
        try:
            program = self._asked(call, dynamic_shapes)
            if not values or not _reads_values(program):
                return program
        except Exception as error:
            if not values or not is_over_values(error):
                raise
        with forward_decided_by(self.module, values):
            return self._asked(call, dynamic_shapes)

    def _asked(self, call: FlatCall, dynamic_shapes: tuple[dict[int, Any], ...]) -> ExportedProgram:
        # Interpreted scripts note their own source lines; other modules' are in the stack of Python.
        noted = fx_traceback.preserve_node_meta(self._is_interpreted())
        quiet = logging_at(logging.CRITICAL, *CAPTURE_LOGGERS)  # the error that is raised carries what they would say
        with torch.no_grad(), noted, quiet, without_printed_graphs(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own pytree code
            warnings.filterwarnings("ignore", ".*_flat_weights")  # and of what its own LSTM and GRU assign
            return torch.export.export(
                self.module,
                _apart(call.tensors),
                dynamic_shapes=(dynamic_shapes,),
                strict=False,
            )

    def _dynamic_shapes(self, call: FlatCall, names: Sequence[str]) -> tuple[dict[int, Any], ...]:
        """Return the dynamic axes of each input tensor, as torch.export takes them.

        An axis of `Dim.AUTO` with one position is static, as in PyTorch: most are broadcast, and may be nothing else.
        """
        given: dict[str, Any] = {}
        for symbol in (symbol for name in names for symbol in self.dynamic_axes.get(name, {}).values()):
            if not isinstance(symbol, str) or symbol not in given:
                given[symbol_name(symbol)] = symbol
        dims = {name: _dim(name, symbol) for name, symbol in given.items()}
        return tuple(
            {
                axis: dims[symbol_name(symbol)]
                for axis, symbol in moved.items()
                if tensor.shape[axis] > 1 or not isinstance(symbol, AutoSize)
            }
            for tensor, moved in zip(call.tensors, self._moved_axes(names), strict=True)
        )


def _is_of_model(branch: Branch) -> bool:
    """Say whether a model's own code asked, and may have gone another way."""
    return bool(branch.source) and not branch.is_certain


_MOST_VALUES_ELSEWHERE = 1 << 24  # of inputs that are made to see whether another way is the same
_MOST_OPERATORS_CHECKED = 256
"""Sizes that the module refuses itself are refused by tract in graphs of so many operators.

Inception-v3, which has 314, is loaded in a quarter of the time without that.
"""

_VALUE_READERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


def _reads_values(program: ExportedProgram) -> bool:
    """Say whether a program makes a number of a tensor while it runs."""
    return any(node.target in _VALUE_READERS for node in program.graph.nodes)


def _dim(name: str, given: AxisSymbol) -> Any:
    """Return a symbol as torch.export takes it."""
    if isinstance(given, DynamicSize):
        return counted_dim(given)
    return Dim(name) if isinstance(given, str | AutoSize) else given


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, no two of them one object: torch.export would take `attention(x, x, x)` for one input."""
    first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    return tuple(
        tensor if first[id(tensor)] == index else tensor.view_as(tensor) for index, tensor in enumerate(tensors)
    )


def torch_version() -> str:
    """Return the version of PyTorch that captures, without its local build tag."""
    return str(torch.__version__).split("+")[0]


__all__ = ["TorchModuleTracer", "torch_version"]
