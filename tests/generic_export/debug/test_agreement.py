"""An export, `try_export`, a diagnosis and a coverage report capture with one function: they never disagree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.debug.coverage import Support, module_coverage
from generic_export.diagnose import diagnose
from generic_export.diagnose.piece_by_piece import trace_execution_piece_by_piece
from generic_export.errors import T2NError
from tests.generic_export.debug.planted import DataDependentBranch, DecidedByPython, UnsupportedOperator

SIZES = (3, 5)


class Direct(nn.Module):
    """Is captured as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Scaled(nn.Module):
    """Has a branch on values, and an argument that a script knows by its annotation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        y = self.linear(x)
        return y * scale if y.sum() > 0 else -y


class InDicts(nn.Module):
    """Has no script, because of its dicts; its trace says the same for all sizes."""

    def forward(self, pair: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y = pair["a"] * pair["b"]
        return {"result": y * 3.0 if y.isfinite().all() else -y}


class FrozenSize(nn.Module):
    """Computes with one size only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(SIZES[0], 4) if x.shape[0] == SIZES[0] else x


class Counts(nn.Module):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1.0
        return x + 1.0


class Inside(nn.Module):
    """Has a module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.rand(size, 4) + 0.1,)


def pair(size: int) -> tuple[dict[str, torch.Tensor]]:
    return ({"a": torch.rand(size, 4), "b": torch.rand(size, 4)},)


@dataclass(frozen=True)
class Row:
    """A module, its arguments, and what is to be said of it.

    Attributes:
        make: gives the module.
        arguments: of a call, by size.
        axes: the dynamic ones.
        stage: where it fails, None when it passes.
        way: how torch.export's refusal is got round.
        keywords: call by keyword.
    """

    make: Callable[[], nn.Module]
    stage: str | None = None
    way: str = ""
    arguments: Callable[[int], tuple[Any, ...]] = rows
    axes: tuple[str, ...] = ("x",)
    keywords: bool = False


ROWS = {
    "direct": Row(Direct),
    "script": Row(lambda: torch.jit.script(Direct())),
    "trace": Row(lambda: torch.jit.trace(Direct(), rows(2))),
    "a script inside": Row(lambda: Inside(torch.jit.script(Scaled()))),
    "branch, by its script": Row(Scaled, way="torch.jit.script"),
    "branch, called by keyword": Row(Scaled, way="torch.jit.script", keywords=True),
    "branch inside": Row(lambda: Inside(DataDependentBranch()), way="torch.jit.script"),
    "dicts, by its trace": Row(InDicts, way="torch.jit.trace", arguments=pair, axes=("pair.a", "pair.b")),
    "frozen by Python": Row(DecidedByPython, "capture"),
    "frozen size": Row(FrozenSize, "capture"),
    "frozen inside": Row(lambda: Inside(FrozenSize()), "capture"),
    "unsupported": Row(UnsupportedOperator, "translate"),
    "unsupported inside": Row(lambda: Inside(UnsupportedOperator()), "translate"),
    "writes to a buffer": Row(Counts),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_they_agree(row: Row, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = row.make().eval()
    calls = [row.arguments(size) for size in SIZES]
    args, kwargs = (calls[0], {}) if not row.keywords else ((), {"x": calls[0][0]})
    sets = [({"x": call[0]} if row.keywords else call) for call in calls]
    target = TractNNEF(dynamic_axes={name: {0: "B"} for name in row.axes})

    exported = refused = None
    try:
        exported = export_model_to_nnef(copy.deepcopy(model), args, tmp_path / "m", target, kwargs=kwargs)
    except T2NError as error:
        refused = error
    assert (exported is None) == (row.stage is not None), refused

    found = diagnose(model, TractNNEF(), sets, strategy="whole")
    verdict = found.verdict(found.pieces[0].key)
    assert found.ok == (exported is not None), verdict.error
    status = trace_execution_piece_by_piece(model, sets).try_export("nnef")
    assert status.is_ok() == found.ok, status.pretty_text()
    assert any(row.way in note for note in verdict.notes) or not row.way
    if refused is not None:
        assert str(verdict.stage) == row.stage and verdict.error is not None
        assert verdict.error.kind == type(refused).__name__ and verdict.error.kind in status.reason

    try:
        coverage = module_coverage(model, args, target, kwargs=kwargs)
    except T2NError as error:
        assert row.stage == "capture" and type(error) is type(refused)
        return
    assert coverage.complete == (exported is not None)
    assert row.way in coverage.detour and bool(row.way) == bool(coverage.detour)
    missing = [op.operator for op in coverage.operators if op.support is Support.MISSING]
    assert bool(missing) == (row.stage == "translate")


def test_without_dynamic_axes_what_a_trace_freezes_is_exported_by_all(tmp_path: Path) -> None:
    model, args = DecidedByPython(), rows(3)
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace"):
        export_model_to_nnef(model, args, tmp_path / "m", TractNNEF())
    root = trace_execution_piece_by_piece(model, [args, rows(5)])
    assert not root.try_export("nnef").is_ok()
    assert root.try_export("nnef", use_dynamic_shapes=False).is_ok()
    assert "torch.jit.trace" in module_coverage(model, args, TractNNEF()).detour
