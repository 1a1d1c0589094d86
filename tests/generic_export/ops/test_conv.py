"""Convolutions in the engine, at the size they were exported with and at others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine_check import check

IMAGE_AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}
LENGTH_AXES = {"input_0": {0: "B", 2: "L"}}
VOLUME_AXES = {"input_0": {0: "B", 2: "D", 3: "H", 4: "W"}}


def _images(channels: int) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
    return (torch.randn(2, channels, 11, 14),), (torch.randn(3, channels, 16, 9),)


CONV2D: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "no_bias": {"kernel_size": 3, "bias": False},
    "padded_stride": {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 2)},
    "dilated": {"kernel_size": 3, "dilation": (2, 1), "padding": 2},
    "grouped": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "depthwise_multiplier": {"kernel_size": 3, "groups": 4, "out_channels": 8},
    "same": {"kernel_size": (4, 3), "padding": "same"},
    "same_dilated": {"kernel_size": 4, "padding": "same", "dilation": 3},
    "valid": {"kernel_size": 2, "padding": "valid", "stride": 2},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicate_same": {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
    "patches": {"kernel_size": 4, "stride": 4},
}


@pytest.mark.parametrize("name", CONV2D)
def test_conv2d_at_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    options = {"out_channels": 4, **CONV2D[name]}
    sample, other = _images(4)
    check(nn.Conv2d(4, **options), sample, other, dynamic_axes=IMAGE_AXES)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}])
def test_conv1d_at_two_sizes(options: dict[str, Any]) -> None:
    layer = nn.Conv1d(3, 5, 3, **options)
    check(layer, (torch.randn(2, 3, 12),), (torch.randn(1, 3, 7),), dynamic_axes=LENGTH_AXES)


class InsertedAxis(nn.Module):
    """A depthwise kernel that gets its middle axis in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(x, self.kernel.unsqueeze(1), padding=1, groups=8)


@pytest.mark.parametrize("axes", [None, LENGTH_AXES])
def test_depthwise_kernel_with_an_inserted_axis(axes: Any) -> None:
    sample = (torch.randn(1, 8, 7),)
    other = sample if axes is None else (torch.randn(2, 8, 12),)
    check(InsertedAxis(), sample, other, dynamic_axes=axes)


def test_conv3d_at_two_sizes() -> None:
    layer = nn.Conv3d(2, 4, (3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0))
    check(layer, (torch.randn(1, 2, 5, 6, 4),), (torch.randn(2, 2, 7, 9, 3),), dynamic_axes=VOLUME_AXES)


TRANSPOSED2D: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride_padding": {"stride": 2, "padding": 1},
    "output_padding_within_padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "output_padding_beyond_padding": {"stride": 3, "output_padding": (2, 1)},
    "output_padding_beyond_padding_no_bias": {"stride": 3, "output_padding": (0, 2), "bias": False},
    "dilated": {"dilation": 2, "padding": (1, 0)},
    "grouped": {"groups": 2, "stride": 2},
    "depthwise": {"groups": 4, "stride": 2, "padding": 1},
    "kernel_is_stride": {"kernel_size": 2, "stride": 2},
}


@pytest.mark.parametrize("name", TRANSPOSED2D)
def test_transposed_conv2d_at_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 4, **{"kernel_size": 3, **TRANSPOSED2D[name]})
    sample, other = (torch.randn(2, 4, 5, 6),), (torch.randn(1, 4, 3, 8),)
    check(layer, sample, other, dynamic_axes=IMAGE_AXES)


def test_transposed_conv_output_padding_at_dynamic_length() -> None:
    layer = nn.ConvTranspose1d(3, 2, 4, stride=3, padding=1, output_padding=2)
    check(layer, (torch.randn(2, 3, 5),), (torch.randn(1, 3, 9),), dynamic_axes=LENGTH_AXES)


def test_transposed_conv3d() -> None:
    layer = nn.ConvTranspose3d(2, 3, 2, stride=2, output_padding=1)
    check(layer, (torch.randn(1, 2, 3, 4, 2),), (torch.randn(2, 2, 2, 3, 5),), dynamic_axes=VOLUME_AXES)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(3, 4, 3, stride=2)])
def test_unbatched_images(layer: nn.Module) -> None:
    axes = {"input_0": {1: "H", 2: "W"}}
    check(layer, (torch.randn(3, 6, 7),), (torch.randn(3, 9, 5),), dynamic_axes=axes)


def test_weights_as_graph_inputs() -> None:
    args = (torch.randn(2, 4, 9), torch.randn(6, 2, 3), torch.randn(6))
    check(lambda x, w, b: F.conv1d(x, w, b, groups=2, padding=1), args)
    args = (torch.randn(2, 4, 9), torch.randn(4, 3, 3), torch.randn(6))
    check(lambda x, w, b: F.conv_transpose1d(x, w, b, groups=2, stride=2), args)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16])
def test_other_element_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = tuple((torch.randn(shape) * 4).to(dtype) for shape in ((1, 2, 8), (3, 2, 3)))
    tolerance = 5e-2 if dtype is torch.float16 else 1e-9
    check(lambda x, w: F.conv1d(x, w, padding=1), args, atol=tolerance)


@pytest.mark.parametrize("pad", [0, 2])
def test_a_convolution_over_the_first_axis(pad: int) -> None:
    """PyTorch knows its result for fixed sizes alone."""
    weight, bias = torch.randn(3, 4, 5), torch.randn(5)
    for shape in ((7, 2, 4), (3, 1, 4)):
        check(lambda x: torch.conv_tbc(x, weight, bias, pad), (torch.randn(shape),))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 3])
def test_each_channel_by_itself_with_dynamic_channels(stride: int, dilation: int) -> None:
    def filtered(x: torch.Tensor, kernels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": 2, "groups": x.shape[0]}
        return F.conv1d(x, kernels, bias, **options)

    def given(channels: int, length: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(channels, length), torch.randn(channels, 1, 4), torch.randn(channels)

    axes = {"input_0": {0: "C", 1: "T"}, "input_1": {0: "C"}, "input_2": {0: "C"}}
    check(filtered, given(5, 20), given(3, 11), given(1, 13), dynamic_axes=axes)


def test_a_picture_of_dynamic_channels() -> None:
    kernel = torch.randn(1, 1, 3, 2)

    def filtered(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, kernel.repeat(x.shape[1], 1, 1, 1), padding=(1, 0), groups=x.shape[1])

    sizes = [(torch.randn(batch, channels, 6, 7),) for batch, channels in ((2, 4), (1, 3), (3, 6))]
    check(filtered, *sizes, dynamic_axes={"input_0": {0: "B", 1: "C"}})
