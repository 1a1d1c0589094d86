"""Writing into a copy of a tensor, in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

Result = torch.Tensor | tuple[torch.Tensor, ...]


def assigned(write: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that writes into a copy of its input."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        write(copy)
        return copy

    return forward


def put(key: object, value: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that assigns to one subscript of a copy."""
    return assigned(lambda copy: copy.__setitem__(key, value))


def add(key: object, value: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that adds to one subscript of a copy, in place."""
    return assigned(lambda copy: copy.__setitem__(key, copy[key] + value))


ROWS, COLUMNS = torch.tensor([0, -1, 1]), torch.tensor([2, 0, -1])

ASSIGNMENTS: dict[str, Callable[[torch.Tensor], Result]] = {
    "middle": put((slice(None), slice(1, -1)), 0.0),
    "first": put((slice(None), 0), 7.0),
    "last": put((slice(None), -1), torch.arange(4.0)),
    "from_the_end": put((slice(None), slice(-2, None)), 1.5),
    "every_second": put((slice(None), slice(None, None, 2)), 0.0),
    "every_second_from_one": add((slice(None), slice(1, None, 2), 2), 5.0),
    "nested": assigned(lambda copy: copy[:, 1:, :2].mul_(3).add_(1)),
    "two_columns_swapped": lambda x: torch.stack([x[..., 1], x[..., 0]], -1),
    "whole": assigned(lambda copy: copy.copy_(torch.arange(4))),
    "fill": assigned(lambda copy: copy[:, -1].fill_(2)),
    "index_list": put((slice(None), [0, -1]), 3.0),
    "index_tensors": put((slice(None), ROWS, COLUMNS), 4.0),
    "index_tensors_apart": put((ROWS % 2, slice(None), COLUMNS), 5.0),
    "mask": lambda x: put(x > 0, 9.0)(x),
    "mask_of_rows": lambda x: put(x[..., 0] > 0, torch.arange(4.0))(x),
    "mask_of_columns": lambda x: put((slice(None), slice(None), torch.tensor([True, False, True, False])), 1.0)(x),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] * 2, 1, -1),
    "diagonal": lambda x: x.diagonal_scatter(-x.diagonal(1, 0, 2), 1, 0, 2),
    "masked_scatter": lambda x: x.masked_scatter(x > 0.5, torch.arange(200.0)),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 2, 0]), torch.ones(2, 3, 4), alpha=2),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([2, 0]), torch.ones(2, 2, 4)),
    "index_fill": lambda x: x.index_fill(2, torch.tensor([3, -4]), 0.5),
    "index_put_adds": lambda x: x.index_put((ROWS % 2, ROWS), torch.ones(4), accumulate=True),
    "put": lambda x: x.put(torch.tensor([0, -1, 3]), torch.tensor([1.0, 2.0, 3.0])),
    "put_adds": lambda x: x.put(torch.tensor([0, -1, 0]), torch.tensor([1.0, 2.0, 3.0]), accumulate=True),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignment_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        ASSIGNMENTS[name],
        (torch.randn(2, 6, 4),),
        (torch.randn(2, 3, 4),),
        (torch.randn(2, 11, 4),),
        dynamic_axes={"input_0": {1: "T"}},
    )


INDEX = torch.tensor([[0, 1, 2, 0], [2, 2, 0, 1]])
SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "src": lambda x, s: x.scatter(1, torch.tensor([[0, 2], [2, 1]]), s),
    "value": lambda x, s: x.scatter(0, INDEX % 2, 3.0),
    "add": lambda x, s: x.scatter_add(1, INDEX, s),
    "reduce": lambda x, s: x.scatter(1, INDEX, s, reduce="multiply"),
    "value_reduce": lambda x, s: x.scatter(1, INDEX, 2.0, reduce="add"),
    **{
        f"{reduce}{'' if include else '_alone'}": lambda x, s, reduce=reduce, include=include: x.scatter_reduce(
            1, INDEX, s, reduce, include_self=include
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
    "index_reduce": lambda x, s: x.index_reduce(1, torch.tensor([0, 2, 2, 1]), s, "amax", include_self=False),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str) -> None:
    torch.manual_seed(0)
    check(SCATTERS[name], (torch.randn(2, 5), torch.randn(2, 4)), atol=1e-5)


@pytest.mark.parametrize("name", ["src", "add", "mean", "amax_alone", "amin"])
def test_scatter_of_integers(name: str) -> None:
    check(SCATTERS[name], (torch.randint(-9, 9, (2, 5)), torch.randint(-9, 9, (2, 4))))


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_at_other_sizes(reduce: str, include: bool) -> None:
    """Rows that get several values, and rows that get none."""
    torch.manual_seed(0)

    def model(x: torch.Tensor, source: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = index[0, :, None].expand(-1, source.shape[0])
        return (
            x.scatter_reduce(1, index, source, reduce, include_self=include),
            x.mT.scatter_reduce(0, rows, source.mT, reduce, include_self=include),
        )

    def given(rows: int, size: int, count: int) -> tuple[torch.Tensor, ...]:
        index = torch.randint(0, size, (rows, count))
        return torch.randn(rows, size), torch.randn(rows, count), index

    check(
        model,
        given(2, 5, 4),
        given(3, 7, 9),
        given(2, 11, 1),
        dynamic_axes={"input_0": {0: "B", 1: "T"}, "input_1": {0: "B", 1: "S"}, "input_2": {0: "B", 1: "S"}},
    )


def test_scatter_at_another_size() -> None:
    check(
        lambda x, index: torch.zeros_like(x).scatter_add(1, index, x),
        (torch.randn(2, 6), torch.randint(0, 6, (2, 6))),
        (torch.randn(2, 9), torch.randint(0, 9, (2, 9))),
        dynamic_axes={"input_0": {1: "T"}, "input_1": {1: "T"}},
    )


def test_bools() -> None:
    mask = torch.tensor([[True, False, False], [False, False, True]])
    check(
        lambda x: (
            put((slice(None), 1), True)(x),
            x.scatter(1, torch.tensor([[0], [0]]), torch.tensor([[False], [True]])),
            x.index_put((torch.tensor([0]), torch.tensor([2])), torch.tensor(True), accumulate=True),
            x.masked_scatter(x, torch.tensor([False, True, True])),
        ),
        (mask,),
    )


def test_a_tensor_without_axes() -> None:
    zero = torch.tensor(0)
    check(
        lambda x: (
            x.scatter(0, zero, 2.0),
            x.scatter_add(0, zero, x),
            x.index_add(0, zero, x),
            x.put(zero, x * 2),
        ),
        (torch.tensor(3.0),),
    )
