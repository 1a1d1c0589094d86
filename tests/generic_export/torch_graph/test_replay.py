"""A captured graph run operator by operator gives what the module gives, and every tensor between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

from generic_export import TractNNEF
from generic_export.capture import prepare
from generic_export.errors import CaptureError
from generic_export.torch_graph.capture.replay import replay
from generic_export.torch_graph.printing import graph_listing
from tests.engine_check import Function


def _sum_over(x: torch.Tensor) -> Any:
    return scan(lambda total, row: (total + row, total * 2), torch.zeros(3), x, dim=0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)
        self.other = nn.GRU(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x)
        return self.other(states)[0]


CASES: dict[str, tuple[nn.Module | Callable[..., Any], tuple[int, ...], dict[int, str]]] = {
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4)), (2, 3), {0: "N"}),
    "convolution": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU()), (2, 2, 9), {0: "N", 2: "L"}),
    "sizes": (lambda x: x.reshape(x.shape[0] * 2, -1) * x.shape[1] + torch.arange(x.shape[0] * 2)[:, None], (3, 4),
              {0: "N"}),
    "lists": (lambda x: torch.cat([part * 2 for part in x.split(2, 1)], 0), (3, 6), {0: "N"}),
    "complex": (lambda x: torch.fft.rfft(x).abs(), (3, 8), {0: "N"}),
    "branch": (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), (3, 4), {0: "N"}),
    "loop": (_sum_over, (5, 3), {}),
    "recurrent": (Recurrent(), (2, 5, 3), {0: "N", 1: "T"}),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8), {0: "N", 1: "T"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    model, shape, axes = CASES[name]
    module = (model if isinstance(model, nn.Module) else Function(model)).eval()
    prepared = prepare(module, (torch.randn(shape),), TractNNEF(check_io=False, dynamic_axes={"x": axes}), ["x"])
    other = torch.randn([size + (axis in axes) for axis, size in enumerate(shape)])
    with torch.no_grad():
        expected = module(other)
    names = [variable.name for variable in prepared.graph.outputs]
    values = replay(prepared.graph, [other], prepared.stored, set(names))
    for output, reference in zip(names, torch.utils._pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(values[output], reference)


def test_intermediates_by_module_path_and_only_those_asked_for() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    x = torch.randn(2, 3)
    prepared = prepare(model, (x,), TractNNEF(check_io=False))
    values = replay(prepared.graph, [x], prepared.stored, {"0", "1"})
    assert set(values) == {"0", "1"}
    with torch.no_grad():
        torch.testing.assert_close(values["1"], model[1](model[0](x)))


def test_other_weights_can_be_put_in() -> None:
    model, x = nn.Linear(3, 2, bias=False).eval(), torch.randn(2, 3)
    prepared = prepare(model, (x,), TractNNEF(check_io=False))
    (output,) = prepared.graph.outputs
    values = replay(prepared.graph, [x], lambda name: torch.ones(2, 3), {output.name})
    torch.testing.assert_close(values[output.name], x.sum(1, keepdim=True).expand(2, 2))


def test_what_cannot_be_computed_is_missing_and_nothing_else() -> None:
    @torch.library.custom_op("t2n_test::no_kernel", mutates_args=())
    def no_kernel(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("in captured graphs only")

    @no_kernel.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    module = Function(lambda x: (x * 2, no_kernel(x) + 1)).eval()
    prepared = prepare(module, (torch.ones(2),), TractNNEF(check_io=False))
    names = {variable.name for variable in prepared.graph.outputs}
    values = replay(prepared.graph, [torch.ones(2)], prepared.stored, names)
    assert [value.tolist() for value in values.values()] == [[2, 2]]


def test_wrong_number_of_inputs() -> None:
    prepared = prepare(nn.ReLU().eval(), (torch.ones(2),), TractNNEF(check_io=False))
    with pytest.raises(CaptureError, match="takes 1 tensors, but got 2"):
        replay(prepared.graph, [torch.ones(2)] * 2, prepared.stored, set())


def test_listing_says_shapes_modules_and_lines() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    prepared = prepare(model, (torch.ones(2, 3),), TractNNEF(check_io=False, dynamic_axes={"input": {0: "N"}}))
    lines = graph_listing(prepared.graph).splitlines()
    assert lines[:3] == ["symbol N: 0 .. any", "input input: float32[N, 3]", "stored 0.weight: float32[4, 3]"]
    assert "0: float32[N, 4] = aten.linear.default(input, 0.weight, 0.bias)  # 0 Linear" in lines
    assert lines[-1].startswith("output output = ")
