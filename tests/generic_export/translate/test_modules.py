"""Whole modules as one operator, and operators and fragments of the user's own."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export.errors import CaptureError, GraphError, RegistrationError
from generic_export.nnef.graph import NnefFragment
from generic_export.translate import modules
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.modules import translates_module
from tests.engine_check import check

ROOT = Path(__file__).resolve().parents[3]


class Rotate(nn.Module):
    """Takes and returns nested tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, pair: dict[str, torch.Tensor], scale: Any = None) -> dict[str, torch.Tensor]:
        return {"left": pair["right"] * self.weight, "right": pair["left"].flip(0).flip(0) + self.shift}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Rotate(4), Rotate(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = {"left": x, "right": x + 1}
        for block in self.blocks:
            pair = block(pair)
        return pair["left"] - pair["right"]


@pytest.fixture
def registered() -> Iterator[None]:
    @translates_module(Rotate)
    def rotate(b: NnefBuilder, module: Rotate, inputs: Sequence[Value], state: Mapping[str, Value]) -> list[Value]:
        left, right = inputs
        return [b.binary("mul", right, state["weight"]), b.binary("add", left, state["shift"])]

    yield
    del modules._MODULE_TRANSLATIONS[Rotate]


def test_instances_are_one_unit_at_dynamic_sizes(registered: None) -> None:
    text = check(Model(), (torch.randn(3, 4),), (torch.randn(7, 4),), dynamic_axes={"input_0": {0: "N"}})
    assert text.count("mul(") == 2
    assert "blocks_0" in text
    assert "slice" not in text


def test_the_module_is_captured_as_usual_when_its_class_is_not_registered() -> None:
    check(Model(), (torch.randn(3, 4),))


def test_units_take_tensors_only(registered: None) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotate = Rotate(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rotate({"left": x, "right": x}, scale=3)["left"]

    with pytest.raises(CaptureError, match="Rotate is captured as one unit, which takes tensors only, not 3"):
        check(Wrong(), (torch.randn(3, 4),))


def test_registrations_are_checked(registered: None) -> None:
    with pytest.raises(RegistrationError, match="already has a translation"):
        translates_module(Rotate)(lambda *_: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(RegistrationError, match="not a module class"):
        translates_module(int)  # type: ignore[arg-type]


def test_fragments_of_one_name_must_be_one() -> None:
    b = NnefBuilder()
    x = b.external((2,), torch.float32, "x")
    b.fragment(NnefFragment("twice", "fragment twice() -> () { }"), [x], shape=(2,), dtype=torch.float32)
    with pytest.raises(GraphError, match="two fragments have the name 'twice'"):
        b.fragment(NnefFragment("twice", "fragment twice() -> () {  }"), [x], shape=(2,), dtype=torch.float32)


def test_the_example_runs(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "custom_operator.py"))
    try:
        text = example["main"](tmp_path)
    finally:
        del modules._MODULE_TRANSLATIONS[example["Scale"]]
    assert text.count("fragment example_mish") == 1
    assert text.count("mul(") == 1
