"""Refusals tell their cause first, with the user's line, and what their advice proposes is exported and right at three sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import CaptureError, T2NError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.nested import FlatCall, resize_example

ROWS = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
FREE = {"x": {0: "B", 1: "S"}}


class Written(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Any, *more: Any) -> Any:
        """Return what the function says."""
        return self.function(self, x, *more)


@dataclass(frozen=True)
class Refusal:
    """A function that is refused, and the one that its advice proposes.

    Attributes:
        function: refused.
        cause: words of the message.
        advice: words of the hint.
        followed: the function after the change.
        args: its arguments; None takes those of the first.
        axes: its dynamic axes.
    """

    function: Callable[..., Any]
    cause: str
    advice: str
    followed: Callable[..., Any]
    args: tuple[Any, ...] | None = None
    axes: dict[str, Any] | None = None


def by_numpy(self: Written, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.numpy()))


def sparse(self: Written, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(x[0].to_sparse(), x[0].T)


def nested(self: Written, x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0], x[1][:2]]).to_padded_tensor(0.0)


def packed(self: Written, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(self.layer(rows)[0], batch_first=True)[0]


def padded(self: Written, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    there = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    return self.layer(x)[0] * there.unsqueeze(-1)


def without_negatives(self: Written, x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def each_position(self: Written, x: torch.Tensor) -> torch.Tensor:
    total, rows = torch.zeros(x.shape[0], 3), []
    for t in range(x.shape[1]):
        total = total + x[:, t]
        rows.append(total)
    return torch.stack(rows, 1)


def share(self: Written, x: torch.Tensor) -> torch.Tensor:
    return x[:, : round(0.3 * x.shape[1])]


def one_size(self: Written, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != 5:
        raise ValueError("five")
    return x * 2


def until(self: Written, x: torch.Tensor) -> torch.Tensor:
    while x.abs().sum() < 1000:
        x = x * 2
    return x


def doubled_eight_times(self: Written, x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = torch.where(x.abs().sum() < 1000, x * 2, x)
    return x


def grown(self: Written, x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.cat([x, x[:, -1:]], 1)), (torch.tensor(0), x))[1]


def grown_three_times(self: Written, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.cat([x, x[:, -1:]], 1)
    return x


def numbered_by_numpy(self: Written, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.arange(x.shape[1], dtype=np.float32)).unsqueeze(-1)


def scaled_by_numpy(self: Written, x: torch.Tensor) -> torch.Tensor:
    return x / np.sqrt(x.shape[1])


REFUSALS = {
    "a loop whose tensors grow": Refusal(
        grown, "a loop carries a tensor whose shape", "fixed number", grown_three_times
    ),
    "NumPy numbers positions": Refusal(
        numbered_by_numpy,
        "NumPy computes with a size",
        "torch.arange for np.arange",
        lambda self, x: x * torch.arange(x.shape[1], dtype=torch.float32).unsqueeze(-1),
    ),
    "NumPy computes with a size": Refusal(
        scaled_by_numpy, "NumPy computes with a size", "Python's integers", lambda self, x: x / x.shape[1] ** 0.5
    ),
    "NumPy": Refusal(by_numpy, "NumPy computes with a tensor", "Use torch", lambda self, x: torch.tanh(x)),
    "a sparse tensor": Refusal(sparse, "a sparse tensor", "dense tensors", lambda self, x: torch.mm(x[0], x[0].T)),
    "a nested tensor": Refusal(
        nested,
        "a nested tensor",
        "mask the padding",
        lambda self, x: (
            x * (torch.arange(x.shape[1]) < torch.stack([x.new_tensor(9), x.new_tensor(2)])[:, None])[..., None]
        ),
        axes={"x": {1: "S"}},
    ),
    "a packed sequence": Refusal(
        packed, "a packed sequence", "padded batch", padded, (ROWS, torch.tensor([5, 3])), FREE | {"more_0": {0: "B"}}
    ),
    "a mask as index": Refusal(without_negatives, "the result of index", "return the mask", lambda self, x: (x, x > 0)),
    "unique": Refusal(lambda self, x: torch.unique(x), "_unique2", "outside", lambda self, x: x * 1.5),
    "a loop over positions": Refusal(
        each_position, "a loop runs once per position: `for t in range", "whole axis", lambda self, x: x.cumsum(1)
    ),
    "a rounded share": Refusal(share, "RoundToInt", "integer divisions", lambda self, x: x[:, : 3 * x.shape[1] // 10]),
    "one size alone": Refusal(
        one_size,
        "a branch depends on a size: `if x.shape[1] != 5:`",
        "make the axis static",
        one_size,
        axes={"x": {0: "B"}},
    ),
    "a loop on values": Refusal(until, "read from a tensor", "masks and torch.where", doubled_eight_times),
    "an object of a class": Refusal(
        lambda self, x, more: x * more.scale,
        "its tensors would become constants",
        "Pass and return tensors",
        lambda self, x, scale: x * SimpleNamespace(scale=scale).scale,
        (ROWS, torch.randn(3)),
    ),
    "a result of a class": Refusal(
        lambda self, x: SimpleNamespace(x=x),
        "not a tensor",
        "Pass and return tensors",
        lambda self, x: SimpleNamespace(x=x).x,
    ),
    "an example of which nothing is left": Refusal(
        lambda self, x: x[:, 5:].roll(7, 1),
        "nothing is left of an axis in the example",
        "a larger example",
        lambda self, x: x[:, 5:].roll(7, 1),
        (torch.randn(2, 9, 3),),
    ),
    "a module that fails": Refusal(
        lambda self, x: x @ torch.zeros(5, 7),
        "the module fails in PyTorch on the example inputs: RuntimeError",
        "Use arguments",
        lambda self, x: x @ torch.zeros(5, 7),
        (torch.randn(2, 4, 5),),
    ),
}
WITHOUT_LINE = {"an object of a class", "a result of a class", "a module that fails"}
"""What is wrong there is what the module is given or returns."""
GIVEN = {
    "a packed sequence": (ROWS, torch.tensor([5, 3])),
    "an object of a class": (ROWS, SimpleNamespace(scale=torch.ones(3))),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_tells_its_cause_and_its_advice_is_exported(name: str, tmp_path: Path) -> None:
    row = REFUSALS[name]
    args = GIVEN.get(name, (ROWS,))
    target = TractNNEF(dynamic_axes=FREE, check_io=False)
    with pytest.raises(T2NError) as caught:
        export_model_to_nnef(Written(row.function), args, tmp_path / "refused", target, log_level=None)
    refusal = caught.value
    assert row.cause in refusal.message and row.advice in str(refusal.hint), str(refusal)
    assert "torch.jit" not in refusal.message
    assert name in WITHOUT_LINE or re.search(r"test_causes\.py:\d+", refusal.message), refusal.message
    _check_at_three_sizes(row, row.args or args, tmp_path / "followed")


def _check_at_three_sizes(row: Refusal, args: tuple[Any, ...], path: Path) -> None:
    axes = FREE if row.axes is None else row.axes
    model = Written(row.followed).eval()
    call = FlatCall.of(model, args, {})
    archive = export_model_to_nnef(model, args, path, TractNNEF(dynamic_axes=axes, check_io=False), log_level=None)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        for sizes in ({"B": 2, "S": 5}, {"B": 1, "S": 8}, {"B": 3, "S": 11}):
            tensors = [
                resize_example(
                    tensor, [sizes.get(axes.get(name, {}).get(axis), size) for axis, size in enumerate(tensor.shape)]
                )
                for name, tensor in zip(call.names, call.tensors, strict=True)
            ]
            run = ExampleRun.of(model, call.arguments(tensors)[0])
            for answer, expected in zip(engine.run(list(run.inputs)), run.outputs, strict=True):
                np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)


def test_the_record_of_attempts(tmp_path: Path) -> None:
    """Each way of capturing, what it met, where, and the text of the line; the message is about the first."""
    with pytest.raises(CaptureError) as caught:
        target = TractNNEF(dynamic_axes=FREE, check_io=False)
        export_model_to_nnef(Written(by_numpy), (ROWS,), tmp_path / "refused", target, log_level=None)
    first, *others = caught.value.attempts
    assert first.method == "torch.export" and first.text == "return torch.from_numpy(np.tanh(x.numpy()))"
    assert re.fullmatch(r"test_causes\.py:\d+", first.source) and first.met in caught.value.message
    assert [each.method for each in others] == ["torch.jit.script", "torch.jit.trace"]
    assert "specializes B, S" in others[1].met and "make B, S static" in str(caught.value.hint)
    assert all(str(each) in str(caught.value) for each in caught.value.attempts)


def test_an_operator_without_a_fake_implementation(tmp_path: Path) -> None:
    @torch.library.custom_op("t2n_causes::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(CaptureError, match=r"t2n_causes::twice has no fake implementation.*register_fake"):
        export_model_to_nnef(
            Written(lambda self, x: twice(x)), (ROWS,), tmp_path / "refused", TractNNEF(check_io=False), log_level=None
        )


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return half of it."""
        return torch.from_numpy(x.detach().numpy() / 2)


def test_a_function_of_autograd_in_a_trace_is_refused(tmp_path: Path) -> None:
    """PyTorch ends the process where the trace's operator for it is called."""
    with pytest.raises(CaptureError, match="NumPy computes with a tensor") as caught:
        model = Written(lambda self, x: _Halved.apply(x))
        export_model_to_nnef(model, (ROWS,), tmp_path / "refused", TractNNEF(check_io=False), log_level=None)
    assert any("prim::PythonOp" in each.met for each in caught.value.attempts)


def test_a_detector_of_torchvision(tmp_path: Path) -> None:
    detection = pytest.importorskip("torchvision.models.detection")
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    with pytest.raises(CaptureError, match=r"exportable_detector\(model"):
        target = TractNNEF(check_io=False)
        export_model_to_nnef(model, ([torch.rand(3, 64, 64)],), tmp_path / "refused", target, log_level=None)
