"""Which part of a model does not export, or exports and is wrong: recorded, tried piece by piece, told with file and line."""

from generic_export.compare.comparison import Comparison
from generic_export.debug.attempt.worker import Limits
from generic_export.debug.diagnosis import Culprit, Diagnosis, DiagnosisError, diagnosis_text
from generic_export.debug.record.axes import infer_axes
from generic_export.debug.record.observe import observe, record
from generic_export.debug.record.recording import Call, ObservationError, Recording
from generic_export.debug.record.state import StateAdapter, UnknownStateError, register_state_adapter, state_adapters
from generic_export.debug.records import Axis, AxisReport, ErrorRecord, Leaf, LeafKind, Outcome, Piece, Stage, Verdict
from generic_export.debug.search import Progress, diagnose
from generic_export.diagnose.piece_by_piece import (
    CustomOpStrategy,
    ModelDiagnoseOutput,
    StatusExport,
    StatusExportCode,
    trace_execution_piece_by_piece,
    trace_forward_execution,
)

__all__ = [
    "Axis",
    "AxisReport",
    "Call",
    "Comparison",
    "Culprit",
    "CustomOpStrategy",
    "Diagnosis",
    "DiagnosisError",
    "ErrorRecord",
    "Leaf",
    "LeafKind",
    "Limits",
    "ModelDiagnoseOutput",
    "ObservationError",
    "Outcome",
    "Piece",
    "Progress",
    "Recording",
    "Stage",
    "StateAdapter",
    "StatusExport",
    "StatusExportCode",
    "UnknownStateError",
    "Verdict",
    "diagnose",
    "diagnosis_text",
    "infer_axes",
    "observe",
    "record",
    "register_state_adapter",
    "state_adapters",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
]
