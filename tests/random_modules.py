"""Small random modules that cut, pad, join, pool and compare axes of any size, each made from a seed.

In: a seed. Out: a `RandomModule` of one to four steps with an example, whose text says what it computes. Used by
`scripts/random_sizes.py` and by the tests of dynamic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = 4
LARGEST_EXAMPLE, LARGEST = 14, 40
TABLE_ROWS = 64

Step = Callable[[torch.Tensor, torch.Tensor, "Numbers"], torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """What a step is made with: two small numbers, a table of rows, and a kernel of a convolution."""

    a: int
    b: int
    table: torch.Tensor
    kernel: torch.Tensor


def _pooled(kind: str, *, ceil_mode: bool) -> Step:
    pool = getattr(F, f"{kind}_pool1d")

    def step(v: torch.Tensor, y: torch.Tensor, n: Numbers) -> torch.Tensor:
        size, stride = min(n.a, 4), min(n.b, 3)
        return pool(v.transpose(1, 2), size, stride, ceil_mode=ceil_mode).transpose(1, 2)

    return step


def _center(v: torch.Tensor, y: torch.Tensor, n: Numbers) -> torch.Tensor:
    middle = v.shape[1] // 2
    return v[:, middle - 1 : middle + n.a]


def _pairs(v: torch.Tensor, y: torch.Tensor, n: Numbers) -> torch.Tensor:
    half = v.shape[1] // 2
    return v[:, : 2 * half].reshape(v.shape[0], half, 2 * CHANNELS)[..., :CHANNELS]


def _triangle(v: torch.Tensor, y: torch.Tensor, n: Numbers) -> torch.Tensor:
    return (v @ v.transpose(1, 2)).tril() @ v / CHANNELS


def _positions(v: torch.Tensor, y: torch.Tensor, n: Numbers) -> torch.Tensor:
    return v + torch.arange(v.shape[1], dtype=v.dtype)[:, None] / 8


STEPS: dict[str, Step] = {
    "v[:, :a]": lambda v, y, n: v[:, : n.a],
    "v[:, -a:]": lambda v, y, n: v[:, -n.a :],
    "v[:, a:]": lambda v, y, n: v[:, n.a :],
    "v[:, :-a]": lambda v, y, n: v[:, : -n.a],
    "v[:, a:a + b]": lambda v, y, n: v[:, n.a : n.a + n.b],
    "v[:, T // 2 - 1 : T // 2 + a]": _center,
    "v[:, : T // 2]": lambda v, y, n: v[:, : v.shape[1] // 2],
    "v[:, T // 2 :]": lambda v, y, n: v[:, v.shape[1] // 2 :],
    "v[:, ::b]": lambda v, y, n: v[:, :: n.b],
    "v[:, : y.shape[1]]": lambda v, y, n: v[:, : y.shape[1]],
    "pad(a, b)": lambda v, y, n: F.pad(v, (0, 0, n.a, n.b)),
    "pad to a multiple of a": lambda v, y, n: F.pad(v, (0, 0, 0, -v.shape[1] % n.a)),
    "pairs": _pairs,
    "cat(v, v[:, :a])": lambda v, y, n: torch.cat([v, v[:, : n.a]], 1),
    "cat(v, y)": lambda v, y, n: torch.cat([v, y], 1),
    "avg_pool1d": _pooled("avg", ceil_mode=False),
    "avg_pool1d, ceil_mode": _pooled("avg", ceil_mode=True),
    "max_pool1d, ceil_mode": _pooled("max", ceil_mode=True),
    "conv1d": lambda v, y, n: F.conv1d(v.transpose(1, 2), n.kernel, stride=min(n.b, 3), padding=1).transpose(1, 2),
    "chunk(b)[0]": lambda v, y, n: v.chunk(n.b, 1)[0],
    "split(a)[0]": lambda v, y, n: v.split(n.a, 1)[0],
    "tensor_split(b)[0]": lambda v, y, n: v.tensor_split(n.b, 1)[0],
    "roll": lambda v, y, n: v.roll(n.a, 1),
    "flip": lambda v, y, n: v.flip(1),
    "cumsum": lambda v, y, n: v.cumsum(1) / 8,
    "sort": lambda v, y, n: v.sort(1).values,
    "v + table[:T]": lambda v, y, n: v + n.table[: v.shape[1]],
    "v + arange": _positions,
    "v[1:] - v[:-1]": lambda v, y, n: v[:, 1:] - v[:, :-1],
    "unfold": lambda v, y, n: v.unfold(1, n.a, n.b).mean(-1),
    "tril": _triangle,
    "interpolate": lambda v, y, n: F.interpolate(v.transpose(1, 2), scale_factor=2, mode="linear").transpose(1, 2),
    "if T > a": lambda v, y, n: v[:, : n.a] if v.shape[1] > n.a else 2 * v,
}
BRANCHES = frozenset({"if T > a"})
"""Steps that branch on a size in Python: an archive contains one of the two branches."""


class RandomModule(nn.Module):
    """Steps one after another, of `x` [B, T, 4] and `y` [B, U, 4]; whether y is read depends on the steps.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = Random(seed)
        torch.manual_seed(seed)
        self.register_buffer("table", torch.randn(TABLE_ROWS, CHANNELS))
        self.register_buffer("kernel", torch.randn(CHANNELS, CHANNELS, 3) / 4)
        names = list(STEPS)
        self.steps = [(dice.choice(names), dice.randint(1, 9), dice.randint(1, 4)) for _ in range(dice.randint(1, 4))]
        self.example_sizes = tuple(dice.randint(1, most) for most in (3, LARGEST_EXAMPLE, LARGEST_EXAMPLE))
        self._dice = dice

    @property
    def has_branches(self) -> bool:
        """Whether a step goes another way at other sizes."""
        return any(name in BRANCHES for name, _, _ in self.steps)

    @property
    def text(self) -> str:
        """The steps with their numbers, and the sizes of the example."""
        steps = "; ".join(f"{name} (a={a}, b={b})" for name, a, b in self.steps)
        return f"{steps}; example B, T, U = {self.example_sizes}"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return [B, n, 4]."""
        v = x
        for name, a, b in self.steps:
            v = STEPS[name](v, y, Numbers(a, b, self.table, self.kernel))  # type: ignore[arg-type]
        return v + y.mean()

    def inputs(self, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs of some sizes B, T and U."""
        batch, length, other = sizes
        return torch.randn(batch, length, CHANNELS), torch.randn(batch, other, CHANNELS)

    def other_sizes(self, count: int) -> list[tuple[int, int, int]]:
        """Return sizes to compare at, from 1 to 40, among them some beside the numbers of the steps."""
        numbers = [a + step for _, a, _ in self.steps for step in (-1, 0, 1) if a + step > 0]
        found: list[tuple[int, int, int]] = []
        for place in range(count):
            length = self._dice.choice(numbers) if place % 2 else self._dice.randint(1, LARGEST)
            found.append((self._dice.randint(1, 3), length, self._dice.randint(1, LARGEST)))
        return found
