"""Recurrent layers and cells: the products with the input are taken at once, the rest step by step in `tract_core_scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from generic_export.errors import TranslationError
from generic_export.ops.linear import linear
from generic_export.ops.scan import Loop, Values, scan
from generic_export.ops.variants import variant
from generic_export.translate.builder import NnefBuilder, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class _Cell:
    """One step of a kind of layer.

    Attributes:
        name: of the fragment.
        shares_bias: whether both biases are added to the input's product.
        step: (builder, products with the input, states, weights of the state) -> (next states, output).
    """

    name: str
    shares_bias: bool
    step: Callable[[NnefBuilder, Value, Values, Values], tuple[Values, Value]]

    def body(self, b: NnefBuilder, slices: Values, states: Values, constants: Values) -> tuple[Values, Values]:
        """Write one step of a scan."""
        after, output = self.step(b, slices[0], states, constants)
        return after, [output]


def _gates(b: NnefBuilder, value: Value, count: int) -> list[Value]:
    axis = value.rank - 1
    size = value.shape[axis]
    if not isinstance(size, int):
        raise TranslationError("a recurrent layer of dynamic width has no NNEF form.")
    width = size // count
    return [b.slice(value, axis, index * width, (index + 1) * width) for index in range(count)]


def _lstm_step(b: NnefBuilder, x: Value, states: Values, weights: Values) -> tuple[Values, Value]:
    hidden, cell = states
    gates = b.binary("add", x, linear(b, hidden, weights[0]))
    enter, forget, candidate, leave = _gates(b, gates, 4)
    kept = b.binary("mul", b.unary("sigmoid", forget), cell)
    added = b.binary("mul", b.unary("sigmoid", enter), b.unary("tanh", candidate))
    cell = b.binary("add", kept, added)
    hidden = b.binary("mul", b.unary("sigmoid", leave), b.unary("tanh", cell))
    if len(weights) > 1:
        hidden = linear(b, hidden, weights[1])
    return (hidden, cell), hidden


def _gru_step(b: NnefBuilder, x: Value, states: Values, weights: Values) -> tuple[Values, Value]:
    (hidden,) = states
    bias = weights[1] if len(weights) > 1 else None
    from_input, from_state = _gates(b, x, 3), _gates(b, linear(b, hidden, weights[0], bias), 3)
    reset = b.unary("sigmoid", b.binary("add", from_input[0], from_state[0]))
    update = b.unary("sigmoid", b.binary("add", from_input[1], from_state[1]))
    candidate = b.unary("tanh", b.binary("add", from_input[2], b.binary("mul", reset, from_state[2])))
    # (1 - update) * candidate + update * hidden, written with one product
    hidden = b.binary("add", candidate, b.binary("mul", update, b.binary("sub", hidden, candidate)))
    return (hidden,), hidden


def _simple_step(b: NnefBuilder, x: Value, states: Values, weights: Values, *, activation: str) -> tuple[Values, Value]:
    hidden = b.unary(activation, b.binary("add", x, linear(b, states[0], weights[0])))
    return (hidden,), hidden


_LSTM = _Cell("lstm_step", True, _lstm_step)
_GRU = _Cell("gru_step", False, _gru_step)
_TANH = _Cell("rnn_tanh_step", True, partial(_simple_step, activation="tanh"))
_RELU = _Cell("rnn_relu_step", True, partial(_simple_step, activation="relu"))


@dataclass(frozen=True)
class _Weights:
    """The parameters of one layer in one direction."""

    of_input: Value
    of_state: Value
    input_bias: Value | None
    state_bias: Value | None
    projection: Value | None

    @staticmethod
    def all_of(params: Values, *, has_biases: bool, projected: bool) -> list[_Weights]:
        """Split PyTorch's flat list: w_ih, w_hh, [b_ih, b_hh], [w_hr] for each direction of each layer."""
        size = 2 + 2 * has_biases + projected
        groups = [list(params[start : start + size]) for start in range(0, len(params), size)]
        return [
            _Weights(
                group[0],
                group[1],
                group[2] if has_biases else None,
                group[3] if has_biases else None,
                group[-1] if projected else None,
            )
            for group in groups
        ]

    def of_step(self, cell: _Cell) -> list[Value]:
        bias = None if cell.shares_bias else self.state_bias
        return [value for value in (self.of_state, bias, self.projection) if value is not None]


def _input_product(b: NnefBuilder, cell: _Cell, x: Value, weights: _Weights) -> Value:
    bias = weights.input_bias
    if cell.shares_bias and bias is not None and weights.state_bias is not None:
        bias = b.binary("add", bias, weights.state_bias)
    return linear(b, x, weights.of_input, bias)


@dataclass(frozen=True)
class _Layout:
    """How the arguments of a layer lie."""

    layers: int
    directions: int
    time_axis: int

    def initial_state(self, b: NnefBuilder, states: Value, index: int) -> Value:
        """[layers * directions, B, H] -> one of them, with an axis of size 1 where the sequence has time."""
        state = b.slice(states, 0, index, index + 1)
        return state if self.time_axis == 0 else b.unsqueeze(b.squeeze(state, [0]), [self.time_axis])

    def stacked(self, b: NnefBuilder, states: Values) -> Value:
        """Put last states back as [layers * directions, B, H]."""
        if self.time_axis:
            states = [b.unsqueeze(b.squeeze(state, [self.time_axis]), [0]) for state in states]
        return b.concat(states, 0)


def _recurrent(
    b: NnefBuilder, cell: _Cell, x: Value, initial: Values, params: Sequence[_Weights], layout: _Layout
) -> tuple[Value, ...]:
    last: list[list[Value]] = [[] for _ in initial]
    for layer in range(layout.layers):
        outputs = []
        for direction in range(layout.directions):
            index = layer * layout.directions + direction
            weights = params[index]
            loop = Loop(
                sequences=[_input_product(b, cell, x, weights)],
                states=[layout.initial_state(b, states, index) for states in initial],
                constants=weights.of_step(cell),
                axis=layout.time_axis,
                reverse=direction == 1,
            )
            (collected,), states = scan(b, cell.name, loop, cell.body)
            outputs.append(collected)
            for states_of_kind, state in zip(last, states, strict=True):
                states_of_kind.append(state)
        x = b.concat(outputs, x.rank - 1)
    return (x, *(layout.stacked(b, states) for states in last))


@variant(aten.lstm.input, cell=_LSTM)
@variant(aten.gru.input, cell=_GRU)
@variant(aten.rnn_tanh.input, cell=_TANH)
@variant(aten.rnn_relu.input, cell=_RELU)
def layer(
    b: NnefBuilder,
    input: Value,
    hx: Value | Values,
    params: Values,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    cell: _Cell,
) -> tuple[Value, ...]:
    """lstm.input(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, ...) -> (Tensor, Tensor, Tensor)"""
    if train and dropout:
        raise TranslationError(
            "dropout is active: the layer is in training mode.", "Call model.eval() before the export."
        )
    directions = 2 if bidirectional else 1
    sizes = 2 + 2 * has_biases
    weights = _Weights.all_of(params, has_biases=has_biases, projected=len(params) > sizes * num_layers * directions)
    layout = _Layout(num_layers, directions, time_axis=1 if batch_first else 0)
    return _recurrent(b, cell, input, [hx] if isinstance(hx, Value) else hx, weights, layout)


@variant(aten.lstm_cell.default, cell=_LSTM)
@variant(aten.gru_cell.default, cell=_GRU)
@variant(aten.rnn_tanh_cell.default, cell=_TANH)
@variant(aten.rnn_relu_cell.default, cell=_RELU)
def one_step(
    b: NnefBuilder,
    input: Value,
    hx: Value | Values,
    w_ih: Value,
    w_hh: Value,
    b_ih: Value | None = None,
    b_hh: Value | None = None,
    *,
    cell: _Cell,
) -> Values:
    """lstm_cell(Tensor input, Tensor[] hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None) -> (Tensor, Tensor)"""
    weights = _Weights(w_ih, w_hh, b_ih, b_hh, None)
    states = [hx] if isinstance(hx, Value) else hx
    after, _ = cell.step(b, _input_product(b, cell, input, weights), states, weights.of_step(cell))
    return after
