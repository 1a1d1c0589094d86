#!/usr/bin/env python3
"""Measure what an export costs beyond torch.export: ResNet-50 and BERT-base with random weights, no check, to a folder.

usage: scripts/bench_capture.py [--models resnet50,bert] [--repeat N] [--json]

Each repeat runs, in one fresh process and in turn, `torch.export.export` alone and `export_model_to_nnef` of the same model
with the same dynamic axes, after a warm-up of both on a small module. Printed: medians and their ratio; the budget is 1.5.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

BUDGET = 1.5
Axes = dict[str, dict[int, Any]]
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of ResNet-50


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, 4 * width, H / stride, W / stride]."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> tuple[nn.Module, tuple[torch.Tensor, ...], Axes]:
    """Return the model, its arguments and its dynamic axes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, blocks, stride in STAGES:
        for index in range(blocks):
            layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return model, (torch.randn(2, 3, 224, 224),), {"input": {0: "B"}}


def bert() -> tuple[nn.Module, tuple[torch.Tensor, ...], Axes]:
    """Return BERT-base, its arguments and its dynamic axes."""
    from transformers import BertConfig, BertModel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertModel(BertConfig())

        def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input, attention_mask=attention_mask).last_hidden_state

    length = torch.export.Dim("T", max=512)
    axes: Axes = {"input": {0: "B", 1: length}, "attention_mask": {0: "B", 1: length}}
    return Encoder(), (torch.randint(0, 30000, (2, 128)), torch.ones(2, 128, dtype=torch.int64)), axes


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...], Axes]]] = {
    "resnet50": resnet50,
    "bert": bert,
}


def capture_alone(model: nn.Module, args: tuple[torch.Tensor, ...], axes: Axes) -> float:
    """Return the seconds that torch.export takes."""
    symbols = {symbol for named in axes.values() for symbol in named.values()}
    dims = {symbol: torch.export.Dim(symbol) if isinstance(symbol, str) else symbol for symbol in symbols}
    shapes = tuple({axis: dims[symbol] for axis, symbol in named.items()} for named in axes.values())
    start = time.perf_counter()
    with torch.no_grad():
        torch.export.export(model, args, dynamic_shapes=shapes, strict=False)
    return time.perf_counter() - start


def whole_export(model: nn.Module, args: tuple[torch.Tensor, ...], axes: Axes) -> float:
    """Return the seconds that `export_model_to_nnef` takes."""
    from generic_export import TractNNEF, export_model_to_nnef

    with tempfile.TemporaryDirectory(prefix="bench-capture-") as folder:
        target = TractNNEF(dynamic_axes=axes, check_io=False)
        start = time.perf_counter()
        export_model_to_nnef(model, args, Path(folder) / "m", target, input_names=list(axes), compression_level=None)
        return time.perf_counter() - start


def measure(name: str) -> tuple[float, float]:
    """Return both times for one model, in this process."""
    warnings.simplefilter("ignore")
    small = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),), {"input": {0: "B"}}
    capture_alone(*small)
    whole_export(*small)
    model, args, axes = MODELS[name]()
    model.eval()
    return capture_alone(model, args, axes), whole_export(model, args, axes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma list of " + ", ".join(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object a model")
    options = parser.parse_args()
    names = options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: choose from {', '.join(MODELS)}")
    context = multiprocessing.get_context("spawn")
    for name in names:
        runs = []
        for _ in range(options.repeat):
            with context.Pool(1) as pool:
                runs.append(pool.apply(measure, (name,)))
        alone, whole = (median(times) for times in zip(*runs, strict=True))
        ratio = median(second / first for first, second in runs)
        record = {
            "model": name,
            "torch_export_s": alone,
            "export_s": whole,
            "ratio": ratio,
            "within_budget": ratio <= BUDGET,
        }
        text = f"{name:<10} torch.export {alone:6.2f} s   export_model_to_nnef {whole:6.2f} s   ratio {ratio:.2f}"
        print(json.dumps(record) if options.json else f"{text} (budget {BUDGET})", flush=True)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()
