"""The names of the piece-by-piece tool that users know, as views over this package's own records.

In: a model and input sets. Out: a tree of modules, each of which can be exported alone.
"""

from generic_export.debug.piece_by_piece.status import CustomOpStrategy, StatusExport, StatusExportCode
from generic_export.debug.piece_by_piece.trace import trace_execution_piece_by_piece, trace_forward_execution
from generic_export.debug.piece_by_piece.tree import ModelDiagnoseOutput

__all__ = [
    "CustomOpStrategy",
    "ModelDiagnoseOutput",
    "StatusExport",
    "StatusExportCode",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
]
