"""What a forward writes to its own buffers is undone once a recording is over."""

from __future__ import annotations

import torch
from torch import nn

from generic_export.diagnose import record
from generic_export.diagnose.piece_by_piece import trace_execution_piece_by_piece


class Counts(nn.Module):
    """Counts its calls in place, and sums its inputs up in a new tensor."""

    count: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1.0
        self.total = self.total + x.sum(0)
        return x + self.count


def test_recordings_leave_the_callers_model_as_it_was() -> None:
    model, sets = Counts(), [(torch.ones(n, 4),) for n in (3, 5)]
    recording = record(model, sets)
    assert [float(r.outputs()["output"][0, 0]) for r in recording.roots()] == [2.0, 3.0]
    root = trace_execution_piece_by_piece(model, sets)
    assert not model.count.any() and not model.total.any()
    assert root.try_export("nnef").is_ok(), "compared with what the module answers now"
