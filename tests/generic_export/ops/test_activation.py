"""Every activation of torch.nn.functional, at the ends of its range and at another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export.errors import TranslationError
from tests.engine_check import check

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "celu": lambda x: F.celu(x, 1.3),
    "elu": lambda x: F.elu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(x, -1),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "rrelu": F.rrelu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmin": lambda x: F.softmin(x, -1),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.3, -7.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    torch.manual_seed(0)
    wide = torch.cat([torch.randn(3, 8) * 3, torch.linspace(-110, 110, 8)[None], torch.linspace(-0.6, 0.6, 8)[None]])
    check(ACTIVATIONS[name], (wide,), (torch.randn(9, 8),), dynamic_axes={"input_0": {0: "N"}}, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["gelu", "sigmoid", "silu", "leaky_relu", "hardswish", "softplus", "elu", "mish"])
def test_activation_in_f64(name: str) -> None:
    check(ACTIVATIONS[name], (torch.linspace(-5, 5, 31, dtype=torch.float64),), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("parameters", "shape"), [(1, (2, 5)), (3, (2, 3, 4)), (3, (2, 3)), (1, (4,))])
def test_prelu_has_a_slope_per_channel(parameters: int, shape: tuple[int, ...]) -> None:
    layer = nn.PReLU(parameters)
    nn.init.uniform_(layer.weight)
    check(layer, (torch.randn(shape),))


def test_log_sigmoid_keeps_its_tail() -> None:
    check(F.logsigmoid, (torch.tensor([-80.0, -20.0, 0.0, 20.0]),), rtol=1e-5, atol=0)


def test_sigmoid_keeps_its_tail() -> None:
    check(torch.sigmoid, (torch.tensor([-80.0, -20.0, -10.0, 0.0, 20.0, 110.0]),), rtol=1e-6, atol=0)


def test_active_rrelu_is_refused() -> None:
    with pytest.raises(TranslationError, match="rrelu draws random slopes"):
        check(lambda x: F.rrelu(x, training=True), (torch.randn(3),))
