"""`torch.export.Dim.AUTO`: axes that stay dynamic where the module allows it, from one capture."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from generic_export import TractNNEF, export_model_to_nnef, open_archive
from generic_export.errors import SpecializedAxisError


def facts(tmp_path: Path, module: nn.Module, *args: torch.Tensor) -> tuple[dict[str, tuple[str, ...]], str]:
    """Export with every axis `Dim.AUTO`; return the shapes of the archive's inputs, and the warnings."""
    names = list(module.forward.__code__.co_varnames[1 : 1 + len(args)])
    axes = {name: dict.fromkeys(range(tensor.dim()), Dim.AUTO) for name, tensor in zip(names, args, strict=True)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = export_model_to_nnef(module, args, tmp_path / "m.nnef", TractNNEF(dynamic_axes=axes), log_level=None)
    with open_archive(path) as opened:
        return {fact.name: fact.shape for fact in opened.model.inputs}, " ".join(str(each.message) for each in said)


class Positions(nn.Module):
    """A table of positions for 16 patches of 4x4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.table = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patches(x).flatten(2).transpose(1, 2) + self.table


class Past(nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([past, x], 1) * mask[..., None]


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


def test_a_table_of_positions_fixes_the_size_of_an_image(tmp_path: Path) -> None:
    shapes, said = facts(tmp_path, Positions(), torch.randn(2, 3, 16, 16))
    assert shapes == {"x": ("X_0", "3", "16", "16")}
    assert "x: 1 (3), 2 (16), 3 (16)" in said


def test_a_mask_is_as_long_as_past_and_new_together(tmp_path: Path) -> None:
    shapes, said = facts(tmp_path, Past(), torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.ones(2, 8))
    assert shapes["past"] == ("X_0", "PAST_1", "X_2")
    assert shapes["mask"][1] in ("PAST_1+X_1", "X_1+PAST_1")
    assert not said


def test_the_end_of_a_table_is_a_bound(tmp_path: Path) -> None:
    shapes, said = facts(tmp_path, Short(), torch.randn(2, 5, 4))
    assert shapes["x"][1] == "X_1"
    assert "axis 1 of 'x' is at most 12" in said


def test_one_position_is_static(tmp_path: Path) -> None:
    shapes, _ = facts(tmp_path, nn.Identity(), torch.randn(1, 5))
    assert shapes == {"input": ("1", "INPUT_1")}


def test_an_axis_declared_by_name_is_refused_with_its_symbol(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {2: "H"}})
    with pytest.raises(SpecializedAxisError) as refused:
        export_model_to_nnef(Positions(), (torch.randn(2, 3, 16, 16),), tmp_path / "m.nnef", target)
    assert refused.value.symbols == ("H",)


def test_an_exported_program_with_its_own_axes(tmp_path: Path) -> None:
    program = torch.export.export(Short(), (torch.randn(2, 5, 4),), dynamic_shapes=({0: Dim("batch", max=64)},))
    with open_archive(export_model_to_nnef(program, (), tmp_path / "m.nnef", TractNNEF())) as opened:
        assert opened(torch.randn(7, 5, 4)).shape == (7, 5, 4)


def test_experts_of_a_plain_module(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "use_cache": False}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(12).reshape(2, 6)
    target = TractNNEF(dynamic_axes={"input_ids": {0: "B", 1: "S"}})
    path = export_model_to_nnef(model, (), tmp_path / "m.nnef", target, kwargs={"input_ids": ids})
    with open_archive(path) as opened, torch.no_grad():
        found = opened(input_ids=ids[:1])
    assert found["logits"].shape == (1, 6, 40)
