#!/usr/bin/env python3
"""Three ways to teach the exporter something new: an operator of your own, a fragment of your own, a whole module.

usage: examples/custom_operator.py [FOLDER]

Writes an archive to FOLDER (default: a temporary one), checks it in tract, and prints its graph.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.nnef.graph import NnefFragment
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.modules import translates_module
from generic_export.translate.registry import translates

# --- 1. an operator of your own, written as a fragment of your own ----------------------------------


@torch.library.custom_op("example::mish", mutates_args=())
def mish(x: torch.Tensor) -> torch.Tensor:
    """x * tanh(softplus(x)), as PyTorch computes it."""
    return x * torch.tanh(nn.functional.softplus(x))


@mish.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


MISH = NnefFragment(
    "example_mish",
    """
# Mish (Misra 2019). The minimum keeps exp finite; beyond it softplus(x) is x.
fragment example_mish(x: tensor<scalar>) -> (y: tensor<scalar>)
{
  y = x * tanh(log(1.0 + exp(min(x, 20.0))));
}
""",
)


@translates(torch.ops.example.mish.default)
def translate_mish(b: NnefBuilder, x: Value) -> Value:
    """example::mish(Tensor x) -> Tensor"""
    return b.fragment(MISH, [x], shape=x.shape, dtype=x.dtype)


# --- 2. every instance of a module as one unit -------------------------------------------------------


class Scale(nn.Module):
    """Multiplies each feature by its own factor, in a way that we want to see as one line of the graph."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.exp(torch.log(x.abs()) + torch.log(self.factor)) * torch.sign(x)


@translates_module(Scale)
def translate_scale(b: NnefBuilder, module: Scale, inputs: Sequence[Value], state: Mapping[str, Value]) -> Value:
    """The same numbers with one product."""
    return b.binary("mul", inputs[0], state["factor"])


class Model(nn.Module):
    """A layer, the unit, the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.scale = Scale(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4] -> [N, 8]"""
        result: torch.Tensor = torch.ops.example.mish(self.scale(self.layer(x)))
        return result


def main(folder: Path) -> str:
    """Export the model, checked in the engine, and return the text of its graph."""
    target = TractNNEF(dynamic_axes={"x": {0: "N"}})
    archive = export_model_to_nnef(Model(), torch.randn(3, 4), folder / "model", target, compression_level=None)
    return (archive / "graph.nnef").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary)))
