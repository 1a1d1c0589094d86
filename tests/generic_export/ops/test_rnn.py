"""Recurrent layers as loops in the engine: every variant of PyTorch's, at any length, with no memory between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tract
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from tests.engine_check import check

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **kwargs: nn.RNN(*sizes, nonlinearity="relu", **kwargs),
}


class Layer(nn.Module):
    """A layer whose states are returned flat; given states are inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        given = None if not states else states[0] if len(states) == 1 else states
        result, last = self.layer(x, given)
        return (result, *last) if isinstance(last, tuple) else (result, last)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
def test_every_layer_at_dynamic_batch_and_length(kind: str, options: dict) -> None:
    layer = Layer(LAYERS[kind](3, 4, **options))
    batch_axis, time_axis = (0, 1) if options.get("batch_first") else (1, 0)

    def args(batch: int, length: int) -> tuple:
        return (torch.randn(batch, length, 3) if options.get("batch_first") else torch.randn(length, batch, 3),)

    axes = {"input_0": {batch_axis: "B", time_axis: "T"}}
    text = check(layer, args(2, 5), args(1, 1), args(3, 9), dynamic_axes=axes)
    assert "tract_core_scan" in text


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_given_initial_states(kind: str, batch_first: bool) -> None:
    layer = Layer(LAYERS[kind](3, 4, num_layers=2, bidirectional=True, batch_first=batch_first))

    def args(length: int) -> tuple:
        states = [torch.randn(4, 2, 4) for _ in range(2 if kind == "lstm" else 1)]
        return (torch.randn(2, length, 3) if batch_first else torch.randn(length, 2, 3), *states)

    check(layer, args(5), args(2), dynamic_axes={"input_0": {1 if batch_first else 0: "T"}})


@pytest.mark.parametrize("kind", LAYERS)
def test_unbatched(kind: str) -> None:
    check(Layer(LAYERS[kind](3, 4)), (torch.randn(5, 3),), (torch.randn(8, 3),), dynamic_axes={"input_0": {0: "T"}})


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}])
def test_lstm_with_projections(options: dict) -> None:
    layer = Layer(nn.LSTM(3, 6, proj_size=2, **options))
    check(layer, (torch.randn(2, 5, 3),), (torch.randn(2, 7, 3),), dynamic_axes={"input_0": {1: "T"}})


class RowsAsBatch(nn.Module):
    """A recurrent layer along the width of maps [B, H, W, C], whose heights are a part of the batch."""

    def __init__(self, rnn: nn.Module, step: int) -> None:
        super().__init__()
        self.rnn, self.step = rnn, step

    def forward(self, x: torch.Tensor) -> Any:
        """Return what each row says; of every second row where `step` is 2."""
        batch, high, wide, channels = x.shape
        rows = high // self.step
        y, _ = self.rnn(x[:, : rows * self.step].reshape(batch * rows, wide * self.step, channels))
        return y.unflatten(0, (batch, rows))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_batch_that_is_a_product_of_sizes(kind: Callable[..., nn.Module], step: int) -> None:
    torch.manual_seed(0)
    module = RowsAsBatch(kind(3, 4, batch_first=True, bidirectional=True), step).eval()
    samples = [
        (torch.randn(batch, high, wide, 3),) for batch, high, wide in ((2, 3, 5), (1, 4, 6), (3, 7, 2), (1, 2, 9))
    ]
    check(module, *samples, dynamic_axes={"input_0": {0: "B", 1: "H", 2: "W"}})


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4, nonlinearity="relu")])
def test_cells_unrolled_by_hand(cell: nn.Module) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for step in range(3):
                state = self.cell(x[step], state)
            return state[0] if isinstance(state, tuple) else state

    check(Steps(), (torch.randn(3, 2, 3),))


def test_layers_of_one_size_share_their_fragment() -> None:
    text = check(Layer(nn.LSTM(4, 4, num_layers=3)), (torch.randn(5, 2, 4),))
    assert text.count("fragment lstm_step") == 1
    assert text.count("tract_core_scan(") == 3


def test_dropout_between_layers_is_left_out_in_eval_mode() -> None:
    check(Layer(nn.GRU(3, 4, num_layers=2, dropout=0.5)), (torch.randn(5, 2, 3),))


def test_a_state_of_the_engine_forgets_between_runs(tmp_path: Path) -> None:
    model, x = Layer(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    archive = export_model_to_nnef(model, x, tmp_path / "m", TractNNEF(check_io=False), compression_level=None)
    state = tract.nnef().with_tract_transformers().load(str(archive)).into_runnable().spawn_state()
    first, second = (state.run([x.numpy()])[0].to_numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)
