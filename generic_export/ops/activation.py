"""Activations that tract has an operator for, or that need care at the ends of their range."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from generic_export.errors import TranslationError
from generic_export.ops.elementwise import arithmetic
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.translate.builder import NnefBuilder, Scalar, Value
from generic_export.translate.operands import floating
from generic_export.translate.registry import translates

aten = torch.ops.aten


@translates(aten.relu.default)
def relu(b: NnefBuilder, self: Value) -> Value:
    """relu(Tensor self) -> Tensor"""
    if self.dtype.is_floating_point:
        return b.unary("relu", self)
    return b.binary("max", self, b.scalar(0, self.dtype))


@translates(aten.sigmoid.default)
def sigmoid(b: NnefBuilder, self: Value) -> Value:
    """sigmoid(Tensor self) -> Tensor"""
    value = floating(b, self)
    if value.dtype is torch.float16:
        return b.unary("sigmoid", value)
    # tract: no f64 kernel, and the one for f32 stops at 4.5e-7 where PyTorch goes to 0, 1.7e-3 off at -10. A decay
    # exp(-5 * sigmoid(x)) that is 1 forgets 2e-6 of its state a step with it
    # (docs/contributing/engine-facts.md#numerical-limits-of-operators).
    return b.unary("recip", b.binary("add", b.unary("exp", b.unary("neg", value)), b.scalar(1.0, value.dtype)))


@translates(aten.silu.default)
def silu(b: NnefBuilder, self: Value) -> Value:
    """silu(Tensor self) -> Tensor"""
    if self.dtype is torch.float64:
        return b.binary("mul", self, sigmoid(b, self))
    return b.unary("tract_core_silu", self)


@translates(aten.gelu.default)
def gelu(b: NnefBuilder, self: Value, *, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    value = b.cast(self, torch.float32) if self.dtype is torch.float64 else self  # tract: no f64 kernel
    if approximate == "tanh":
        # docs/contributing/engine-facts.md#operators-of-tract_core: fast_impl=true is x^2, not GELU.
        attributes = {"fast_impl": False}
        result = b.emit("tract_core_gelu_approx", [value], shape=self.shape, dtype=value.dtype, attributes=attributes)
    else:
        result = b.fragment("gelu_exact", [value], shape=self.shape, dtype=value.dtype)
    return b.cast(result, self.dtype)


@translates(aten.softplus.default)
def softplus(b: NnefBuilder, self: Value, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    # docs/contributing/engine-facts.md#equivalents-of-pytorch-operators: tract's softplus is log(exp(x)+1),
    # infinite for x > 88.
    scaled = arithmetic(b, "mul", self, float(beta)) if beta != 1 else self
    limit = b.scalar(float(threshold), self.dtype)
    smooth = b.unary("softplus", b.binary("min", scaled, limit))
    if beta != 1:
        smooth = b.binary("div", smooth, b.scalar(float(beta), self.dtype))
    return b.select(b.binary("gt", scaled, limit, dtype=torch.bool), self, smooth)


@translates(aten.hardswish.default)
def hardswish(b: NnefBuilder, self: Value) -> Value:
    """hardswish(Tensor self) -> Tensor"""
    if self.dtype is not torch.float64:
        return b.unary("tract_core_hard_swish", self)
    sixth, half = b.scalar(1 / 6, self.dtype), b.scalar(0.5, self.dtype)
    gate = b.binary("add", b.binary("mul", self, sixth), half)
    clamped = b.binary("min", b.binary("max", gate, b.scalar(0.0, self.dtype)), b.scalar(1.0, self.dtype))
    return b.binary("mul", self, clamped)


@rewrites(aten.elu.default)
def elu(self: torch.Tensor, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> torch.Tensor:
    """ELU, accurate near 0: PyTorch's own decomposition computes in the same way, but through in-place steps."""
    negative = torch.expm1(torch.clamp(self * input_scale, max=0)) * (alpha * scale)
    return torch.where(self > 0, self * scale, negative)


@rewrites(aten.log_sigmoid.default)
def log_sigmoid(self: torch.Tensor) -> torch.Tensor:
    """log(sigmoid(x)); tract's sigmoid stops at 4.5e-7, so that its logarithm would."""
    return torch.clamp(self, max=0) - torch.log1p(torch.exp(-self.abs()))


@rewrites(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log_sigmoid and a buffer that only gradients read."""
    return log_sigmoid(self), self.new_zeros((0,))


@rewrites(aten.prelu.default, aten._prelu_kernel.default)
def prelu(self: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PReLU: one slope per channel (axis 1), or one for all."""
    if weight.dim() == 1 and weight.numel() == 1:
        weight = weight.reshape([])
    elif weight.dim() == 1 and self.dim() > 1:
        weight = weight.reshape([-1 if axis == 1 else 1 for axis in range(self.dim())])
    return torch.where(self > 0, self, self * weight)


@rewrites(aten.mish.default)
def mish(self: torch.Tensor) -> torch.Tensor:
    """x * tanh(softplus(x))"""
    return self * torch.tanh(F.softplus(self))


@rewrites(aten.hardshrink.default)
def hardshrink(self: torch.Tensor, lambd: Scalar = 0.5) -> torch.Tensor:
    """x outside [-lambd, lambd], else 0."""
    return torch.where(self.abs() <= lambd, 0.0, self).to(self.dtype)


@rewrites(aten.softshrink.default)
def softshrink(self: torch.Tensor, lambd: Scalar = 0.5) -> torch.Tensor:
    """x moved by lambd towards 0, which it does not cross."""
    return self.sign() * torch.clamp(self.abs() - lambd, min=0)


@rewrites(aten.rrelu.default)
def rrelu(
    self: torch.Tensor, lower: Scalar = 0.125, upper: Scalar = 1 / 3, training: bool = False, generator: object = None
) -> torch.Tensor:
    """Leaky ReLU with the mean slope, outside training."""
    if training:
        raise TranslationError("rrelu draws random slopes in training mode.", "Call model.eval() first.")
    return torch.where(self >= 0, self, self * ((lower + upper) / 2))


@rewrites(aten.hardtanh.default)
def hardtanh(self: torch.Tensor, min_val: Scalar = -1, max_val: Scalar = 1) -> torch.Tensor:
    """x between two bounds."""
    return torch.clamp(self, min_val, max_val)


@translates(aten.leaky_relu.default)
def leaky_relu(b: NnefBuilder, self: Value, negative_slope: Scalar = 0.01) -> Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    slope = b.scalar(float(negative_slope), self.dtype)
    if self.dtype is torch.float64:  # tract: no f64 kernel
        positive = b.binary("gt", self, b.scalar(0.0, self.dtype), dtype=torch.bool)
        return b.select(positive, self, b.binary("mul", self, slope))
    attributes = {"alpha": float(negative_slope)}
    return b.emit("leaky_relu", [self], shape=self.shape, dtype=self.dtype, attributes=attributes)


@rewrites(aten._log_softmax.default)
def log_softmax(self: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    """x - log(sum(exp(x))), without overflow."""
    wide = self.to(torch.float32) if half_to_float else self
    shifted = wide - wide.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


@rewrites(aten.log_softmax.int)
def log_softmax_int(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax, in another element type when one is given."""
    return log_softmax(self if dtype is None else self.to(dtype), dim)
