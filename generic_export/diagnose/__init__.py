"""Which part of a model does not export, or exports and is wrong: recorded, tried piece by piece, told with file and line.

The names below are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generic_export.diagnose.attempt.worker import Limits
    from generic_export.diagnose.record.axes import infer_axes
    from generic_export.diagnose.record.input_sets import record
    from generic_export.diagnose.record.recording import ObservationError, Recording, observe
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
    from generic_export.diagnose.search import Progress, diagnose

_HOMES = {
    "Axis": "generic_export.diagnose.records",
    "AxisReport": "generic_export.diagnose.records",
    "Call": "generic_export.diagnose.records",
    "Culprit": "generic_export.diagnose.records",
    "Diagnosis": "generic_export.diagnose.records",
    "DiagnosisError": "generic_export.diagnose.records",
    "ErrorRecord": "generic_export.diagnose.records",
    "Leaf": "generic_export.diagnose.records",
    "LeafKind": "generic_export.diagnose.records",
    "Limits": "generic_export.diagnose.attempt.worker",
    "Metrics": "generic_export.diagnose.records",
    "ObservationError": "generic_export.diagnose.record.recording",
    "Outcome": "generic_export.diagnose.records",
    "Piece": "generic_export.diagnose.records",
    "Progress": "generic_export.diagnose.search",
    "Recording": "generic_export.diagnose.record.recording",
    "Stage": "generic_export.diagnose.records",
    "StateAdapter": "generic_export.diagnose.record.state",
    "UnknownStateError": "generic_export.diagnose.record.state",
    "Verdict": "generic_export.diagnose.records",
    "diagnose": "generic_export.diagnose.search",
    "infer_axes": "generic_export.diagnose.record.axes",
    "observe": "generic_export.diagnose.record.recording",
    "record": "generic_export.diagnose.record.input_sets",
    "register_state_adapter": "generic_export.diagnose.record.state",
    "state_adapters": "generic_export.diagnose.record.state",
}

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
    "infer_axes",
    "observe",
    "record",
    "register_state_adapter",
    "state_adapters",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'generic_export.diagnose' has no attribute {name!r}")
