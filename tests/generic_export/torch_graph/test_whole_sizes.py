"""`int(size)` in a model's code freezes nothing, and the code is as it was afterwards."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import SpecializedAxisError
from generic_export.torch_graph.capture.whole_sizes import whole_sizes
from tests.engine_check import check

AXES = {"input_0": {0: "B", 1: "T"}}


@pytest.mark.parametrize(
    "cut",
    [
        lambda size: int(size * 0.5),
        lambda size: int(size / 2),
        lambda size: int(round(size / 1.26)),  # noqa: RUF046
        lambda size: int(math.ceil(size / 3)) + 1,  # noqa: RUF046
        lambda size: int(size) - 1,
        lambda size: int("3") if isinstance(size, str) else int(size * 0.9) + int(True),
    ],
)
def test_a_size_made_whole(cut: Callable[[int], int]) -> None:
    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 40), (1, 3), (3, 31), (2, 64))]
    check(lambda x: x[..., : cut(x.shape[1])] * 2, *sizes, dynamic_axes=AXES)


def test_a_size_as_a_whole_number_of_a_shape() -> None:
    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 40), (1, 3), (3, 31))]
    check(lambda x: x.reshape(int(x.shape[0]) * int(x.shape[1])) + 1, *sizes, dynamic_axes=AXES)


def test_a_loop_of_one_step_at_every_size() -> None:
    def in_pieces(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        return torch.cat([x[:, start : start + size] * 2 for start in range(0, size, size)], 1)

    check(in_pieces, *[(torch.randn(2, length),) for length in (8, 1, 31)], dynamic_axes=AXES)
    assert "range" not in globals()


class Halved(nn.Module):
    """Notes what `int` is while it runs."""

    seen: ClassVar[list[object]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first half of [B, T]."""
        self.seen.append(int)
        return x[:, : int(x.shape[1] / 2)] * 2


def test_the_namespace_is_put_back(tmp_path: Path) -> None:
    model = Halved()
    target = TractNNEF(dynamic_axes={"x": {1: "T"}}, check_io=False)
    export_model_to_nnef(model, (torch.randn(2, 8),), tmp_path / "a", target, input_names=["x"])
    assert model.seen[0] is builtins.int and model.seen[-1] is not builtins.int
    assert "int" not in globals()


def test_a_model_that_freezes_a_size_otherwise_is_refused_as_before(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[row].sum() for row in range(int(x.shape[0]))])

    target = TractNNEF(dynamic_axes={"x": {0: "B"}}, check_io=False)
    with pytest.raises(SpecializedAxisError, match="restricted to one size"):
        export_model_to_nnef(Rows(), (torch.randn(3, 8),), tmp_path / "a", target, input_names=["x"])


def test_it_passes_for_int() -> None:
    namespace: dict[str, object] = {}
    with whole_sizes([namespace]):
        whole = namespace["int"]
        assert whole(3.7) == 3 and whole("ff", 16) == 255 and whole() == 0  # type: ignore[operator]
        assert isinstance(3, whole) and not isinstance(3.0, whole)  # type: ignore[arg-type]
        assert issubclass(bool, whole) and int == whole  # type: ignore[arg-type] # noqa: E721
    assert not namespace
    namespace["int"] = float
    with whole_sizes([namespace]):
        pass
    assert namespace == {"int": float}
