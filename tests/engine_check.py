"""`check`: export a module, run it in the real engine at one or several sizes, compare each with PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export import DynamicSize, TractNNEF, export_model_to_nnef
from generic_export.inference_target.example import as_array
from generic_export.inference_target.tract.engines.wheel import TractWheel

Arguments = tuple[torch.Tensor, ...]


class Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def check(
    model: nn.Module | Callable[..., Any],
    args: Arguments,
    *other_args: Arguments,
    dynamic_axes: Mapping[str, Mapping[int, str | DynamicSize]] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    target: TractNNEF | None = None,
) -> str:
    """Export with `args`, compare in tract with `args` and each of `other_args`; returns the text of the graph."""
    module = model if isinstance(model, nn.Module) else Function(model)
    names = [f"input_{index}" for index in range(len(args))]
    target = target or TractNNEF(dynamic_axes=dynamic_axes or {}, check_io=False)
    with tempfile.TemporaryDirectory() as folder:
        archive = export_model_to_nnef(
            module, args, Path(folder) / "model.nnef", target, input_names=names, compression_level=None
        )
        with TractWheel(timeout_seconds=60).load(archive) as engine:
            for arguments in (args, *other_args):
                _compare(module, arguments, engine.run([as_array(value) for value in arguments]), rtol, atol)
        return (archive / "graph.nnef").read_text()


def _compare(module: nn.Module, args: Arguments, answers: Sequence[np.ndarray], rtol: float, atol: float) -> None:
    with torch.no_grad():
        expected = module.eval()(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    assert len(answers) == len(expected)
    for answer, reference in zip(answers, expected, strict=True):
        wanted = as_array(reference)
        assert answer.dtype == wanted.dtype
        np.testing.assert_allclose(answer, wanted, rtol=rtol, atol=atol)
