"""Small buffers whose values a module's own code decides by; those that it writes to are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.capture import capture
from generic_export.errors import CaptureError
from tests.engine_check import check


class MaskedLayers(nn.Module):
    """Which layers mask is in a buffer, as in EoMT."""

    def __init__(self, *shares: float) -> None:
        super().__init__()
        self.register_buffer("shares", torch.tensor(shares))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in shares)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.shares[index] > 0:
                x = x.masked_fill(x < 0, float(self.shares[index]))
        return x


class Padded(nn.Module):
    """Stride and padding in buffers, as EnCodec and Mimi keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("size", torch.tensor(5), persistent=False)
        self.convolution = nn.Conv1d(3, 4, 5, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = self.size - self.stride
        left = int(padding) // 2 if padding > 2 else 0
        return self.convolution(nn.functional.pad(x, (left, padding.item() - left)))


class Filled(nn.Module):
    """Fills sizes up to a stride that is in a buffer, as EnCodec and Mimi do, and has a buffer that nobody reads."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("stride", torch.tensor(4), persistent=False)
        self.register_buffer("before", torch.tensor(3), persistent=False)
        self.register_buffer("unread", torch.ones(2))
        self.convolution = nn.Conv1d(3, 4, 7, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        steps = torch.ceil((length - 7 + self.before) / self.stride + 1).to(torch.int64) - 1
        after = steps * self.stride + 7 - self.before - length
        if length <= max(self.before, after):
            return x[..., :1]
        return self.convolution(nn.functional.pad(x, (self.before, after), mode=self.mode))


class PadsABuffer(nn.Module):
    """Pads by keyword, and decides by a padded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amount", torch.tensor(2))
        self.register_buffer("share", torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = nn.functional.pad(self.share, (1, 0))
        x = nn.functional.pad(x, pad=(self.amount, x.shape[1]), value=float(shares[1]))
        return x * 2 if shares[0] == 0 else x


class ScaledByABuffer(nn.Module):
    """Scales by a float that is a buffer and by a size, and decides by another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("share", torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x.shape[1]).expand(3) + x.double().sum() if self.share[0] > 0 else x


class Written(nn.Module):
    """Counts its calls in the buffer that it decides by."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.calls += 1
        x = x * 2 if self.calls > 0 else x
        if not self.first:
            self.calls.add_(1)
        return x


class Assigned(Written):
    """Puts another tensor in the place of the buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.calls > 0 else x
        self.calls = self.calls + 1
        return x


class Drawn(nn.Module):
    """Decides by chance, and by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.bernoulli(self.share) > 0 else x


class Packed(nn.Module):
    """Images of several sizes in one sequence, their heights and widths in a buffer, as vision encoders pack them."""

    def __init__(self, *grid: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("grid", torch.tensor(grid))
        self.rows = nn.Embedding(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heights, widths = self.grid.unbind(1)
        counts = heights * widths
        image = torch.repeat_interleave(torch.arange(len(self.grid)), counts)
        within = torch.arange(counts.sum()) - (counts.cumsum(0) - counts)[image]
        weight = (1 - (within / counts[image]).sub_(0.5).abs_()).clamp_(min=0.25)
        x = (x + self.rows(within // widths[image])) * weight[:, None]
        starts = nn.functional.pad(counts.cumsum(0), (1, 0))
        pieces = []
        for piece, (height, width) in zip(x.split((starts[1:] - starts[:-1]).tolist()), self.grid, strict=True):
            picture = piece.view(height, width, -1)[: height // 2 + 1]
            pieces.append(picture.flatten(0, 1).mean(0))
        first = x[image == 0]
        longest = int(counts.max()) if (counts > 1).all() else 0
        return torch.cat((torch.stack(pieces), first, x[image.unique_consecutive()])) + longest


class WritesUnknown(nn.Module):
    """Writes an input to what is computed of a buffer, and decides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.share * 2
        shares[0] = x.sum()
        return x * 2 if shares[0] > 0 else x


class Offsets(nn.Module):
    """Cuts rows into pieces whose starts it writes into an empty table, as ERNIE 4.5 VL does for images."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.tensor(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        starts = torch.empty(self.sizes.size(), dtype=self.sizes.dtype)
        starts[0] = 0
        starts[1:] = self.sizes.cumsum(0)[:-1]
        places = [torch.arange(start, start + size).flip(0) for start, size in zip(starts, self.sizes, strict=True)]
        return x[:, torch.cat(places)]


@pytest.mark.parametrize("model", [MaskedLayers(0.0, 0.5, 0.0), MaskedLayers(1.0, 0.0), MaskedLayers(0.0)])
def test_layers_that_mask(model: nn.Module) -> None:
    torch.manual_seed(0)
    graph = check(
        model,
        (torch.randn(3, 6),),
        (torch.randn(1, 6),),
        (torch.randn(7, 6),),
        dynamic_axes={"input_0": {0: "B"}},
    )
    assert graph.count("select(") == sum(bool(share > 0) for share in model.shares)


def test_paddings_at_any_length() -> None:
    torch.manual_seed(0)
    others = [(torch.randn(1, 3, length),) for length in (5, 12, 31)]
    check(Padded(), (torch.randn(1, 3, 20),), *others, dynamic_axes={"input_0": {2: "T"}})


@pytest.mark.parametrize("model", [PadsABuffer(), ScaledByABuffer()])
def test_what_is_padded_or_scaled_stays_known(model: nn.Module) -> None:
    others = [(torch.randn(2, length),) for length in (1, 9)]
    check(model, (torch.randn(2, 5),), *others, dynamic_axes={"input_0": {1: "T"}})


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_sizes_filled_up_by_buffers(mode: str) -> None:
    others = [(torch.randn(batch, 3, length),) for batch, length in ((2, 5), (3, 12), (1, 31))]
    check(Filled(mode), (torch.randn(1, 3, 21),), *others, dynamic_axes={"input_0": {0: "B", 2: "T"}})


@pytest.mark.parametrize("grid", [[(2, 3), (4, 2)], [(1, 2)], [(3, 3), (2, 2), (5, 2)]])
def test_what_is_computed_of_known_sizes_is_known(grid: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    length = sum(height * width for height, width in grid)
    check(Packed(*grid), (torch.randn(length, 4),), (torch.randn(length, 4),))


def test_what_is_written_into_an_empty_table_is_known() -> None:
    others = [(torch.randn(batch, 6),) for batch in (1, 5)]
    check(Offsets(2, 3, 1), (torch.randn(3, 6),), *others, dynamic_axes={"input_0": {0: "B"}})


@pytest.mark.parametrize(
    "model", [WritesUnknown(), Written(first=True), Written(first=False), Assigned(first=False), Drawn()]
)
def test_what_is_written_to_or_drawn_is_not_known(model: nn.Module) -> None:
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(2, 3),), TractNNEF(dynamic_axes={}), torchscript=False)
