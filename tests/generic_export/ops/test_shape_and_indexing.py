"""Operators that move or pick elements, in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export import DynamicSize
from generic_export.errors import CaptureError, TranslationError
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
    "chunk_dynamic": lambda x: x.chunk(2, dim=1),
    "unbind": lambda x: x.unbind(2)[::3],
    "hsplit_at": lambda x: x.hsplit([2]),
    "flip": lambda x: (x.flip(1), x.flip(0, -1)),
    "rot90": lambda x: torch.rot90(x, 1, (1, 2)),
    "roll": lambda x: (x.roll(2, 1), x.roll(-7, 1), x.roll((1, -1), (1, 2)), x.roll(3)),
    "unfold": lambda x: (x.unfold(1, 3, 1), x.unfold(1, 2, 2), x.unfold(2, 4, 3)),
    "repeat_interleave": lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3)),
    "tile": lambda x: x.tile(2, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "transposes": lambda x: (x.mT, x[0].T, x.swapaxes(0, 1)),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "stacks": lambda x: (torch.hstack([x, x]), torch.vstack([x, x]), torch.dstack([x, x])),
    "meshgrid": lambda x: torch.meshgrid(x[0, :, 0], x[0, 0], indexing="xy"),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0, :, 0], x[0, 0, :3]),
    "diff": lambda x: x.diff(dim=1),
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


def test_a_mask_of_unknown_count_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on"):
        check(lambda x: x[x > 0], (torch.randn(3, 3),))


TABLE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "two_indices": lambda x, i: x[i, i % 2],
    "two_indices_broadcast": lambda x, i: x[i[:, None], i[None, :] % 3],
    "apart": lambda x, i: x[i, :, i],
    "last_two": lambda x, i: x[:, i, -i],
    "three_negative": lambda x, i: x[-i, -i - 1, i],
    "with_a_number": lambda x, i: (x[0, i], x[:, 1, i], x[i, -1]),
    "matrix_of_indices": lambda x, i: x[:, i.reshape(1, -1)],
    "gather": lambda x, i: x.gather(1, i[None, :, None].expand(2, -1, 3)),
    "gather_negative": lambda x, i: x.take_along_dim(-i[None, :, None] - 1, 1),
    "take": lambda x, i: (x.take(-i), torch.take_along_dim(x, i)),
    "index_select": lambda x, i: x.index_select(2, i),
}


@pytest.mark.parametrize("name", TABLE)
def test_index_tensors(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, 4)
    check(
        TABLE[name],
        (x, torch.tensor([0, 2, 1])),
        (x, torch.tensor([3, 3, 0, 1, 2])),
        dynamic_axes={"input_1": {0: "N"}},
    )


CLAMPED: dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "head": lambda x: x[:, :4] * 2,
    "tail": lambda x: x[:, -4:].sum(1),
    "window": lambda x: x[:, 2:5].sum(1) + x[:, 2:5].mean(1),
    "every_third_inside": lambda x: x[:, 1:-1:3] * 2,
    "trimmed": lambda x: x[:, 1:-1].flatten(),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_a_slice_that_may_reach_beyond_the_axis(name: str) -> None:
    # The capture may bound the axis from below (5 here) or keep `min(4, T)`: both are right from there on.
    check(
        CLAMPED[name],
        (torch.randn(2, 6, 3),),
        (torch.randn(2, 5, 3),),
        (torch.randn(2, 9, 3),),
        dynamic_axes={"input_0": {1: "T"}},
    )


def test_a_tensor_without_axes() -> None:
    zero = torch.tensor(0)
    check(
        lambda x: (
            x.gather(0, zero),
            x.index_select(0, zero),
            x.take(zero),
            x.flip(()),
            x.roll(1),
            x.expand(3),
            x.unfold(0, 1, 1),
            torch.atleast_3d(x),
            x.repeat(2, 2),
        ),
        (torch.tensor(3.0),),
    )


def test_strides_of_an_input() -> None:
    check(lambda x: (x.as_strided((3, 2), (1, 2), 1), x.as_strided_scatter(x[0, :2], (2,), (3,))), (torch.randn(3, 4),))
    with pytest.raises(TranslationError, match="memory"):
        check(lambda x: (x * 2).t().as_strided((2,), (1,)), (torch.randn(3, 4),))


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[1]
    return (x @ x.transpose(1, 2)).as_strided((x.shape[0], size), (size * size, size + 1))


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    """Windows of four, each two further on, of what is cut in fours: as Longformer makes them."""
    chunks = (x * 2).view(x.shape[0], x.shape[1] // 4, 4, x.shape[2])
    size, stride = list(chunks.size()), list(chunks.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    return chunks.as_strided(size, stride).sum(2)


def _overlapping_heads(x: torch.Tensor) -> torch.Tensor:
    """The same of heads, which lie between the positions: the windows are read from memory that is not contiguous."""
    heads = (x * 2).unflatten(2, (3, 2)).transpose(1, 2)
    chunks = heads.unflatten(2, (-1, 4))
    size, stride = list(chunks.size()), list(chunks.stride())
    size[2], stride[2] = 2 * size[2] - 1, stride[2] // 2
    return chunks.as_strided(size, stride).cumsum(3)


def test_windows_of_memory_that_is_not_contiguous() -> None:
    sizes = [(torch.randn(batch, length, 6),) for batch, length in ((2, 8), (1, 12), (3, 4), (2, 20))]
    check(_overlapping_heads, *sizes, dynamic_axes={"input_0": {0: "B", 1: DynamicSize("T", multiple_of=4)}})


@pytest.mark.filterwarnings("ignore:.*the archive is right where")
@pytest.mark.parametrize("strided", [_diagonal, _overlapping])
def test_strides_of_what_is_computed(strided: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sizes = [(torch.randn(batch, length, 3),) for batch, length in ((2, 8), (1, 12), (3, 4))]
    check(strided, *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


def test_float_ranges() -> None:
    check(
        lambda x: (torch.arange(0.0, 1.0, 0.1), torch.arange(5, 0, -2), torch.arange(1, 4, 0.5) + x),
        (torch.randn(6),),
    )


def test_repeats_with_a_declared_size() -> None:
    check(
        lambda x, r: x.repeat_interleave(r, 1, output_size=6),
        (torch.randn(2, 3), torch.tensor([1, 2, 3])),
        (torch.randn(2, 3), torch.tensor([0, 6, 0])),
    )


def test_a_part_of_a_concatenation_is_what_was_put_there() -> None:
    def halves(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([left, right], dim=-1)
        return joined[..., :4] + 1, joined[..., 4:] * 2, joined[..., 3:5].neg()

    text = check(
        halves, (torch.randn(3, 4), torch.randn(3, 5)), dynamic_axes={"input_0": {0: "S"}, "input_1": {0: "S"}}
    )
    assert text.count("slice(") == 1  # the one that takes of both


@pytest.mark.parametrize("single", [True, False])
def test_a_parameter_repeated_for_each_of_a_batch_attends(single: bool) -> None:
    """The pooling head of SigLIP: one query for each image, split into heads."""

    class Pooling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch.nn.Parameter(torch.randn(1, 1 if single else 2, 16))
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self.attention(self.query.repeat(rows.shape[0], 1, 1), rows, rows)[0]
            return attended

    axes = {"input_0": {0: "B", 1: "S"}}
    check(Pooling(), (torch.randn(3, 5, 16),), (torch.randn(1, 6, 16),), (torch.randn(2, 4, 16),), dynamic_axes=axes)


def test_strides_over_an_axis_that_was_cut_in_two() -> None:
    """LeViT keeps every other row and column of its tokens; tract would take the strides before the reshape."""

    def sampled(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.relu().view(-1, 4, 6, 8)[:, ::2, 1::2].reshape(tokens.shape[0], -1, 8).neg()

    check(sampled, (torch.randn(3, 24, 8),), (torch.randn(1, 24, 8),), dynamic_axes={"input_0": {0: "B"}})


def test_grids_of_points_that_are_made_of_sizes_alone() -> None:
    """The reference points of Deformable DETR: `linspace` has no tensor among its arguments, and `meshgrid` takes two of them."""

    def points(maps: torch.Tensor) -> torch.Tensor:
        height, width = maps.shape[2:]
        rows, columns = torch.linspace(0.5, height - 0.5, height), torch.linspace(0.5, width - 0.5, width)
        down, across = torch.meshgrid(rows, columns, indexing="ij")
        return maps + down / height - across / width

    axes = {"input_0": {0: "B", 2: "H", 3: "W"}}
    check(points, (torch.randn(2, 3, 4, 6),), (torch.randn(1, 3, 5, 7),), (torch.randn(1, 3, 1, 2),), dynamic_axes=axes)


class _FilledLater(torch.nn.Module):
    """Tensors that are made empty and written afterwards."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        strided = torch.empty_strided((x.shape[0], 4), (4, 1))
        strided[:, :2], strided[:, 2:] = x, x * 2
        new, like = x.new_empty(2, 2), torch.empty_permuted((2, 2), (1, 0))
        new.copy_(x[:2])
        like.copy_(x[:2])
        return strided, new, like, x.new_empty_strided((2, 2), (2, 1)).copy_(x[:2])


def test_empty_tensors_are_filled() -> None:
    check(_FilledLater(), (torch.randn(3, 2),))
