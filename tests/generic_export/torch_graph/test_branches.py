"""A module that goes one of two ways by size: one archive for both, in the engine at awkward sizes, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export.errors import EngineRunError, SpecializedAxisError
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from tests.engine_check import check

LENGTH = {"input_0": {0: "B", 1: "T"}}
_AWKWARD = (1, 7, 8, 9, 16, 17, 31, 40, 97)


class InWindows(nn.Module):
    """Means of windows of eight; the last one is filled up where it is not whole."""

    def __init__(self, filled: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.filled = filled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, windows, 4] of [B, T, 4]."""
        rest = -x.shape[1] % 8
        if rest > 0:
            x = self.filled(x, rest)
        return x.unflatten(1, (-1, 8)).mean(2)


class Halved(nn.Module):
    """Pairs are joined and taken apart again; a last one alone comes back as zero (SEW, Wu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, stride=2, padding=1)
        self.up = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 4]."""
        frames = x.shape[1]
        joined = F.avg_pool1d(x.transpose(1, 2), 2, 2)
        joined = joined + self.conv(x.transpose(1, 2))[..., : joined.shape[-1]]
        apart = self.up(joined.transpose(1, 2)).unflatten(2, (2, 4)).flatten(1, 2)
        if apart.shape[1] < frames:
            apart = F.pad(apart, (0, 0, 0, frames - apart.shape[1]))
        return apart + x


def _zeros_after(x: torch.Tensor, rest: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], rest, x.shape[2])], dim=1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "padded": lambda: InWindows(lambda x, rest: F.pad(x, (0, 0, 0, rest))),
    "zeros appended": lambda: InWindows(_zeros_after),
    "halved": Halved,
}


@pytest.mark.parametrize("length", [16, 21])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_left_over_is_padded_at_every_length(name: str, length: int) -> None:
    torch.manual_seed(0)
    least = 2 if name == "halved" else 1
    others = [(torch.randn(2, other, 4),) for other in _AWKWARD if other >= least]
    check(MODULES[name]().eval(), (torch.randn(2, length, 4),), *others, dynamic_axes=LENGTH)


class TwoConditions(nn.Module):
    """One of its conditions decides between two results, the other one only leaves out padding by nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, windows, 4] of [B, T, 4]."""
        x = x.cumsum(1) if x.shape[1] > 4 else x * 2
        return InWindows(lambda y, rest: F.pad(y, (0, 0, 0, rest)))(x)


@pytest.mark.parametrize("length", [16, 21])
def test_each_condition_is_looked_at_by_itself(length: int) -> None:
    others = [(torch.randn(2, other, 4),) for other in _AWKWARD if other > 4]
    with pytest.warns(UserWarning, match="correct where T >= 5"):
        check(TwoConditions(), (torch.randn(2, length, 4),), *others, dynamic_axes=LENGTH)
    with pytest.warns(UserWarning, match="correct where T >= 5"), pytest.raises(EngineRunError, match="scenario"):
        check(TwoConditions(), (torch.randn(2, length, 4),), (torch.randn(2, 3, 4),), dynamic_axes=LENGTH)


class TwoWays(nn.Module):
    """What it does to an even number of positions is nothing that it does to an odd one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 4]."""
        pairs = F.avg_pool1d(x.transpose(1, 2), 2, 2).shape[-1]
        if 2 * pairs < x.shape[1]:
            return x * 3.0
        return x * 2.0


@pytest.mark.parametrize("length", [16, 21])
def test_of_two_ways_that_are_not_one_the_archive_has_the_example_s(length: int) -> None:
    one, other = (torch.randn(3, length + 2, 4),), (torch.randn(2, length + 1, 4),)
    with pytest.warns(UserWarning, match=r"test_branches\.py:\d+: the archive is correct where .*2\*\(\(T//2\)\)"):
        check(TwoWays(), (torch.randn(2, length, 4),), one, dynamic_axes=LENGTH)
    with pytest.warns(UserWarning), pytest.raises(EngineRunError, match="No possible scenario"):
        check(TwoWays(), (torch.randn(2, length, 4),), other, dynamic_axes=LENGTH)


def test_where_nobody_holds_the_archive_to_a_size_the_capture_is_refused() -> None:
    tracer = TorchModuleTracer(
        TwoWays(), args=(torch.randn(2, 16, 4),), input_names=["x"], dynamic_axes={"x": {1: "T"}}, conditional=False
    )
    with pytest.raises(SpecializedAxisError, match=r"test_branches\.py:\d+: .*correct only where"):
        tracer.trace()


class AroundWindows(nn.Module):
    """It fills up what is left over, and cuts a batch of shifted sequences into windows of four, whatever the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 4]."""
        length = x.shape[1]
        filled = F.pad(x, (0, 0, 0, -length % 4))
        windows = filled.roll(-2, 1).reshape(-1, 4, 4).softmax(1)
        return windows.reshape(x.shape[0], -1, 4)[:, :length]


@pytest.mark.parametrize("length", [6, 8])
def test_windows_of_a_filled_batch_are_whole(length: int, recwarn: pytest.WarningsRecorder) -> None:
    others = [(torch.randn(batch, other, 4),) for batch, other in ((1, 3), (3, 8), (2, 9), (1, 23))]
    check(AroundWindows(), (torch.randn(2, length, 4),), *others, dynamic_axes=LENGTH)
    assert not [each for each in recwarn if "correct where" in str(each.message)]


class OverWindows(nn.Module):
    """Windows of 7 x 7 of pictures, filled up where they are not whole (Liu et al. 2021); what was added is cut off again."""

    def __init__(self, *, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, H, W, 4]."""
        _, high, wide, channels = x.shape
        filled = F.pad(x, (0, 0, 0, -wide % 7, 0, -high % 7))
        rows, columns = filled.shape[1] // 7, filled.shape[2] // 7
        windows = filled.view(-1, rows, 7, columns, 7, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        windows = windows.view(-1, 49, channels).softmax(1).view(-1, rows, columns, 7, 7, channels)
        whole = windows.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, rows * 7, columns * 7, channels)
        if self.when == "always" or rows * 7 > high or columns * 7 > wide:
            whole = whole[:, :high, :wide]
        return whole


@pytest.mark.parametrize("when", ["always", "if anything was added"])
@pytest.mark.parametrize("first", [(7, 7), (8, 8), (14, 21), (7, 9)])
def test_windows_of_pictures_of_any_size(when: str, first: tuple[int, int], recwarn: pytest.WarningsRecorder) -> None:
    """Of two axes, either may need filling: three ways; and one window alone is laid out like no other number of them."""
    sizes = [first, *((7, 7), (6, 7), (7, 15), (20, 14), (23, 3))]
    samples = [(torch.randn(2, high, wide, 4),) for high, wide in dict.fromkeys(sizes)]
    check(OverWindows(when=when), *samples, dynamic_axes={"input_0": {0: "B", 1: "H", 2: "W"}})
    assert not [each for each in recwarn if "correct where" in str(each.message)]


RESIZES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "bilinear": lambda x, size: F.interpolate(x, size=size, mode="linear"),
    "corners": lambda x, size: F.interpolate(x, size=size, mode="linear", align_corners=True),
    "nearest": lambda x, size: F.interpolate(x, size=size, mode="nearest"),
}


class Resized(nn.Module):
    """It resizes to an even length, unless the length is even (MobileViT, Mehta and Rastegari 2021)."""

    def __init__(self, resize: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.resize = resize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 4, pairs] of [B, 4, T]."""
        even = math.ceil(x.shape[2] / 2) * 2
        if even != x.shape[2]:
            x = self.resize(x, even)
        return x.unflatten(2, (-1, 2)).softmax(3).amax(3)


@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("name", RESIZES)
def test_a_resize_to_the_same_size_changes_nothing(name: str, length: int, recwarn: pytest.WarningsRecorder) -> None:
    samples = [(torch.randn(2, 4, size),) for size in dict.fromkeys((length, 8, 9, 2, 13, 24))]
    check(Resized(RESIZES[name]), *samples, dynamic_axes={"input_0": {0: "B", 2: "T"}})
    assert not [each for each in recwarn if "correct where" in str(each.message)]


class Refusing(nn.Module):
    """It takes whole windows only, and says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, windows, 4]."""
        if x.shape[1] % 8 != 0:
            raise ValueError("not whole windows")
        return x.unflatten(1, (-1, 8)).mean(2)


def test_what_the_model_itself_refuses_is_no_other_way() -> None:
    check(Refusing(), (torch.randn(2, 16, 4),), (torch.randn(1, 8, 4),), (torch.randn(3, 40, 4),), dynamic_axes=LENGTH)


class OneOrMore(nn.Module):
    """Asks for one row and for few columns, and says the same of one row; has a buffer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unread", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.shape[0] != 1 else x.clone()
        return rows.sum(1, keepdim=True) if x.shape[1] > 3 else rows


@pytest.mark.filterwarnings("ignore:.*the archive is correct where")
def test_a_condition_that_fails_at_one_alone_is_tried_there_whatever_the_others_are() -> None:
    others = [(torch.randn(rows, columns),) for rows, columns in ((1, 7), (3, 4), (1, 4))]
    check(OneOrMore(), (torch.randn(2, 7),), *others, dynamic_axes={"input_0": {0: "B", 1: "T"}})


class FewOrMany(nn.Module):
    """What it does to six rows is nothing that it does to sixty, and there are three more sizes that change nothing."""

    def forward(self, rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return [rows, 3]."""
        sums = torch.stack([other.sum() for other in others])
        if rows.shape[0] % 100 > 40:
            return rows * sums
        return rows + sums


def test_large_sizes_are_tried_beside_many_others() -> None:
    sizes = [torch.randn(length, 3) for length in (6, 7, 9, 11)]
    axes = {f"input_{place}": {0: f"S{place}"} for place in range(4)}
    many = (torch.randn(60, 3), *sizes[1:])
    with pytest.warns(UserWarning, match=r"test_branches\.py:\d+: "), pytest.raises(EngineRunError, match="scenario"):
        check(FewOrMany(), tuple(sizes), many, dynamic_axes=axes)


def test_a_condition_on_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upsampling of diffusers: what is done with gigabytes is a condition, and no gigabytes are made to see what it is."""
    from generic_export.torch_graph.capture import size_conditions

    made: list[int] = []
    original = size_conditions.resize_example

    def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        made.append(math.prod(shape))
        assert made[-1] <= 1 << 24
        return original(tensor, shape)

    def large_ones_apart(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if x.shape[0] >= 64 else x
        x = x.contiguous() if x.numel() * 2 > 2**31 else x
        return F.interpolate(x, scale_factor=2.0)

    monkeypatch.setattr(size_conditions, "resize_example", resized)
    pictures = {"input_0": {0: "B", 2: "H", 3: "W"}}
    check(large_ones_apart, (torch.randn(2, 4, 5, 6),), (torch.randn(1, 4, 6, 5),), dynamic_axes=pictures)
    assert all(size <= 1 << 24 for size in made)
