"""Quotients of sizes that are rounded as tensors: the length of a resampled sound."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from generic_export import DynamicSize
from tests.engine_check import check


class Resampled(torch.nn.Module):
    """Cuts a sound to what is left of it at another rate, as torchaudio does."""

    def __init__(self, new: int, old: int) -> None:
        super().__init__()
        self.new, self.old = new, old

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = torch.ceil(torch.as_tensor(self.new * x.shape[1] / self.old)).long()
        share = torch.as_tensor(x.shape[1] / 2).floor()
        return x[..., :length], x * share


def test_the_length_stays_dynamic() -> None:
    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 400), (1, 7), (3, 531), (2, 2))]
    check(Resampled(2, 3), *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


def test_numbers_that_are_no_sizes_are_tensors() -> None:
    check(lambda x: x * torch.as_tensor(2.5) + torch.as_tensor([1.0, 2.0]), (torch.randn(3, 2),))


def test_a_number_and_a_shape_make_a_tensor() -> None:
    def summed(x: torch.Tensor) -> torch.Tensor:
        half, shape = torch.as_tensor(x.shape[1] / 2).floor(), torch.tensor(x.shape)
        return x.sum() + (half + shape) * (half < shape)

    check(summed, *[(torch.randn(2, length),) for length in (5, 1, 8)], dynamic_axes={"input_0": {1: "T"}})


def test_a_shape_as_a_tensor() -> None:
    def flat(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = torch.tensor(x.shape)
        both = torch.tensor(x.shape[-2:]).prod()
        return (
            x.reshape(sizes.prod().item()),
            x.reshape(both * sizes[0]),
            x * sizes,
            x[: sizes.sum() - torch.prod(sizes)],
        )

    sizes = [(torch.randn(batch, length, 3),) for batch, length in ((2, 4), (1, 3), (3, 5))]
    check(flat, *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


def test_steps_that_are_no_whole_numbers() -> None:
    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        every = torch.arange(0, x.shape[1], 1.25)
        down = torch.arange(x.shape[1], -x.shape[1], -1.0)  # XLNet's distances
        return x[:, every.long()], torch.arange(1, x.shape[1], step=0.3, dtype=torch.float64), every, down

    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 40), (1, 3), (3, 31))]
    check(places, *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


def test_places_and_the_ones_before_them() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        some = x[:, torch.arange(0, x.shape[1], 1.2).long()]
        return some * torch.cat([some[:, :1], some[:, :-1]], 1)

    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 40), (1, 3), (3, 31))]
    check(shifted, *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


class InTensors(torch.nn.Module):
    """Halves, a filled tensor, bounds and classes that are sizes (Longformer, LongT5, DeBERTa)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [B, T // 2, 2], [T], [T] and [T, T + 1] of [B, T], T even."""
        halves = x.view(x.shape[0], torch.div(x.shape[1], 2, rounding_mode="trunc"), 2)
        places = torch.arange(x.shape[1])
        last = places.where(places > 2, torch.tensor(x.shape[1], dtype=torch.int64))
        bounded = torch.clamp(places * 2, 0, torch.tensor(x.shape[1]) - 1)
        return halves, last, bounded, F.one_hot(last, x.shape[1] + 1)


def test_sizes_in_quotients_filled_tensors_bounds_and_classes() -> None:
    others = [(torch.randn(batch, length),) for batch, length in ((1, 4), (3, 12), (2, 30))]
    axes = {"input_0": {0: "B", 1: DynamicSize("T", multiple_of=2)}}
    check(InTensors(), (torch.randn(2, 8),), *others, dynamic_axes=axes)


def test_a_quotient_that_may_be_below_zero_is_truncated_as_pytorch_does() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.div(x.shape[1] - 9, 2, rounding_mode="trunc")

    check(scaled, *[(torch.randn(2, length),) for length in (8, 4, 6, 12)], dynamic_axes={"input_0": {1: "T"}})


def _grid_positions(x: torch.Tensor, most: int = 8) -> tuple[torch.Tensor, ...]:
    """What vision encoders compute of a table of grids (transformers' vision_utils), for one image of [H, W] blocks of 2 x 2."""
    grids = torch.tensor([[1, 2 * x.shape[0], 2 * x.shape[1]]])
    counts = grids.prod(-1)
    ends = F.pad((grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0]).cumsum(0, dtype=torch.int32), (1, 0))
    rows = x.flatten(0, 2)
    parts = torch.split(rows, (ends[1:] - ends[:-1]).tolist())
    heights, widths = (torch.repeat_interleave(grids[:, axis], counts) for axis in (1, 2))
    starts = torch.repeat_interleave(F.pad(counts.cumsum(0)[:-1], (1, 0)), counts)
    within = (torch.arange(counts.sum()) - starts) % (heights * widths)
    block = within // 4
    row, column = block // (widths // 2) * 2 + within // 2 % 2, block % (widths // 2) * 2 + within % 2
    ids = []
    for frames, height, width in grids.tolist():
        ids.append(torch.arange(height).reshape(-1, 2)[:, None].expand(-1, width // 2, 2).reshape(-1).repeat(frames))
    share = row * (most - 1) / torch.clamp(heights - 1, min=1)
    return torch.cat(parts) * share[:, None], row, column, torch.cat(ids), counts * 2 - torch.tensor([3]), 7 - ends


def test_a_table_of_grids() -> None:
    sizes = [(torch.randn(height, width, 4, 3),) for height, width in ((3, 5), (1, 1), (4, 2), (6, 7))]
    check(_grid_positions, *sizes, dynamic_axes={"input_0": {0: "H", 1: "W"}})


def test_a_table_of_sizes_is_a_tensor_to_everything_else() -> None:
    def used(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([[2, x.shape[1]], [x.shape[0], 3]], dtype=torch.int64)
        first, second = table
        return (
            table.float().mean() * x,
            torch.stack([first.sum(), second.prod()]),
            table[:, torch.tensor([1, 0])],
            first @ second,
            table.to(torch.float32),
            table[None, ..., 0] - 1,
            torch.arange(second[1] + first[1]),
            F.pad(table, (1, 2, 0, 1), value=4),
            x[:, : table[0, 1] - 1],
            table.sum(1, keepdim=True),
            torch.prod(table, dim=0, keepdim=True) * x[:1, :1].long(),
            torch.sum(input=table),
            table.to(device="cpu", dtype=torch.int32),
            first.repeat_interleave(2, output_size=4),
        )

    sizes = [(torch.randn(batch, length),) for batch, length in ((2, 4), (1, 3), (3, 9))]
    check(used, *sizes, dynamic_axes={"input_0": {0: "B", 1: "T"}})


class Frames(torch.nn.Module):
    """Patches of one image by its grid, as Ernie 4.5 VL, Mistral 3 and Video-LLaMA 3 read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("merge", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.as_tensor(torch.tensor([[1, x.shape[0], x.shape[1]]]), device=x.device)
        (frames,), counts = grid[:, 0], grid.prod(-1).flatten()
        offsets = torch.empty(counts.size(), dtype=counts.dtype)
        offsets[0] = 0
        offsets[1:] = counts.cumsum(dim=0)[:-1]
        parts = [
            torch.arange(offset + frame * count, offset + (frame + 1) * count)
            for offset, count in zip(offsets, counts, strict=True)
            for frame in range(0, frames, 2)
        ]
        found = x.flatten(0, 1)[torch.cat(parts)].reshape(x.shape)
        _, height, width = grid[0]
        size = height // self.merge, width // self.merge
        return found + F.interpolate(x.permute(2, 0, 1)[None], size=size, mode="nearest")[0].permute(1, 2, 0)


def test_a_grid_of_one_frame_counts_frames_and_keeps_offsets() -> None:
    sizes = [(torch.randn(height, width, 3),) for height, width in ((4, 6), (1, 5), (7, 2))]
    check(Frames(), *sizes, dynamic_axes={"input_0": {0: "H", 1: "W"}})
