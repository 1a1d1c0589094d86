"""Writes to the places of a mask are choices in the graph, right in the engine at other sizes; other uses of them are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export.errors import NotCapturableError, SpecializedAxisError, TranslationError
from tests.engine_check import check

AXES = {"input_0": {0: "B", 1: "T"}}
Forward = Callable[[torch.Tensor], torch.Tensor]


def _doubled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0.5] *= 2
    return x


def _from_another_column(x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(x)
    mask = x[..., 0] > 0
    found[mask, 0] = x[mask, 1]
    return found


def _of_two_tensors(x: torch.Tensor) -> torch.Tensor:
    found, mask = x.clone(), x.sum(-1) > 0
    found[mask] = torch.relu(x[mask]) + found[mask] * 3 + torch.arange(6.0)
    return found


def _one_after_the_other(x: torch.Tensor) -> torch.Tensor:
    found, mask = x.clone(), x > 0
    found[mask] = 7.0
    found[~mask] = torch.exp(found[~mask]).to(torch.float16).float()
    return found


def _what_is_no_number_elsewhere(x: torch.Tensor) -> torch.Tensor:
    found, mask = x.clone(), x > 0
    found[mask] = 1 / torch.sqrt(x[mask])
    return found


def _whole_numbers(x: torch.Tensor) -> torch.Tensor:
    found = (x * 10).long()
    mask = found > 3
    found[mask] = found[mask] * 2 - 1
    return found


@pytest.mark.parametrize(
    "forward",
    [
        _doubled,
        _from_another_column,
        _of_two_tensors,
        _one_after_the_other,
        _what_is_no_number_elsewhere,
        _whole_numbers,
    ],
)
def test_a_masked_write(forward: Forward) -> None:
    torch.manual_seed(0)
    shapes = ((2, 12, 6), (1, 5, 6), (3, 1, 6))
    graph = check(forward, *[(torch.randn(shape),) for shape in shapes], dynamic_axes=AXES)
    assert "select(" in graph or "where" in graph


def _assigned(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found[mask] = rows
    return found


def _added(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What Qwen3-VL does with the features of inner layers of its image encoder."""
    found = x.clone()
    found[mask, :] = found[mask, :] + rows
    return found


def _accumulated(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_put((mask,), rows, accumulate=True)


def _in_two_steps(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found[~mask] = 0.0
    found[mask] = torch.exp(found[mask] - rows) * rows.half()
    return found


def _with_rows(batch: int, length: int, share: float) -> tuple[torch.Tensor, ...]:
    mask = torch.rand(batch, length) < share
    return torch.randn(batch, length, 4), mask, torch.randn(int(mask.sum()), 4)


@pytest.mark.parametrize("forward", [_assigned, _added, _accumulated, _in_two_steps])
def test_a_masked_write_of_rows(forward: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    sizes = ((2, 7, 0.5), (1, 1, 1.0), (3, 5, 0.0), (1, 20, 1.0), (2, 31, 0.2))
    axes = {"input_0": {0: "B", 1: "T"}, "input_1": {0: "B", 1: "T"}, "input_2": {0: "N"}}
    check(forward, *[_with_rows(*each) for each in sizes], dynamic_axes=axes)


def test_no_rows_for_a_mask_of_nothing() -> None:
    check(_assigned, _with_rows(2, 3, 0.0))


def _at_inner_places(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found[:, mask[0]] = rows
    return found


def test_rows_for_a_mask_of_inner_axes_are_refused() -> None:
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(TranslationError, match="movedim"):
        check(_at_inner_places, (torch.randn(2, 3, 4), mask, torch.randn(2, 2, 4)))


def _less_their_mean(x: torch.Tensor) -> torch.Tensor:
    x, mask = x.clone(), x > 0
    x[mask] = x[mask] - x[mask].mean()
    return x


def _divided(x: torch.Tensor) -> torch.Tensor:
    found = (x * 10).long()
    mask = found != 0
    found[mask] = 100 // found[mask]
    return found


def _of_another_mask(x: torch.Tensor) -> torch.Tensor:
    found, last = x.clone(), x.flip(1)
    found[x > 0] = last[last > 0]
    return found


@pytest.mark.parametrize("forward", [_less_their_mean, _divided, _of_another_mask])
def test_what_is_not_computed_place_by_place_is_refused(forward: Forward) -> None:
    with pytest.raises((NotCapturableError, SpecializedAxisError), match=r"torch\.where|freezes"):
        check(forward, (torch.randn(2, 12, 6),), dynamic_axes=AXES)
