#!/usr/bin/env python3
"""Export int8 picture models, and count how often tract and PyTorch name the same class.

usage: scripts/int8_modules.py [--pictures N] [--size PIXELS] [--seed S]

MobileNet-V2 and ResNet-18 as eager `torch.ao` models, the same two and a small vision transformer as PT2E leaves them; random
weights, whose norms are calibrated first, and random pictures: near ties are as frequent as they get. Prints Markdown: the same
class of how many, the largest difference of a logit, beside the largest logit, and the bytes of the tensors in the archive.
Needs torchvision and torchao (PT2E); what is missing is left out, by name.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel

BATCH = 2
CALIBRATIONS = 4
TRANSFORMER = {"patch_size": 16, "num_layers": 4, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 256}


@dataclass(frozen=True)
class Agreement:
    """What a model's archive says beside PyTorch.

    Attributes:
        same, pictures: how many get the same class, of how many.
        largest_error, largest_logit: of all of them.
        stored_bytes: of the tensors.
    """

    same: int
    pictures: int
    largest_error: float
    largest_logit: float
    stored_bytes: int


def main() -> None:
    """Quantise, export, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="pixels of an edge")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| model | same class | largest error, of | tensors |\n|---|---|---|---|")
    for name, quantised in _models(options.size):
        torch.manual_seed(options.seed)
        try:
            model = quantised()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        found = agreement(model, options.pictures, options.size)
        errors = f"{found.largest_error:.3f}, {found.largest_logit:.2f}"
        print(
            f"| {name} | {found.same} of {found.pictures} | {errors} | {found.stored_bytes / 1e6:.1f} MB |", flush=True
        )


def agreement(model: nn.Module, pictures: int, size: int) -> Agreement:
    """Export a model, and ask both for the classes of random pictures."""
    with tempfile.TemporaryDirectory() as folder:
        archive = export_model_to_nnef(
            model,
            _pictures(size),
            Path(folder) / "model",
            TractNNEF(check_io=False),
            compression_level=None,
            log_level=None,
        )
        stored = sum(path.stat().st_size for path in archive.rglob("*.dat"))
        wanted, answers = [], []
        with TractWheel().load(archive) as engine, torch.no_grad():
            for _ in range(-(-pictures // BATCH)):
                batch = _pictures(size)
                wanted.append(model(batch).numpy())
                answers.append(engine.run([batch.numpy()])[0])
    ours, theirs = np.concatenate(answers), np.concatenate(wanted)
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    return Agreement(same, len(ours), float(np.abs(ours - theirs).max()), float(np.abs(theirs).max()), stored)


def _models(size: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name in ("mobilenet_v2", "resnet18"):
        yield f"{name}, torch.ao", partial(_eager, name, size)
    # torchao's quantiser for x86 does not take the two uses of a ResNet's ReLU apart.
    for name, machine in (("mobilenet_v2", "x86"), ("resnet18", "arm")):
        yield f"{name}, PT2E", partial(_pt2e, partial(_plain, name), size, machine)
    yield "vision transformer, PT2E", partial(_pt2e, partial(_transformer, size), size, "x86")


def _pictures(size: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def _plain(name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    return getattr(models, name)(weights=None)


def _transformer(size: int) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    return models.VisionTransformer(image_size=size, **TRANSFORMER)


def _settled(model: nn.Module, size: int) -> nn.Module:
    """Give norms the statistics of random pictures, and a head of zeros other weights: all classes would be the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(0, 0.05)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(_pictures(size, 16))
    return model.eval()


def _eager(name: str, size: int) -> nn.Module:
    quantisation: Any = importlib.import_module("torch.ao.quantization")
    models = importlib.import_module("torchvision.models.quantization")
    model: Any = _settled(getattr(models, name)(weights=None, quantize=False), size)
    model.fuse_model()
    model.qconfig = quantisation.get_default_qconfig("x86")
    quantisation.prepare(model, inplace=True)
    _calibrate(model, size)
    return quantisation.convert(model)


def _pt2e(make: Callable[[], nn.Module], size: int, machine: str) -> nn.Module:
    steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantisers = importlib.import_module(f"torchao.quantization.pt2e.quantizer.{machine}_inductor_quantizer")
    configured = getattr(quantisers, f"get_default_{machine}_inductor_quantization_config")()
    quantiser = getattr(quantisers, f"{machine.capitalize()}InductorQuantizer")().set_global(configured)
    graph = torch.export.export(_settled(make(), size), (_pictures(size),)).module()
    prepared = steps.prepare_pt2e(graph, quantiser)
    _calibrate(prepared, size)
    return steps.convert_pt2e(prepared)


def _calibrate(model: nn.Module, size: int) -> None:
    with torch.no_grad():
        for _ in range(CALIBRATIONS):
            model(_pictures(size))


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()
