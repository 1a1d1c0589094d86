"""The smoke set: small modules that are exported for a tract release, run in an engine of it, and compared with PyTorch.

In: a case, a release and an engine of it. Out: an `Outcome`. scripts/compatibility.py runs all of them in every engine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import DialectError, T2NError
from generic_export.inference_target.tract.engines.asking import ask_cli
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class SmokeCase:
    """A module and what it is run on.

    Attributes:
        name: how the table calls it.
        make: builds the module.
        inputs: builds the inputs of a size; called with two sizes.
        axes: dynamic axes of the inputs, in order.
        tolerance: absolute and relative.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    axes: tuple[dict[int, str], ...] = ({0: "N"},)
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What became of a case: `passed`, `refused` (by the dialect, with its reason) or `failed`."""

    case: str
    status: str
    reason: str = ""


class Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*args)


class Recurrent(nn.Module):
    """A recurrent layer's sequence of hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x)[0]
        return states


class LlamaBlock(nn.Module):
    """RMS norm, rotary causal attention, gated feed-forward: a decoder block as language models have it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3)),
            nn.Linear(width, width),
        )
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, self.head_dim, 2) / self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for layer in self.qkv
        )
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        query, key = (t * cos + _rotated(t) * sin for t in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class MelFrontEnd(nn.Module):
    """Log mel energies of a waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Tensor
        self.bank: Tensor
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("bank", torch.rand(9, 5))

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 16, 8, window=self.window, center=True, return_complex=True)
        return torch.log((spectrum.abs() ** 2).transpose(1, 2) @ self.bank + 1e-5)


def _randn(*shape: int) -> Callable[[int], Inputs]:
    """Return a maker of one normal tensor; -1 stands for the size, and 0 for the size plus 4."""
    return lambda size: (torch.randn([{-1: size, 0: size + 4}.get(dim, dim) for dim in shape]),)


def _ids(size: int) -> Inputs:
    return (torch.randint(0, 10, (size, 4)),)


def _scatter(x: Tensor) -> Tensor:
    index = torch.argsort(x, dim=1)
    return torch.zeros_like(x).scatter(1, index, x)


def _scatter_add(x: Tensor) -> Tensor:
    return x.scatter_add(1, torch.argsort(x, dim=1), x)


def _masked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.where(x > 0, x, x.exp()), (x > 0.5) ^ (x < 1.0), x.masked_fill(torch.isnan(x), 1.0)


def _cast(x: Tensor) -> tuple[Tensor, ...]:
    return x.to(torch.int64), x.half().float(), x.round().to(torch.int32) % 3, x > 0


_LENGTH = ({0: "N", 2: "L"},)
_SEQUENCE = ({0: "N", 1: "T"},)

CASES: tuple[SmokeCase, ...] = (
    SmokeCase("linear", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), _randn(-1, 6)),
    SmokeCase("conv1d", lambda: nn.Conv1d(3, 4, 3, padding=1, dilation=2), _randn(-1, 3, 0), _LENGTH),
    SmokeCase("conv2d groups", lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), _randn(-1, 4, 9, 7)),
    SmokeCase("conv_transpose1d", lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), _randn(-1, 3, 0), _LENGTH),
    SmokeCase("max_pool2d", lambda: nn.MaxPool2d(3, 2, padding=1), _randn(-1, 3, 9, 9)),
    SmokeCase("avg_pool2d padded", lambda: nn.AvgPool2d(3, 2, padding=1), _randn(-1, 3, 9, 9)),
    SmokeCase(
        "avg_pool2d not counting", lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), _randn(-1, 3, 9, 9)
    ),
    SmokeCase("avg_pool2d ceil", lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), _randn(-1, 3, 8, 7)),
    SmokeCase("avg_pool1d length", lambda: nn.AvgPool1d(3, 2, padding=1), _randn(-1, 3, 0), _LENGTH),
    SmokeCase("batch_norm", lambda: nn.BatchNorm2d(3), _randn(-1, 3, 5, 5)),
    SmokeCase("layer_norm", lambda: nn.LayerNorm(8), _randn(-1, 5, 8)),
    SmokeCase("group_norm", lambda: nn.GroupNorm(2, 4), _randn(-1, 4, 5)),
    SmokeCase("rms_norm", lambda: nn.RMSNorm(8, eps=1e-5), _randn(-1, 5, 8)),
    SmokeCase("softmax", lambda: Function(lambda x: x.softmax(-1) + x.log_softmax(1)), _randn(-1, 5)),
    SmokeCase("gelu", lambda: Function(lambda x: functional.gelu(x)), _randn(-1, 5)),
    SmokeCase("gelu tanh", lambda: nn.GELU(approximate="tanh"), _randn(-1, 5)),
    SmokeCase("silu, hardswish", lambda: nn.Sequential(nn.SiLU(), nn.Hardswish(), nn.Mish()), _randn(-1, 5)),
    SmokeCase("attention", lambda: Function(_attention), lambda n: tuple(torch.randn(n, 2, 5, 8) for _ in range(3)),
              ({0: "N"},) * 3),
    SmokeCase("multihead", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), _randn(-1, 0, 8), _SEQUENCE),
    SmokeCase("embedding", lambda: nn.Embedding(10, 6), _ids),
    SmokeCase("lstm", lambda: Recurrent(nn.LSTM(4, 6, batch_first=True, bidirectional=True)), _randn(-1, 0, 4), _SEQUENCE),
    SmokeCase("gru", lambda: Recurrent(nn.GRU(4, 6, batch_first=True)), _randn(-1, 0, 4), _SEQUENCE),
    SmokeCase("slices", lambda: Function(lambda x: (x[:, 1:-1:2], x[..., -2:], x.flip(1))), _randn(-1, 0, 5), _SEQUENCE),
    SmokeCase("gather", lambda: Function(lambda x: x.gather(1, x.argsort(1)) + x[:, [0, 2, 1, 3]]), _randn(-1, 4)),
    SmokeCase("scatter", lambda: Function(_scatter), _randn(-1, 4)),
    SmokeCase("scatter_add", lambda: Function(_scatter_add), _randn(-1, 4)),
    SmokeCase("reductions", lambda: Function(lambda x: (x.sum(1), x.amax((0, 1)), x.mean(-1), x.var(1), x.prod(1))),
              _randn(-1, 0), _SEQUENCE),
    SmokeCase("sort, topk", lambda: Function(lambda x: (x.sort(1).values, x.topk(2, 1).values, x.argmax(1))), _randn(-1, 5)),
    SmokeCase("cumsum", lambda: Function(lambda x: (x.cumsum(1), x.flip(1).cumsum(1))), _randn(-1, 0), _SEQUENCE),
    SmokeCase("casts", lambda: Function(_cast), _randn(-1, 5)),
    SmokeCase("where, masks", lambda: Function(_masked), _randn(-1, 5)),
    SmokeCase("powers", lambda: Function(lambda x: (x**2, x**3, x.abs() ** 0.5, x.abs() ** 1.7, x**-2)), _randn(-1, 5)),
    SmokeCase("integer division", lambda: Function(lambda x: (x // 3, x % 4, x // -3)),
              lambda n: (torch.arange(-7, -7 + 4 * n).reshape(n, 4),)),
    SmokeCase("resize", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), _randn(-1, 2, 5, 4)),
    SmokeCase("grid_sample", lambda: Function(lambda x, g: functional.grid_sample(x, g, align_corners=False)),
              lambda n: (torch.randn(n, 2, 5, 4), torch.rand(n, 3, 3, 2) * 1.6 - 0.8), ({0: "N"}, {0: "N"})),
    SmokeCase("triangular", lambda: Function(lambda x: (x.tril(), x.triu(1))), _randn(-1, 5, 5)),
    SmokeCase("llama block", LlamaBlock, _randn(-1, 0, 16), _SEQUENCE),
    SmokeCase("mel front end", MelFrontEnd, lambda n: (torch.randn(n, 32 + 8 * n),), _SEQUENCE),
)  # fmt: skip


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


SIZES = (3, 5)


def judge(case: SmokeCase, version: str, engine: TractWheel | TractCli) -> Outcome:
    """Export one case for one release, run it there at both sizes and compare with PyTorch."""
    torch.manual_seed(0)
    module = case.make().eval()
    names = [f"input_{index}" for index in range(len(case.axes))]
    target = TractNNEF(version=version, dynamic_axes=dict(zip(names, case.axes, strict=True)), check_io=False)
    inputs = [case.inputs(size) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        try:
            archive = export_model_to_nnef(module, inputs[0], Path(folder) / "smoke.nnef", target, input_names=names)
            for values, answers in zip(inputs, _answers(engine, archive, inputs), strict=True):
                compare(module, values, answers, case.tolerance)
        except DialectError as error:
            return Outcome(case.name, "refused", error.message)
        except (T2NError, AssertionError) as error:
            return Outcome(case.name, "failed", " ".join(str(error).split())[:300])
    return Outcome(case.name, "passed")


def _answers(engine: TractWheel | TractCli, archive: Path, inputs: Sequence[Inputs]) -> list[list[np.ndarray]]:
    arrays = [[value.numpy() for value in values] for values in inputs]
    if isinstance(engine, TractCli):
        return [ask_cli(engine, archive, each, registries=DEFAULT_REGISTRIES) for each in arrays]
    with engine.load(archive) as model:
        return [model.run(each) for each in arrays]


def compare(module: nn.Module, inputs: Inputs, answers: Sequence[np.ndarray], tolerance: float) -> None:
    """Raise `AssertionError` where an engine's answers are not PyTorch's."""
    with torch.no_grad():
        result = module(*inputs)
    expected = [result] if isinstance(result, Tensor) else list(result)
    for answer, reference in zip(answers, expected, strict=True):
        if answer.dtype != reference.numpy().dtype:
            raise AssertionError(f"element type {answer.dtype}, PyTorch has {reference.dtype}")
        np.testing.assert_allclose(answer, reference.numpy(), rtol=tolerance, atol=tolerance)
