"""What a forward writes to its own buffers is undone once a recording is over."""

from __future__ import annotations

import torch
from torch import nn

from generic_export.diagnose import record
from generic_export.diagnose.piece_by_piece import trace_execution_piece_by_piece
from generic_export.diagnose.record.buffers import buffers_put_back


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


def test_buffers_are_those_of_before_written_or_replaced() -> None:
    model = nn.Sequential(Counts(), nn.BatchNorm1d(4)).train()
    before = dict(model.named_buffers())
    values = {name: tensor.clone() for name, tensor in before.items()}
    with buffers_put_back(model):
        model(torch.ones(3, 4))
        assert model[0].count.item() == 1.0 and model[1].num_batches_tracked.item() == 1
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in values)


def test_buffers_made_in_inference_mode_are_put_back_too() -> None:
    with torch.inference_mode():
        model = Counts()
        with buffers_put_back(model):
            model(torch.ones(3, 4))
        assert not model.count.any()


def test_recordings_leave_the_callers_model_as_it_was() -> None:
    model, sets = Counts(), [(torch.ones(n, 4),) for n in (3, 5)]
    recording = record(model, sets)
    assert [float(r.outputs()["output"][0, 0]) for r in recording.roots()] == [2.0, 3.0]
    root = trace_execution_piece_by_piece(model, sets)
    assert not model.count.any() and not model.total.any()
    assert root.try_export("nnef").is_ok(), "compared with what the module answers now"
