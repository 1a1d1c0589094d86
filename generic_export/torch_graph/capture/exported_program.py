"""One question to `torch.export`: a module and its call in, a program out, with what was decided of sizes on the way.

While a model is captured, questions about sizes come up: which code asks, and what is answered in PyTorch's place, is here too.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.export import Dim, ExportedProgram

from generic_export.compat import (
    CAPTURE_LOGGERS,
    COMPARING_STRIDES,
    captured_for_any_size,
    cut_sizes_seen,
    is_over_values,
    slice_ends_decided,
    without_printed_graphs,
)
from generic_export.logs import logging_at
from generic_export.torch_graph.capture.known_buffers import forward_decided_by, small_buffers
from generic_export.torch_graph.decompose import pieces
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import AutoSize, AxisSymbol, DynamicAxes, DynamicSize, symbol_name
from generic_export.torch_graph.sizes.multiples import DivisibleAxes, counted_dim
from generic_export.torch_graph.sizes.proofs import Branch
from generic_export.torch_graph.source_lines import PACKAGE, NotesSources, running_source

DynamicShapes = tuple[dict[int, Any], ...]
"""The dynamic axes of each input tensor, as torch.export takes them."""

_NOT_ASKING = ("torch/__init__.py", "torch/fx/experimental/")
_OF_LAYOUTS = frozenset({"as_strided", "contiguous", "flatten", "is_contiguous", "reshape", "unflatten", "view"})
"""Operators that compare strides with `==` in C++, and sizes in other ways (`InferSize.h`)."""
_TORCH = str(Path(torch.__file__).parent)
_OPERATORS = f"{_TORCH}/_ops.py"

_VALUE_READERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


@dataclass(frozen=True)
class CapturedProgram:
    """A program, what was decided of sizes beside PyTorch's guards, and the assumptions under which it is right."""

    program: ExportedProgram
    decided: tuple[Branch, ...] = ()
    branches: tuple[Branch, ...] = ()


def capture_program(module: nn.Module, call: FlatCall, shapes: DynamicShapes) -> CapturedProgram:
    """Capture; where the model needs cuts to be inside of its tables of positions, so that they are."""
    # An interpreted script tells of the branches that it takes, which it knows only when PyTorch has answered.
    try:
        return capture_once(module, call, shapes, told=not _is_interpreted(module))
    except TableEndsError:
        return capture_once(module, call, shapes, within_tables=True)


def capture_once(
    module: nn.Module, call: FlatCall, shapes: DynamicShapes, *, within_tables: bool = False, told: bool = False
) -> CapturedProgram:
    """Capture once; see `sizes_decided` for the switches."""
    with sizes_decided(within_tables=within_tables, told=told) as decided:
        program = _export_with_buffers(module, call, shapes)
    return CapturedProgram(program, tuple(decided))


def _export_with_buffers(module: nn.Module, call: FlatCall, dynamic_shapes: DynamicShapes) -> ExportedProgram:
    """Ask torch.export; once more with the values of small buffers, where values decide."""
    values = small_buffers(module)
    try:
        program = _export(module, call, dynamic_shapes)
        if not values or not _reads_values(program):
            return program
    except Exception as error:
        if not values or not is_over_values(error):
            raise
    with forward_decided_by(module, values):
        return _export(module, call, dynamic_shapes)


def _export(module: nn.Module, call: FlatCall, dynamic_shapes: DynamicShapes) -> ExportedProgram:
    # Interpreted scripts note their own source lines; other modules' are in the stack of Python.
    noted = fx_traceback.preserve_node_meta(_is_interpreted(module))
    quiet = logging_at(logging.CRITICAL, *CAPTURE_LOGGERS)  # the error that is raised carries what they would say
    with torch.no_grad(), noted, quiet, without_printed_graphs(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own pytree code
        warnings.filterwarnings("ignore", ".*_flat_weights")  # and of what its own LSTM and GRU assign
        return torch.export.export(
            module,
            _apart(call.tensors),
            dynamic_shapes=(dynamic_shapes,),
            strict=False,
        )


def _is_interpreted(module: nn.Module) -> bool:
    return any(isinstance(each, NotesSources) for each in module.modules())


def dynamic_shapes(dynamic_axes: DynamicAxes, call: FlatCall, names: Sequence[str]) -> DynamicShapes:
    """Return the dynamic axes of each input tensor, as torch.export takes them.

    An axis of `Dim.AUTO` with one position is static, as in PyTorch: most are broadcast, and may be nothing else.
    """
    given: dict[str, Any] = {}
    for symbol in (symbol for name in names for symbol in dynamic_axes.get(name, {}).values()):
        if not isinstance(symbol, str) or symbol not in given:
            given[symbol_name(symbol)] = symbol
    dims = {name: _dim(name, symbol) for name, symbol in given.items()}
    divisible = DivisibleAxes.of(dynamic_axes)
    moved = [divisible.moved(name, dynamic_axes.get(name, {})) for name in names]  # as PyTorch has them
    return tuple(
        {
            axis: dims[symbol_name(symbol)]
            for axis, symbol in axes.items()
            if tensor.shape[axis] > 1 or not isinstance(symbol, AutoSize)
        }
        for tensor, axes in zip(call.tensors, moved, strict=True)
    )


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


class TableEndsError(Exception):
    """A cut of a table is as long as it would be inside of the table; never seen outside a capture."""


@contextmanager
def sizes_decided(*, within_tables: bool, told: bool) -> Iterator[list[Branch]]:
    """Note what is decided of sizes beside PyTorch's own guards while the block captures.

    Args:
        within_tables: take cuts of axes of a fixed size (`table[: past + new]`) for cuts inside of them.
        told: raise `TableEndsError` where the model needs that.
    """
    decided: list[Branch] = []
    cut_tables: list[Any] = []

    def within(size: Any, index: Any) -> bool:
        if isinstance(size, torch.SymInt):
            return False
        if not within_tables:
            cut_tables.append(size)
            return False
        return bool(index <= size)

    def note_cut() -> None:
        if cut_tables and told:
            raise TableEndsError

    ends = slice_ends_decided(
        lambda condition: decided.append(Branch(condition, running_source((PACKAGE,)), is_certain=True)), within
    )
    oblivious = captured_for_any_size(_asked_by_kernels, _asked_for_a_layout, [pieces.__file__])
    with oblivious, ends, cut_sizes_seen(note_cut):
        yield decided


def _asked_by_kernels() -> bool:
    """Say whether the question comes from PyTorch's own shape code in Python, not from a model or a layer of torch.nn."""
    frame: FrameType | None = sys._getframe(2)  # of who answers
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_ASKING):
        frame = frame.f_back
    path = frame.f_code.co_filename if frame is not None else ""
    return path.startswith(_TORCH) and not path.startswith(f"{_TORCH}/nn/")


def _asked_for_a_layout(in_kernel: bool) -> bool:
    """Say whether strides are compared, which no value depends on."""
    frame: FrameType | None = sys._getframe(2)  # of who answers
    while frame is not None:
        if frame.f_code.co_name in COMPARING_STRIDES and frame.f_code.co_filename.startswith(_TORCH):
            return True
        if frame.f_code.co_name == "__call__" and frame.f_code.co_filename == _OPERATORS:
            return in_kernel and getattr(frame.f_locals["self"], "__name__", "").partition(".")[0] in _OF_LAYOUTS
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            return in_kernel and getattr(frame.f_locals["func"], "__name__", "") in _OF_LAYOUTS
        frame = frame.f_back
    return False


__all__ = ["CapturedProgram", "capture_once", "capture_program", "dynamic_shapes", "sizes_decided"]
