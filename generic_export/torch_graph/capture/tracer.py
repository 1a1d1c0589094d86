"""torch.export front end: an `nn.Module` and example arguments in, a `TorchModuleIRGraph` out.

Runs on fake tensors with symbolic sizes, so meta modules work and no weight is read. Results bear provisional names here
(`%linear_3.0`); `naming.name_results` gives them those that people read.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from generic_export.compat import JitGraph, OpOverload, guards_noted, shape_guards
from generic_export.errors import JitTraceError, OptionError, T2NError, described
from generic_export.torch_graph.capture.branches import shapes_with
from generic_export.torch_graph.capture.causes import capture_error, refused
from generic_export.torch_graph.capture.conversion import Conversion, check_symbolic, symbol_names
from generic_export.torch_graph.capture.exported_program import (
    CapturedProgram,
    capture_program,
    dynamic_shapes,
    sizes_decided,
)
from generic_export.torch_graph.capture.leaf_modules import kept_whole
from generic_export.torch_graph.capture.quantised_modules import takes_quantised
from generic_export.torch_graph.capture.size_conditions import assumed_branches, example_sizes, right_elsewhere
from generic_export.torch_graph.capture.whole_sizes import Specializations, record_specializations, with_whole_sizes
from generic_export.torch_graph.decompose.decomposition import decomposed, functional
from generic_export.torch_graph.decompose.masked_writes import without_masked_writes
from generic_export.torch_graph.decompose.patches import capture_patches
from generic_export.torch_graph.decompose.strided import with_known_strides
from generic_export.torch_graph.dims import Dim as TracedDim
from generic_export.torch_graph.dims import dim_symbol
from generic_export.torch_graph.ir import SizeCondition, TorchModuleIRGraph
from generic_export.torch_graph.methods import as_forward
from generic_export.torch_graph.nested import FlatCall, flat_forward, resize_example
from generic_export.torch_graph.request import CaptureRequest, DynamicAxes, auto_symbols, declared_sizes
from generic_export.torch_graph.sizes.declared_axes import check_names, check_outputs, check_ranks
from generic_export.torch_graph.sizes.fixed_axes import join_changes, settled, with_sizes
from generic_export.torch_graph.sizes.guards import least_size, without_weaker
from generic_export.torch_graph.sizes.multiples import DivisibleAxes, assumed
from generic_export.torch_graph.sizes.proofs import Branch
from generic_export.torch_graph.state import buffers_kept


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

    def _traced(self, specializations: Specializations) -> TorchModuleIRGraph:
        call, names = self._call()
        outputs: list[str] = []
        with self._capturing(call, specializations) as result_names:
            found = self._captured(call, names, specializations.lines)
            program, later = self._rewritten(found.program, names, specializations.lines)
            outputs += result_names
        named = replace(self, input_names=names, output_names=self.output_names or tuple(outputs))
        held, changed = self._conditions(found.program, (*found.branches, *later), call, names, specializations.lines)
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

    def _program(self, specializations: Specializations) -> ExportedProgram:
        call, names = self._call()
        with self._capturing(call, specializations):
            found = self._captured(call, names, specializations.lines)
            self._conditions(found.program, found.branches, call, names, specializations.lines)
            return functional(found.program)

    def _rewritten(
        self, program: ExportedProgram, names: Sequence[str], specializations: Sequence[str]
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
                raise capture_error(self.module, error, specializations) from error
        return written, assumed_branches(self, CapturedProgram(written, tuple(decided)), names, after=known)

    @contextmanager
    def _capturing(self, call: FlatCall, specializations: Specializations) -> Iterator[Sequence[str]]:
        """Yield the names of the results, in a block in which the module is one that PyTorch captures well."""
        whole = kept_whole(self.module, self.whole)
        with (
            capture_patches(),
            whole,
            flat_forward(self.module, call) as result_names,
            record_specializations(specializations),
        ):
            yield result_names

    def _call(self) -> tuple[FlatCall, tuple[str, ...]]:
        """Return the example as it is captured, and the names of its tensors."""
        call = FlatCall.of(self.module, self.args, self.kwargs)
        names = self._checked_names(call)
        return DivisibleAxes.of(self.dynamic_axes).call(call, names), names

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

    def _captured(self, call: FlatCall, names: Sequence[str], specializations: Sequence[str]) -> CapturedProgram:
        """Return what torch.export captures, and what is assumed of sizes that it is what the module does."""
        shapes = dynamic_shapes(self.dynamic_axes, call, names)
        try:
            found = capture_program(self.module, call, shapes)
        except T2NError:
            raise
        except Exception as error:  # torch.export raises many unrelated classes, none of them documented
            raise capture_error(self.module, error, specializations) from error
        check_symbolic(replace(self, input_names=names), found.program, specializations)
        named = replace(call, names=tuple(names))
        found, branches = right_elsewhere(self, found, assumed_branches(self, found, names), named, shapes)
        return replace(found, branches=tuple(branches))

    def _conditions(
        self,
        program: ExportedProgram,
        branches: Sequence[Branch],
        call: FlatCall,
        names: Sequence[str],
        specializations: Sequence[str],
    ) -> tuple[tuple[SizeCondition, ...], dict[str, TracedDim]]:
        """Return the conditions on sizes under which a program is what the module does, and what symbols become for them.

        Raises:
            SpecializedAxisError: tract has no words for one of them, and it is about an axis that was declared by name.
        """
        if not branches:
            return (), {}
        auto = auto_symbols(self.dynamic_axes)
        example = example_sizes(self, program, branches[0], call)
        symbols = symbol_names(replace(self, input_names=names), program)
        conditions: list[SizeCondition] = []
        changed: dict[str, TracedDim] = {}
        for branch in branches:
            held, sizes = settled(branch, example, symbols, auto)
            conditions += held
            join_changes(changed, sizes)
        for condition in conditions:
            if condition.relation is None:
                refusal = refused(self.module, condition, next(iter(specializations), ""))
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
        args, kwargs = call.arguments(list(map(resize_example, call.tensors, shapes)))
        with buffers_kept(self.module), torch.no_grad():
            try:
                self.module(*args, **kwargs)
            except Exception:  # a module may raise anything
                return True
        return False

    def _declared(self) -> tuple[SizeCondition, ...]:
        """Return what the user said of sizes, which the engine is to hold inputs to."""
        sizes = declared_sizes(self.dynamic_axes).values()
        return tuple(
            SizeCondition(relation, relation, "", stated=True) for size in sizes for relation in size.relations
        )


_MOST_OPERATORS_CHECKED = 256
"""Sizes that the module refuses itself are refused by tract in graphs of so many operators.

Inception-v3, which has 314, is loaded in a quarter of the time without that.
"""


def torch_version() -> str:
    """Return the version of PyTorch that captures, without its local build tag."""
    return str(torch.__version__).split("+")[0]


# The `torch.jit.trace` graph of a module's method, for comparison with the captured graph.
# In: a module, a method and its arguments. Out: a traced module, and the graph of that method in it.
def trace_of(
    module: nn.Module, fn_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.jit.ScriptModule:
    """Trace a method of a module; a module that is a script already is given back.

    Raises:
        JitTraceError: torch.jit.trace refuses the module, or the module refuses the arguments.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module
    what = f"{type(module).__name__}.{fn_name}"
    try:
        given = _positional(getattr(module, fn_name), _as_taken(module, args), kwargs)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of what Python decides: torch.export is asked for what is exported
            traced: torch.jit.ScriptModule = torch.jit.trace_module(module, {fn_name: given}, check_trace=False)
    except Exception as error:  # RuntimeError of the tracer, and whatever the user's code raises
        raise JitTraceError(
            f"{what}: torch.jit.trace failed: {described(error)}",
            "Use arguments that the method accepts (args=), and results that are tensors or nested tensors.",
        ) from error
    return traced


def graph_of(traced: torch.jit.ScriptModule, fn_name: str) -> JitGraph:
    """Return PyTorch's graph of one method of a traced module."""
    graph: JitGraph = getattr(traced, fn_name).graph
    return graph


def checked_trace(traced: torch.jit.ScriptModule, fn_name: str) -> torch.jit.ScriptModule:
    """Return a traced module that has such a method.

    Raises:
        OptionError: it is no traced module, or has no such method.
    """
    if not isinstance(traced, torch.jit.ScriptModule):
        raise OptionError(
            f"traced_module is a {type(traced).__name__}, not what torch.jit.trace returns.",
            "Arguments go in args=, and a module that is not traced needs no traced_module.",
        )
    if not hasattr(traced, fn_name):
        raise OptionError(
            f"the traced module has no method {fn_name!r}.",
            "Trace it with torch.jit.trace_module, which takes methods.",
        )
    return traced


def _as_taken(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return floats as the quantised tensors that an int8 module takes, on the grid of their own range."""
    if not takes_quantised(module):
        return args
    return tuple(
        torch.quantize_per_tensor_dynamic(value, torch.quint8, reduce_range=False)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_quantized
        else value
        for value in args
    )


def _positional(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call by position: torch.jit.trace takes them by position, or all by name."""
    if not kwargs:
        return args
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{', '.join(bound.kwargs)} must be passed by name")
    return bound.args


__all__ = ["TorchModuleTracer", "torch_version"]
