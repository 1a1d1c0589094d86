"""Normalisations in the engine, at the size they were exported with and at others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine_check import check

IMAGE_AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}


def _trained(layer: nn.Module) -> nn.Module:
    """Give a norm parameters and statistics that differ from their defaults."""
    torch.manual_seed(0)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data = torch.rand_like(tensor) + 0.5
    return layer.eval()


IMAGE_NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(6),
    "batch_no_affine": lambda: nn.BatchNorm2d(6, affine=False),
    "batch_no_statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "group": lambda: nn.GroupNorm(3, 6),
    "group_of_one": lambda: nn.GroupNorm(1, 6, affine=False),
    "instance": lambda: nn.InstanceNorm2d(6),
    "instance_affine": lambda: nn.InstanceNorm2d(6, affine=True),
    "instance_statistics": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    "local_response": lambda: nn.LocalResponseNorm(3),
    "conv_batch": lambda: nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)),
}


@pytest.mark.parametrize("name", IMAGE_NORMS)
def test_image_norms_at_two_sizes(name: str) -> None:
    layer = _trained(IMAGE_NORMS[name]())
    sample, other = (torch.randn(2, 6, 5, 7) * 3 + 1,), (torch.randn(3, 6, 8, 4),)
    check(layer, sample, other, dynamic_axes=IMAGE_AXES)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.InstanceNorm1d(6), nn.GroupNorm(2, 6)])
def test_norms_of_sequences(layer: nn.Module) -> None:
    axes = {"input_0": {0: "B", 2: "L"}}
    check(_trained(layer), (torch.randn(2, 6, 5),), (torch.randn(3, 6, 9),), dynamic_axes=axes)


def test_norms_of_rows_and_volumes() -> None:
    check(_trained(nn.BatchNorm1d(6)), (torch.randn(4, 6),), (torch.randn(2, 6),), dynamic_axes={"input_0": {0: "B"}})
    check(_trained(nn.BatchNorm3d(2)), (torch.randn(1, 2, 3, 4, 5),))
    check(_trained(nn.GroupNorm(2, 4)), (torch.randn(2, 4, 3, 4, 5),))
    check(nn.InstanceNorm2d(3), (torch.randn(3, 4, 5),))


LAST_AXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_over_two_axes": _trained(nn.LayerNorm((6, 8))),
    "layer_without_bias": _trained(nn.LayerNorm(8, bias=False)),
    "layer_over_everything": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_over_two_axes": _trained(nn.RMSNorm((6, 8), eps=1e-4)),
    "normalize": lambda x: F.normalize(x, dim=1),
    "normalize_p1": lambda x: F.normalize(x, p=1.0, dim=-1),
    "layer_of_channels_first": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("name", LAST_AXES)
def test_norms_over_last_axes(name: str) -> None:
    sample, other = (torch.randn(2, 4, 6, 8) * 2 + 1,), (torch.randn(5, 4, 6, 8),)
    check(LAST_AXES[name], sample, other, dynamic_axes={"input_0": {0: "B"}})


def test_weights_as_graph_inputs() -> None:
    args = (torch.randn(2, 6, 5), torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6))
    check(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), args)
    check(lambda x, w, b: F.group_norm(x, 2, w, b), args[:3])
    check(lambda x, w, b: F.layer_norm(x, (5,), w[:5], b[:5]), args[:3])


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_pictures_of_any_size(groups: int) -> None:
    """Heights and widths are never multiplied into the size of a tensor, which tract's load takes minutes to reason about."""
    stem = nn.Conv2d(3, 8, 7, 4, 2)
    model = nn.Sequential(stem, *(_trained(nn.GroupNorm(groups, 8)) for _ in range(2))).eval()
    axes = {"input_0": {0: "B", 2: "H", 3: "W"}}
    graph = check(model, (torch.randn(2, 3, 32, 48),), (torch.randn(1, 3, 64, 36),), dynamic_axes=axes)
    joined = [line for line in graph.splitlines() if "((H-3)/4)*((W-3)/4)" in line]
    assert all("tract_core_cast" in line for line in joined)


def test_f16_statistics_are_taken_in_f32() -> None:
    check(nn.GroupNorm(2, 4).half(), ((torch.randn(1, 4, 30, 30) * 200).half(),), atol=5e-3, rtol=5e-3)


def test_precise_layer_norm_of_doubles() -> None:
    check(nn.LayerNorm(8).double(), (torch.randn(2, 3, 8, dtype=torch.float64),), atol=1e-10)
