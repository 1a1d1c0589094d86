"""Operators that move or pick elements, in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export.errors import TranslationError
from tests.engine_check import check

DYNAMIC: dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "view_split_last": lambda x: x.view(x.shape[0], x.shape[1], 2, 4),
    "view_merge": lambda x: x.reshape(x.shape[0], -1),
    "view_flat": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.unflatten(-1, (4, -1)),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze_squeeze": lambda x: x.unsqueeze(-1).unsqueeze(0).squeeze(0) * 2,
    "expand": lambda x: x[:, :, None, :].expand(-1, -1, 3, -1),
    "expand_to_size": lambda x: x[:, :1].expand(x.shape[0], x.shape[1], x.shape[2]),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "cat_self": lambda x: torch.cat([x, x * 2], dim=1),
    "cat_mixed_types": lambda x: torch.cat([x, (x > 0).float()], dim=-1),
    "stack": lambda x: torch.stack([x, -x], dim=1),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "split_sizes": lambda x: x.split([3, 5], dim=-1),
    "split_even": lambda x: x.split(3, dim=2),
    "slice_front": lambda x: x[:, 1:],
    "slice_back": lambda x: x[:, :-1],
    "slice_last": lambda x: x[:, -1:],
    "slice_step": lambda x: x[..., ::2],
    "slice_by_size": lambda x: x[:, : x.shape[1] // 2],
    "select_last": lambda x: x[:, -1],
    "select_first": lambda x: x[0],
    "narrow": lambda x: x.narrow(1, 1, x.shape[1] - 2),
    "index_select": lambda x: x.index_select(2, torch.tensor([3, 0, 3])),
    "index_by_list": lambda x: x[..., [1, 5]],
    "arange": lambda x: x + torch.arange(x.shape[1]).float()[None, :, None],
    "arange_offset": lambda x: torch.arange(x.shape[1]) + x.shape[1],
    "arange_bounds": lambda x: torch.arange(2, x.shape[1] + 4, 2),
    "ones_of_size": lambda x: torch.ones(x.shape[1], 2) * 3,
    "full_like": lambda x: torch.full_like(x, 2.5),
    "causal_mask": lambda x: torch.arange(x.shape[1])[None, :] <= torch.arange(x.shape[1])[:, None],
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        DYNAMIC[name],
        (torch.randn(2, 6, 8),),
        (torch.randn(2, 4, 8),),
        (torch.randn(2, 13, 8),),
        dynamic_axes={"input_0": {1: "T"}},
    )


def test_two_symbols_meet_in_a_concatenation() -> None:
    check(
        lambda past, new: torch.cat([past, new], dim=1),
        (torch.randn(1, 5, 2), torch.randn(1, 3, 2)),
        (torch.randn(1, 0, 2), torch.randn(1, 4, 2)),
        (torch.randn(1, 7, 2), torch.randn(1, 1, 2)),
        dynamic_axes={"input_0": {1: "P"}, "input_1": {1: "S"}},
    )


def test_embedding_looks_rows_up() -> None:
    table = torch.nn.Embedding(11, 4, padding_idx=0)
    check(table, (torch.randint(0, 11, (2, 5)),), (torch.randint(0, 11, (2, 9)),), dynamic_axes={"input_0": {1: "T"}})


def test_an_input_returned_as_it_is() -> None:
    check(lambda x: (x, x, x + 1), (torch.randn(3),))


def test_a_parameter_returned_as_it_is() -> None:
    class Returns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, self.weight

    check(Returns(), (torch.randn(3),))


def test_several_index_tensors_are_refused_by_name() -> None:
    with pytest.raises(TranslationError, match=r"aten\.index\.Tensor.*several index tensors"):
        check(lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 0])], (torch.randn(3, 3),))
