"""Which part of a model does not export, or exports and is wrong: recorded, tried piece by piece, told with file and line.

The names below are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generic_export.diagnose.attempt.worker import Limits
    from generic_export.diagnose.record.axes import infer_axes
    from generic_export.diagnose.record.observe import observe, record
    from generic_export.diagnose.record.recording import ObservationError, Recording
    from generic_export.diagnose.record.state import (
        StateAdapter,
        UnknownStateError,
        register_state_adapter,
        state_adapters,
    )
    from generic_export.diagnose.records import (
        Axis,
        AxisReport,
        Call,
        Culprit,
        Diagnosis,
        DiagnosisError,
        ErrorRecord,
        Leaf,
        LeafKind,
        Metrics,
        Outcome,
        Piece,
        Stage,
        Verdict,
    )
    from generic_export.diagnose.report.terminal import diagnosis_text
    from generic_export.diagnose.search import Progress, diagnose

# module -> what of it this package hands on
_HANDED_ON = {
    "attempt.worker": ("Limits",),
    "record.axes": ("infer_axes",),
    "record.observe": ("observe", "record"),
    "record.recording": ("ObservationError", "Recording"),
    "record.state": ("StateAdapter", "UnknownStateError", "register_state_adapter", "state_adapters"),
    "records": (
        "Axis",
        "AxisReport",
        "Call",
        "Culprit",
        "Diagnosis",
        "DiagnosisError",
        "ErrorRecord",
        "Leaf",
        "LeafKind",
        "Metrics",
        "Outcome",
        "Piece",
        "Stage",
        "Verdict",
    ),
    "report.terminal": ("diagnosis_text",),
    "search": ("Progress", "diagnose"),
}
_HOMES = {name: module for module, names in _HANDED_ON.items() for name in names}

__all__ = [
    "Axis",
    "AxisReport",
    "Call",
    "Culprit",
    "Diagnosis",
    "DiagnosisError",
    "ErrorRecord",
    "Leaf",
    "LeafKind",
    "Limits",
    "Metrics",
    "ObservationError",
    "Outcome",
    "Piece",
    "Progress",
    "Recording",
    "Stage",
    "StateAdapter",
    "UnknownStateError",
    "Verdict",
    "diagnose",
    "diagnosis_text",
    "infer_axes",
    "observe",
    "record",
    "register_state_adapter",
    "state_adapters",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'generic_export.diagnose' has no attribute {name!r}")
