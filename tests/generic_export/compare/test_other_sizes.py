"""An archive is compared at other sizes than the example's before an export returns."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from generic_export import DynamicSize, TractNNEF, export_model_to_nnef
from generic_export.capture import capture
from generic_export.compare.other_sizes import sizes_beside
from generic_export.errors import MismatchError, OptionError
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.request import AxisSymbol
from tests.engine_check import Function

LENGTH: dict[str, dict[int, AxisSymbol]] = {"x": {0: "B", 1: "T"}}


class Frozen(TractNNEF):
    """A target whose translation has a fault: it takes a number that depends on a size for the example's."""

    def post_capture(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        ops = [
            op.with_arguments({"other": 6}) if op.target is torch.ops.aten.mul.Tensor else op
            for op in super().post_capture(graph).ops
        ]
        return replace(graph, ops=tuple(ops))


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * x.shape[1]


def _exported(target: TractNNEF, folder: Path, example: torch.Tensor | None = None) -> Path:
    x = torch.randn(2, 6, 4) if example is None else example
    folder.mkdir(exist_ok=True)
    return export_model_to_nnef(
        Function(_scaled), x, folder / "model", target, input_names=["x"], compression_level=None
    )


def test_a_number_that_is_right_at_the_example_alone_is_found(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"right at the sizes of the example, and wrong at B=3, T=7: output"):
        _exported(Frozen(dynamic_axes=LENGTH), tmp_path)
    assert not (tmp_path / "model").exists()


def test_the_right_archive_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "generic_export"):
        _exported(TractNNEF(dynamic_axes=LENGTH), tmp_path)
    checked = [record.getMessage() for record in caplog.records if " at B=" in record.getMessage()]
    assert [said.split(" at ")[1] for said in checked] == ["B=3, T=7", "B=1, T=6", "B=2, T=1"]


def test_sizes_are_chosen_by_the_caller(tmp_path: Path) -> None:
    assert _exported(Frozen(dynamic_axes=LENGTH, check_io_sizes=()), tmp_path / "none").exists()
    assert _exported(Frozen(dynamic_axes=LENGTH, check_io_sizes=[{"B": 5}]), tmp_path / "batch").exists()
    with pytest.raises(MismatchError, match="wrong at B=2, T=17"):
        _exported(Frozen(dynamic_axes=LENGTH, check_io_sizes=[{"B": 5}, {"T": 17}]), tmp_path / "length")


def test_what_was_declared_of_a_size_holds(tmp_path: Path) -> None:
    only = DynamicSize("T", multiple_of=6, max=6)
    assert _exported(Frozen(dynamic_axes={"x": {1: only}}), tmp_path / "size").exists()


@pytest.mark.parametrize("sizes", [{"S": 3}, {"T": 0}, {"T": True}])
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="check_io_sizes has"):
        TractNNEF(dynamic_axes=LENGTH, check_io_sizes=[sizes])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[:, -8:], {7, 8, 9}),
        (lambda x: x[:, 3:] * 2, {2, 3, 4}),
        (lambda x: torch.cat([x, x], 1)[:, :20], {9, 10, 11}),
    ],
)
def test_sizes_on_both_sides_of_a_number_are_tried(function: object, expected: set[int]) -> None:
    x = torch.randn(2, 6, 4)
    graph = capture(Function(function), (x,), TractNNEF(dynamic_axes=LENGTH), ("x",))  # type: ignore[arg-type]
    assert expected <= {sizes["T"] for sizes in sizes_beside(graph, (x,), LENGTH)}


def test_sizes_are_within_those_of_a_dim() -> None:
    axes: dict[str, dict[int, AxisSymbol]] = {"x": {1: Dim("T", min=4, max=8)}}
    x = torch.randn(2, 6, 4)
    graph = capture(Function(lambda x: x[:, -5:]), (x,), TractNNEF(dynamic_axes=axes), ("x",))
    assert {sizes["T"] for sizes in sizes_beside(graph, (x,), axes)} == {4, 5, 7}


class Ordered(nn.Module):
    """What rows that repeat would be tied in."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the places of the values in order, of those that a mask lets through: i64 [B, T]."""
        return (x + mask).argsort(1)


def test_values_are_no_ties_and_masks_stay_masks(tmp_path: Path) -> None:
    mask = torch.zeros(2, 6)
    mask[:, 4:] = -100.0
    target = TractNNEF(dynamic_axes={"x": {0: "B"}, "mask": {0: "B"}})
    assert export_model_to_nnef(Ordered(), (torch.randn(2, 6), mask), tmp_path / "m", target).exists()
