"""Calls that only look at a module: neither recorded nor replayed."""

from __future__ import annotations

import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.diagnose import diagnose, diagnosis_text, observe
from generic_export.torch_graph.untraced_calls import is_untraced, untraced_calls


class Curious(nn.Module):
    """Tries its part on a probe before it uses it, as a recogniser does."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with untraced_calls():
            bounded = self.part(torch.full((2,), 100.0)).shape == (2,)
        return self.part(x) if bounded else x


def test_a_look_at_a_module_is_not_recorded() -> None:
    model = Curious().eval()
    with observe(model, max_calls=2) as recording:
        for size in (3, 5):
            model(torch.zeros(size))
    sizes = [
        leaf.sizes for recorded in recording.calls if recorded.call.path == "part" for leaf in recorded.call.inputs
    ]
    assert sizes == [(3,), (5,)]
    assert not is_untraced()


def test_a_look_at_a_module_sees_the_module_where_its_children_are_replayed() -> None:
    found = diagnose(Curious().eval(), TractNNEF(), [(torch.randn(3),), (torch.randn(5),)], strategy="isolate")
    assert found.ok, diagnosis_text(found)
    assert len(found.pieces) == 2
