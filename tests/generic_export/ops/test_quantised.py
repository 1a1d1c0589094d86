"""Quantised models in the real engine: torch.export's decomposed form, and eager `torch.ao` modules."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from torch import Tensor, nn
from torch.nn import functional

from generic_export.errors import T2NError
from tests.engine_check import check

qd = torch.ops.quantized_decomposed
BATCH = {"input_0": {0: "N"}}


def fake(
    x: Tensor, scale: float, zero_point: int, low: int = 0, high: int = 255, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """To integers and back."""
    integers = qd.quantize_per_tensor(x, scale, zero_point, low, high, dtype)
    return qd.dequantize_per_tensor(integers, scale, zero_point, low, high, dtype)


class QuantisedLayer(nn.Module):
    """A layer as PT2E leaves it: quantised input, integer weights (per channel or not), quantised result."""

    def __init__(self, layer: nn.Module, per_channel: bool, zero_point: int = 0) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.layer, self.per_channel, self.zero_point = layer, per_channel, zero_point
        largest = weight.flatten(1).abs().amax(1)
        scale = largest / 127 if per_channel else largest.max() / 127
        self.register_buffer("scales", scale)
        self.register_buffer("zero_points", torch.full_like(scale, zero_point).long())
        spread = scale.reshape(-1, *[1] * (weight.dim() - 1)) if per_channel else scale
        self.register_buffer("weight", (weight / spread).round().clamp(-127, 127).to(torch.int8))
        self.scale = float(scale) if not per_channel else 0.0
        self.bias = nn.Parameter(layer.bias.detach()) if layer.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x = fake(x, 0.031, 117)
        if self.per_channel:
            w = qd.dequantize_per_channel(self.weight, self.scales, self.zero_points, 0, -127, 127, torch.int8)
        else:
            w = qd.dequantize_per_tensor(self.weight, self.scale, self.zero_point, -127, 127, torch.int8)
        if isinstance(self.layer, nn.Linear):
            y = functional.linear(x, w, self.bias)
        else:
            layer = self.layer
            y = layer._conv_forward(x, w, self.bias)
        return qd.quantize_per_tensor(y.relu(), 0.02, 3, 0, 255, torch.uint8)


LAYERS = {
    "linear": (lambda: nn.Linear(12, 7), (12,)),
    "linear without bias": (lambda: nn.Linear(12, 7, bias=False), (12,)),
    "linear of rank 3": (lambda: nn.Linear(12, 7), (5, 12)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, dilation=2), (4, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 9, 7)),
    "grouped conv2d": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2), (4, 6, 7)),
    "depthwise conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 4, 5, 3)),
}


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_integers_gives_pytorchs_integers(name: str, per_channel: bool) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = QuantisedLayer(make(), per_channel)
    # One step where a float sum of PyTorch's lies on a half; the seeds here have none.
    text = check(model, (torch.randn(3, *shape),), (torch.randn(64, *shape),), dynamic_axes=BATCH, rtol=0, atol=0)
    assert ("tract_core_einsum_q(" if name.startswith("linear") else "tract_core_qconv(") in text


def test_weights_with_a_zero_point_are_computed_in_floats() -> None:
    torch.manual_seed(0)
    model = QuantisedLayer(nn.Linear(6, 4), per_channel=True, zero_point=3)
    text = check(model, (torch.randn(3, 6),), (torch.randn(9, 6),), dynamic_axes=BATCH, rtol=0, atol=1)
    assert "einsum_q" not in text


@pytest.mark.parametrize(
    "low, high, dtype", [(0, 255, torch.uint8), (-128, 127, torch.int8), (-8, 7, torch.int8), (0, 127, torch.uint8)]
)
def test_quantise_and_back(low: int, high: int, dtype: torch.dtype) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        integers = qd.quantize_per_tensor(x, 0.25, 2, low, high, dtype)
        return integers, qd.dequantize_per_tensor(integers, 0.25, 2, low, high, dtype)

    halves = torch.arange(-40.0, 40.0)[:, None] * 0.125 * torch.ones(3)  # every other one lies on a half
    check(model, (halves,), (torch.randn(5, 3) * 100,), dynamic_axes=BATCH, rtol=0, atol=0)


def test_per_channel_fake_quantisation() -> None:
    scales, zero_points = torch.tensor([0.1, 0.25, 0.5]), torch.tensor([0, 3, -2])

    def model(x: Tensor) -> Tensor:
        integers = qd.quantize_per_channel(x, scales, zero_points, 1, -128, 127, torch.int8)
        return qd.dequantize_per_channel(integers, scales, zero_points, 1, -128, 127, torch.int8)

    check(model, (torch.randn(4, 3),), (torch.randn(9, 3) * 20,), dynamic_axes=BATCH, rtol=0, atol=1e-6)


def test_the_same_grid_twice_is_one_quantisation() -> None:
    text = check(lambda x: fake(fake(x, 0.1, 7).reshape(-1, 6), 0.1, 7), (torch.randn(2, 2, 3),))
    assert text.count("tract_core_round_even") <= 2
    text = check(lambda x: fake(fake(x, 0.1, 7), 0.1, 7), (torch.randn(2, 3),))
    assert text.count("tract_core_round_even") == 1


def test_integers_that_were_moved_stay_integers() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 128, (5, 12)).to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            x = fake(x, 0.05, 100).flatten(1)
            return functional.linear(x, qd.dequantize_per_tensor(self.weight, 0.01, 0, -127, 127, torch.int8))

    text = check(Flat(), (torch.randn(2, 3, 4),), (torch.randn(5, 3, 4),), dynamic_axes=BATCH, rtol=1e-5, atol=1e-5)
    assert "tract_core_einsum_q(" in text


def test_wider_integers_are_refused() -> None:
    with pytest.raises(T2NError, match="only 8 bits"):
        check(lambda x: qd.quantize_per_tensor(x, 0.1, 0, -30000, 30000, torch.int16), (torch.randn(2, 3),))
