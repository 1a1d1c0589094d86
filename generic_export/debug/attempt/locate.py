"""Where an error comes from: the line of the model's code, the captured operator.

In: an exception of any room. Out: `file.py:line`, or the operator of a captured graph that the error is about.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from generic_export.debug.privacy import redacted
from generic_export.debug.records import ErrorRecord
from generic_export.errors import T2NError
from generic_export.torch_graph.ir import TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.source_lines import PACKAGE, raised_source
from generic_export.translate.registry import is_translated

_PLACE = re.compile(r"[\w.-]+\.py:\d+")


# Where a capture passes through this package on its way to the model: no line of the model.
_OWN_FILES = ("piece_module.py:", "graph_inputs.py:", "leaves.py:")


@dataclass
class LocatedError(Exception):
    """An error that ends an attempt, with the operator that it comes from where that is known.

    Attributes:
        error: what was raised.
        operator: of PyTorch.
        module_path: of the module that calls the operator, inside the piece; None where it is not known.
        source: `file.py:line` in the model.
        unsupported: the operators of the graph that have no translation.
    """

    error: BaseException
    operator: str = ""
    module_path: str | None = None
    source: str = ""
    unsupported: tuple[str, ...] = ()


def model_line(source: str) -> str:
    """Return a recorded line, or "" when it is one of this package's own."""
    return "" if source.startswith(_OWN_FILES) else source


def source_in(error: BaseException) -> str:
    """Return the line of the model's code that an error names, or was raised in; "" when there is none."""
    if isinstance(error, T2NError):
        named = next((line for line in _PLACE.findall(error.message) if model_line(line)), "")
        if named:
            return named
    seen: BaseException | None = error
    while seen is not None:
        found = raised_source(seen, (PACKAGE,))
        if found:
            return found
        seen = seen.__cause__ or seen.__context__
    return ""


def untranslated(graph: TorchModuleIRGraph) -> tuple[str, ...]:
    """Return the operators of a captured graph that have no translation, each with its line in the model."""
    missing = [op for op in graph.ops if not is_translated(op.target)]
    return tuple(dict.fromkeys(f"{op.target}{f' ({op.source})' if op.source else ''}" for op in missing))


def operator_in(error: T2NError, graph: TorchModuleIRGraph) -> TorchOp | None:
    """Return the captured operator that a translation failed at: the first whose name, module and line the error tells."""
    candidates = [op for op in graph.ops if error.message.startswith(str(op.target))]
    placed = [op for op in candidates if not op.source or op.source in error.message]
    inside = [op for op in placed if not op.module_path or op.module_path in error.message]
    return next(iter(inside or placed or candidates), None)


def error_record(error: BaseException) -> ErrorRecord:
    """Return an exception as plain data, without machine paths."""
    detail = redacted("".join(traceback.format_exception(error)))
    if isinstance(error, T2NError):
        return ErrorRecord(type(error).__name__, redacted(error.message), redacted(error.hint or ""), detail)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ErrorRecord(type(error).__name__, redacted(first), "", detail)


__all__ = ["LocatedError", "error_record", "model_line", "operator_in", "source_in", "untranslated"]
