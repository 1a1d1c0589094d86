"""Eager `torch.ao` models, calibrated and converted, against PyTorch's own quantised kernels."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.nn.quantized as eager
import torch.ao.quantization as ao
from torch import Tensor, nn
from torch.nn import functional

from generic_export import TractNNEF
from generic_export.errors import UnsupportedOperatorError
from generic_export.torch_graph.capture.quantised_modules import spelled_out
from tests.engine_check import check

BATCH = {"input_0": {0: "N"}}


class Wrapped(nn.Module):
    """Quantises its input, runs a float model that was converted, dequantises."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.quant, self.inner, self.dequant = ao.QuantStub(), inner, ao.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


def converted(
    inner: nn.Module, shape: tuple[int, ...], fuse: list[list[str]] | None = None, backend: str = "x86"
) -> nn.Module:
    """Calibrate on noise and convert to int8."""
    model = Wrapped(inner).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fuse:
            ao.fuse_modules(model, fuse, inplace=True)
        model.qconfig = ao.get_default_qconfig(backend)
        ao.prepare(model, inplace=True)
        for _ in range(3):
            model(torch.randn(16, *shape))
        return ao.convert(model, inplace=True)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.relu = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()
        self.conv_2 = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.add, self.cat, self.scale = (eager.FloatFunctional() for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.relu(self.conv_1(x)), 2)
        y = self.add.add(x, self.conv_2(x))
        z = self.cat.cat([y, self.scale.mul(x, y)], 1)
        return self.head(functional.adaptive_avg_pool2d(z, 1).flatten(1))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(9, 7)), (9,), None),
    "linear relu": (lambda: nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)), (9,), [["inner.0", "inner.1"]]),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3, padding=2, dilation=2)), (3, 12), None),
    "conv2d relu": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.ReLU()),
        (3, 9, 8),
        [["inner.0", "inner.1"]],
    ),
    "conv2d batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()),
        (3, 9, 8),
        [["inner.0", "inner.1", "inner.2"]],
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Hardswish()), (4, 7, 7), None),
    "activations": (lambda: nn.Sequential(nn.Linear(9, 7), nn.LeakyReLU(0.1), nn.ReLU6(), nn.ELU()), (9,), None),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(45, 3)),
        (3, 8, 8),
        None,
    ),
    # Some releases of PyTorch round the channels that fill a vector otherwise than the rest.
    "pooling of 33 channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 33, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(297, 3)),
        (3, 8, 8),
        None,
    ),
    "residual": (Residual, (3, 8, 8), [["inner.conv_1", "inner.relu"]]),
}


# The observers of "qnnpack" use all 8 bits; products of such numbers saturate in PyTorch's kernels for older processors.
ALL_BITS = pytest.param(
    "qnnpack",
    marks=pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="PyTorch's kernels saturate here: no VNNI"),
)


@pytest.mark.parametrize("backend", ["x86", ALL_BITS])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_pytorchs_quantised_result(name: str, backend: str) -> None:
    torch.manual_seed(0)
    make, shape, fuse = MODELS[name]
    model = converted(make(), shape, fuse, backend)
    before = copy.copy(dict(model.named_modules()))
    check(model, (torch.randn(3, *shape),), (torch.randn(7, *shape),), dynamic_axes=BATCH, rtol=0, atol=1e-6)
    assert dict(model.named_modules()) == before


def test_linear_and_convolution_run_on_integer_kernels() -> None:
    torch.manual_seed(0)
    model = converted(Residual(), (3, 8, 8), [["inner.conv_1", "inner.relu"]])
    text = check(model, (torch.randn(2, 3, 8, 8),), dynamic_axes=BATCH, rtol=0, atol=1e-6)
    assert text.count("tract_core_qconv(") == 2
    assert text.count("tract_core_einsum_q(") == 1
    assert " conv(" not in text


def test_a_quantised_result_is_compared_dequantised(tmp_path: object) -> None:
    from generic_export import export_model_to_nnef

    model = converted(nn.Sequential(nn.Linear(4, 3)), (4,))
    model.dequant = nn.Identity()
    export_model_to_nnef(model, torch.randn(2, 4), f"{tmp_path}/m.nnef", TractNNEF())


def test_a_module_without_a_form_is_named() -> None:
    model = converted(nn.Sequential(nn.Linear(4, 3), nn.PReLU()), (4,), backend="qnnpack")
    with pytest.raises(UnsupportedOperatorError, match=r"PReLU at inner\.1"), spelled_out(model):
        pass
    assert type(model.inner[1]) is eager.PReLU
