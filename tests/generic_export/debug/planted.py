"""Faults to plant in a model, each a module that computes something sensible and cannot be exported, or is exported wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.translate.builder import NnefBuilder, Value, ints
from generic_export.translate.modules import translates_module


class DataDependentBranch(nn.Module):
    """Takes another way for some values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the branch
            return torch.nn.functional.silu(x)
        return torch.relu(x)


class DecidedByPython(nn.Module):
    """Takes another way for some values, and computes with what Python made of them: no script has it, a trace freezes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = max(float(x.sum()), 1e-6, key=abs)  # the decision
        return torch.nn.functional.silu(x) * total


class UnsupportedOperator(nn.Module):
    """Needs an operator that has no translation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.transpose(-1, -2) @ x
        return x + torch.linalg.ldl_factor_ex(square)[0].sum()  # the operator


class WithFaultBehind(nn.Module):
    """A module and, in code of its own, an operator that has no translation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = self.inner(*args, **kwargs)
        return x + torch.linalg.ldl_factor_ex(x.transpose(-1, -2) @ x)[0].sum()


class FrozenAxis(nn.Module):
    """Asks for the number behind a dynamic size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = len(range(x.shape[1]))  # the freeze
        return torch.nn.functional.silu(x) * float(steps if steps > 3 else 1)


class RmsNorm(nn.Module):
    """Root mean square norm, whose translation below gets its epsilon wrong."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # the forward
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class WrongEpsilon(RmsNorm):
    """A norm that is exported with another epsilon."""


@translates_module(WrongEpsilon)
def wrong_epsilon(b: NnefBuilder, module: WrongEpsilon, inputs: Sequence[Value], state: Mapping[str, Value]) -> Value:
    """The planted fault: the epsilon is a hundred times too large."""
    (x,) = inputs
    square = b.binary("mul", x, x)
    axes = {"axes": ints([x.rank - 1])}
    mean = b.emit("mean_reduce", [square], shape=(*x.shape[:-1], 1), dtype=x.dtype, attributes=axes)
    wrong = b.binary("add", mean, b.scalar(100 * module.epsilon, x.dtype))
    scaled = b.binary("mul", x, b.unary("rsqrt", wrong))
    return b.binary("mul", scaled, b.align_rank(state["weight"], x.rank))


class HalfNorm(RmsNorm):
    """A norm that PyTorch computes in f32, and the translation below only when it is told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


@translates_module(HalfNorm)
def half_norm(b: NnefBuilder, module: HalfNorm, inputs: Sequence[Value], state: Mapping[str, Value]) -> Value:
    """The planted fault: one per cent off, unless norms are computed in f32."""
    (given,) = inputs
    x = b.cast(given, torch.float32)
    axes = {"axes": ints([x.rank - 1])}
    mean = b.emit("mean_reduce", [b.binary("mul", x, x)], shape=(*x.shape[:-1], 1), dtype=x.dtype, attributes=axes)
    scaled = b.binary("mul", x, b.unary("rsqrt", b.binary("add", mean, b.scalar(module.epsilon, x.dtype))))
    if not b.numerics.f32_norm:
        scaled = b.binary("mul", scaled, b.scalar(1.01, x.dtype))
    return b.binary("mul", b.cast(scaled, given.dtype), b.align_rank(state["weight"], x.rank))


def line_of(kind: type[Any], comment: str) -> str:
    """Return `file.py:line` of the line of a class that ends with a comment."""
    lines, first = inspect.getsourcelines(kind)
    number = next(index for index, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))
    return f"{Path(inspect.getfile(kind)).name}:{first + number}"
