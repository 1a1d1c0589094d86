"""Suites of modules: what they list without their libraries, their cells, and a case taken through everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import DynamicSize
from generic_export.errors import OptionError
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.cell import run_cell
from t2n_llm.zoo.history import Run
from t2n_llm.zoo.run import RunOptions, plan_cells
from t2n_llm.zoo.suites import registry, trial
from t2n_llm.zoo.suites.case import DYNAMIC, HALF, STATIC, Given, ModuleCase, pictures
from t2n_llm.zoo.suites.registry import LIBRARIES, cases_of, chosen_suites, encoder_tasks, rows_of_all
from t2n_llm.zoo.tables import summary
from t2n_llm.zoo.verdict import FAILED, NOT_RUNNABLE, RIGHT, WRONG, Cell
from tests.t2n_llm.command_line import call, strict_json


class Doubled(nn.Module):
    """Its scale is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 3]."""
        return torch.tanh(x * self.scale)


def _refused() -> nn.Module:
    raise ImportError("No module named 'library'")


class Sized(nn.Module):
    """It has no archive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the order of what is drawn."""
        return torch.multinomial(x.abs(), 2)


SIZES = ({"B": 2, "T": 5}, {"B": 1, "T": 7})
CASES = {
    "good": ModuleCase(Doubled, {"x": Given(("B", "T", 3))}, *SIZES),
    "absent": ModuleCase(_refused, {"x": Given(("B", 3))}, *SIZES),
    "random": ModuleCase(Sized, {"x": Given((2, 3))}, {}, {}),
}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry._CASES, "toys", CASES)  # type: ignore[arg-type]
    return "toys"


def test_cases_are_listed_without_their_libraries() -> None:
    assert len(cases_of("timm")) >= 95
    assert {"resnet18", "raft_small", "retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn_detections"} <= set(
        cases_of("torchvision")
    )
    assert {"torchaudio:ConvTasNet", "timm:levit", TEXT_GENERATION} - rows_of_all() == {TEXT_GENERATION}
    for library in LIBRARIES:
        for case in cases_of(library).values():
            example, other = case.drawn(case.sizes, 0), case.drawn(case.other, 0)
            assert [tensor.ndim for tensor in example] == [tensor.ndim for tensor in other]
            assert set(case.other) == set(case.sizes)
            assert not any(
                sizes[name] % case.multiples.get(name, 1) for sizes in (case.sizes, case.other) for name in sizes
            )


def test_a_case_may_declare_multiples() -> None:
    case = pictures(nn.Identity, 64, of_any_size=True, multiple_of=32)
    assert case.told == "dynamic (multiples of 32), static"
    assert case.dynamic_axes == {"x": {0: "B", 2: DynamicSize("H", 32), 3: DynamicSize("W", 32)}}
    assert cases_of("timm")["nasnet"].told == case.told
    assert cases_of("timm")["resnet"].told == "dynamic, static"


def test_suites_are_chosen_by_name() -> None:
    assert chosen_suites(["timm", "encoders", "timm"]) == ("timm", "encoders")
    assert "fill-mask" in encoder_tasks()
    assert TEXT_GENERATION not in encoder_tasks()
    with pytest.raises(OptionError, match="unknown suite 'juggling'"):
        chosen_suites(["juggling"])


def test_a_suite_has_two_columns_where_an_axis_is_dynamic(toys: str) -> None:
    options = RunOptions(tasks=(), suites=(toys,))
    keys = [cell.key for cell in plan_cells(options, {toys: CASES})]
    cells = ("absent:dynamic", "absent:static", "good:dynamic", "good:static", "random:static")
    assert keys == [f"{toys}:{name}" for name in cells]
    with pytest.raises(OptionError, match="q4_0"):
        replace(options, dtypes=("q4_0",))
    halves = plan_cells(replace(options, dtypes=("f16",)), {toys: CASES})
    assert [cell.key for cell in halves] == [f"{toys}:{name}:half" for name in ("absent", "good", "random")]


@pytest.mark.parametrize(
    ("name", "column", "outcome", "stage"),
    [
        ("good", DYNAMIC, RIGHT, "done"),
        ("good", STATIC, RIGHT, "done"),
        ("good", HALF, RIGHT, "done"),
        ("absent", DYNAMIC, NOT_RUNNABLE, "build"),
        ("random", STATIC, FAILED, "export"),
    ],
)
def test_a_case_goes_through_everything(
    name: str, column: str, outcome: str, stage: str, toys: str, tmp_path: Path
) -> None:
    verdict = run_cell(Cell(name, column, toys), tmp_path, lambda _: None)
    assert (verdict.outcome, verdict.stage) == (outcome, stage), verdict.message
    if outcome == RIGHT:
        assert verdict.class_name == "Doubled"
        assert len(verdict.checks) == 2
        assert verdict.processor_seconds > 0


class Other(nn.Module):
    """Another module than the one that is asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 3]."""
        return x * 2.0


def test_another_answer_is_wrong(toys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = trial.export_model_to_nnef

    def of_another_module(module: nn.Module, *args: Any, **options: Any) -> Path:
        return exported(Other(), *args, **options)

    monkeypatch.setattr(trial, "export_model_to_nnef", of_another_module)
    verdict = run_cell(Cell("good", DYNAMIC, toys), tmp_path, lambda _: None)
    assert verdict.outcome == WRONG
    assert verdict.stage == "B = 2, T = 5"


def test_a_summary_says_what_ran(toys: str, tmp_path: Path) -> None:
    verdict = run_cell(Cell("absent", DYNAMIC, toys), tmp_path, lambda _: None)
    assert summary(Run("r", (verdict,))) == ["toys, dynamic: 0 right of 0 that run in PyTorch (of 1 modules)"]


def test_pictures_of_any_size_have_three_dynamic_axes() -> None:
    assert pictures(Doubled, 96).dynamic_axes == {"x": {0: "B"}}
    assert pictures(Doubled, 96, of_any_size=True).dynamic_axes == {"x": {0: "B", 2: "H", 3: "W"}}


def test_the_command_lists_a_suite() -> None:
    listed = strict_json(call("zoo", "list", "--suite", "torchaudio", "--json").out)["architectures"]
    assert listed["torchaudio:Resample"] == "dynamic, static"
    assert listed["torchaudio:Loudness"] == "static"
