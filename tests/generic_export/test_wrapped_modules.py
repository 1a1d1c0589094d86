"""Modules in wrappers, and modules that compute their parameters: exported under the names that parameters have in the module.

Each is compared with PyTorch in the engine at three sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel

LAYERS = {"first.weight", "first.bias", "last.weight", "last.bias"}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 5), activation=nn.GELU(), last=nn.Linear(5, 2)))


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Parametrized(nn.Module):
    """A layer with a symmetric weight, which is computed once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.layer(input) + self.layer(input * 2)


class Scaled(nn.Module):
    """Calls another module with other parameters than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = layers(), nn.Parameter(torch.tensor(2.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weights = {name: value * self.scale for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (input,))


class HoldsWrappers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(layers())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.parallel(input)


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.weight_norm(nn.Linear(4, 4), dim=None))


def new_weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), parametrizations.weight_norm(nn.Linear(4, 4), dim=None)
    )


_ORIGINALS = {
    f"{layer}.{name}"
    for layer in (0, 1)
    for name in ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
}
MODULES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "DataParallel": (lambda: nn.DataParallel(layers()), LAYERS),
    "torch.compile": (lambda: torch.compile(layers()), LAYERS),
    "one in the other": (lambda: nn.DataParallel(torch.compile(layers())), LAYERS),
    "inside of a module": (HoldsWrappers, {f"parallel.module.{name}" for name in LAYERS}),
    "functional_call": (Scaled, {"scale", *(f"inner.{name}" for name in LAYERS)}),
    "a parametrization": (Parametrized, {"layer.bias", "layer.parametrizations.weight.original"}),
    "the old weight norm": (old_weight_norm, {f"{n}.{name}" for n in (0, 1) for name in ("bias", "weight_g", "weight_v")}),
    "the new weight norm": (new_weight_norm, _ORIGINALS),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parameters_have_their_own_names(name: str, tmp_path: Path) -> None:
    build, stored = MODULES[name]
    model = build().eval()
    x = torch.randn(4, 3)
    archive = export_model_to_nnef(
        model,
        x,
        tmp_path / "m",
        TractNNEF(dynamic_axes={"input": {0: "N"}}, check_io=False),
        compression_level=None,
        log_level=None,
    )
    assert {path.relative_to(archive).as_posix().removesuffix(".dat") for path in archive.rglob("*.dat")} == stored
    plain = model.module if isinstance(model, nn.DataParallel) else model
    plain = getattr(plain, "_orig_mod", plain)  # torch.compile would compile for half a minute
    with TractWheel(timeout_seconds=60).load(archive) as engine, torch.no_grad():
        for rows in (x, torch.randn(1, 3), torch.randn(9, 3)):
            np.testing.assert_allclose(engine.run([rows.numpy()])[0], plain(rows).numpy(), rtol=1e-5, atol=1e-5)


def test_a_wrapper_with_a_hook_is_exported_whole(tmp_path: Path) -> None:
    model = nn.DataParallel(layers())
    model.register_forward_hook(lambda module, args, result: result + 1)
    target = TractNNEF(dynamic_axes={"inputs_0": {0: "N"}})
    archive = export_model_to_nnef(model, torch.randn(4, 3), tmp_path / "m", target, compression_level=None)
    assert (archive / "module.first.weight.dat").exists()
