"""What torch.export refuses: a diagnosis captures it as an export does, through its script or trace, and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.diagnose import Outcome, Stage, diagnose
from generic_export.diagnose.piece_by_piece import trace_execution_piece_by_piece
from generic_export.errors import NotCapturableError, SpecializedAxisError
from tests.generic_export.debug.planted import DataDependentBranch, DecidedByPython

ROWS = [(torch.randn(count, 4),) for count in (3, 5)]
TARGET = TractNNEF(dynamic_axes={"x": {0: "B"}})


class Behind(nn.Module):
    """A layer, and a module behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


def model_with(fault: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Behind(fault).eval()


def test_a_branch_on_values_is_exported_and_passes_in_a_diagnosis(tmp_path: Path) -> None:
    model = model_with(DataDependentBranch())
    with pytest.warns(UserWarning, match=r"captured through torch\.jit\.script"):
        export_model_to_nnef(model, ROWS[0], tmp_path / "m", TARGET)
    found = diagnose(model, TractNNEF(), ROWS, strategy="whole")
    root = found.verdict(found.pieces[0].key)
    assert found.ok
    assert root.stage is Stage.COMPARE
    assert {metrics.set_index for metrics in root.metrics} == {0, 1}
    assert any("captured through torch.jit.script" in note for note in root.notes)
    assert trace_execution_piece_by_piece(model, ROWS).try_export("nnef").is_ok()


def test_what_a_trace_would_freeze_is_refused_by_both(tmp_path: Path) -> None:
    model = model_with(DecidedByPython())
    with pytest.raises(SpecializedAxisError):
        export_model_to_nnef(model, ROWS[0], tmp_path / "m", TARGET)
    (culprit,) = diagnose(model, TractNNEF(), ROWS).culprits()
    assert culprit.piece.path == "inner"
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "SpecializedAxisError"


def test_without_torchscript_the_branch_is_the_fault() -> None:
    found = diagnose(model_with(DataDependentBranch()), TractNNEF(), ROWS, torchscript=False)
    (culprit,) = found.culprits()
    assert culprit.piece.path == "inner"
    assert culprit.verdict.stage is Stage.CAPTURE
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == NotCapturableError.__name__
    assert {piece.path: found.verdict(piece.key).outcome for piece in found.pieces} == {
        "": Outcome.FAILED,
        "linear": Outcome.OK,
        "inner": Outcome.FAILED,
    }
