"""Sizes that are declared multiples: modules that need them, at sizes small and large, and what is no multiple refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from generic_export import DynamicSize, TractNNEF, export_model_to_nnef
from generic_export.errors import CaptureError, EngineRunError, OptionError
from generic_export.inference_target.tract.checking import assert_io
from generic_export.inference_target.tract.engines.streaming import Streaming
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.sizes.declared_axes import dynamic_axes_of
from generic_export.torchscript.fallback import capture_fallbacks
from tests.engine_check import Function, check

Tensors = tuple[torch.Tensor, ...]


class Ladder(nn.Module):
    """Halves a picture twice and doubles it again, each step added to what it came from (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deeper = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 2, 2)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 3, H, W] of the same."""
        half = self.down(x)
        return self.out(torch.cat([half, self.up(self.deeper(half))], 1)) + x


def windows(x: torch.Tensor) -> torch.Tensor:
    """Normalise [B, 3, H, W] by windows of 4 x 4, filled up where there is no whole one (Swin)."""
    batch, channels, height, width = x.shape
    x = torch.nn.functional.pad(x, (0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
    rows, columns = x.shape[2] // 4, x.shape[3] // 4
    parts = x.view(batch, channels, rows, 4, columns, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, channels).softmax(1)
    back = parts.view(batch, rows, columns, 4, 4, channels).permute(0, 5, 1, 3, 2, 4)
    return back.reshape(batch, channels, rows * 4, columns * 4)[:, :, :height, :width] + x


def chunks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attend [B, S, 6] in blocks of 8, beside a mask [B, S] of the same size (LongT5)."""
    batch, length, width = x.shape
    blocks = x.view(batch, length // 8, 8, width)
    scores = blocks @ blocks.transpose(2, 3) + mask.view(batch, length // 8, 1, 8)
    return (scores.softmax(-1) @ blocks).view(batch, length, width) + x


def demanded(x: torch.Tensor) -> torch.Tensor:
    """Take multiples of 3 alone."""
    if x.shape[1] % 3:
        raise ValueError("no multiple of 3")
    return x.view(x.shape[0], -1, 3, x.shape[2]).sum(1)


def picture(batch: int, height: int, width: int) -> Tensors:
    return (torch.randn(batch, 3, height, width),)


def text(batch: int, length: int) -> Tensors:
    return torch.randn(batch, length, 6), torch.randn(batch, length)


def lengths(batch: int, length: int) -> Tensors:
    return (torch.randn(batch, length, 6),)


SQUARES: DynamicAxes = {"x": {0: "B", 2: DynamicSize("H", multiple_of=4), 3: DynamicSize("W", multiple_of=4)}}
# name -> module, its axes, its example, what is right beside it, what is no multiple
CASES: dict[str, tuple[nn.Module, DynamicAxes, Tensors, Sequence[Tensors], Sequence[Tensors]]] = {
    "a ladder": (Ladder(), SQUARES, picture(2, 8, 12), [picture(1, 4, 4), picture(3, 16, 8)], [picture(1, 8, 9)]),
    "windows": (
        Function(windows),
        SQUARES,
        picture(2, 8, 12),
        [picture(1, 4, 4), picture(3, 16, 8)],
        [picture(1, 6, 8)],
    ),
    "chunks": (
        Function(chunks),
        {"x": {0: "B", 1: DynamicSize("S", multiple_of=8)}, "mask": {0: "B", 1: "S"}},
        text(2, 16),
        [text(1, 8), text(3, 40)],
        [text(1, 17), text(1, 7)],
    ),
    "demanded": (
        Function(demanded),
        {"x": {0: "B", 1: DynamicSize("S", 3, min=5, max=31)}},
        lengths(2, 12),
        [lengths(1, 6), lengths(2, 30)],
        [lengths(1, 3), lengths(1, 7), lengths(1, 33)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_declared_multiples_are_right_and_others_refused(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    module, axes, example, right, refused = CASES[name]
    target = TractNNEF(dynamic_axes=axes)
    archive = export_model_to_nnef(module.eval(), example, tmp_path / "m", target, input_names=list(axes))
    for tensors in right:
        assert_io(module, tensors, archive, target)
    for tensors in refused:
        with TractWheel(timeout_seconds=60).load(archive) as engine, pytest.raises(EngineRunError, match="scenario"):
            engine.run([tensor.numpy() for tensor in tensors])
    assert not [each for each in recwarn if "is correct where" in str(each.message)]


def test_the_input_has_its_own_name_and_size(tmp_path: Path) -> None:
    module, axes, example, *_ = CASES["a ladder"]
    target = TractNNEF(dynamic_axes=axes, check_io=False)
    archive = export_model_to_nnef(module, example, tmp_path / "m", target, compression_level=None)
    graph = (archive / "graph.nnef").read_text()
    assert "x = tract_core_external(shape=[B, 3, H, W]" in graph
    assert "reshape" not in graph  # only a slice tells the engine
    assert "tract_assert H >= 4" in graph


def test_an_output_may_be_declared_as_the_multiple(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    axes = {"x": {1: DynamicSize("S", 8)}, "y": {1: "S"}}
    target = TractNNEF(dynamic_axes=axes, check_io=False)
    module = Function(lambda x: x.view(2, -1, 8, 6).softmax(2).view(2, -1, 6))
    export_model_to_nnef(module, lengths(2, 16), tmp_path / "m", target, ["x"], ["y"])
    assert not [each for each in recwarn if "is declared as" in str(each.message)]


def test_an_error_speaks_of_the_size_that_was_declared() -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, start].sum() for start in range(x.shape[1] // 8)])

    target = TractNNEF(dynamic_axes={"x": {1: DynamicSize("S", 8)}}, check_io=False)
    with pytest.raises(CaptureError, match=r"axis 1 of input 'x' \(S\) is 16"):
        export_model_to_nnef(Function(looped), lengths(2, 16), "unwritten", target, input_names=["x"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: DynamicSize("S", multiple_of=0), "multiple_of of 'S' is 0"),
        (lambda: DynamicSize("S", max=True), "max of 'S' is True"),
        (lambda: DynamicSize("S", 8, min=9, max=15), "no multiple of 8"),
        (lambda: dynamic_axes_of({"x": {1: DynamicSize("S", 8)}, "y": {1: DynamicSize("S", 4)}}), "declared twice"),
        (
            lambda: TractNNEF(dynamic_axes={"x": {1: DynamicSize("S", 8)}}, streaming=Streaming("S", 8)),
            "a stream cannot check",
        ),
    ],
)
def test_what_cannot_be_declared(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        wrong()


def test_an_example_that_is_no_multiple_is_refused() -> None:
    target = TractNNEF(dynamic_axes={"x": {1: DynamicSize("S", 8)}}, check_io=False)
    with pytest.raises(OptionError, match=r"axis 1 of input 'x' is declared a multiple of 8, but is 12"):
        export_model_to_nnef(Function(lambda x: x * 2), lengths(2, 12), "unwritten", target, input_names=["x"])


class Filled(nn.Module):
    """What it reads from a tensor keeps it from being captured; what is no multiple of 4 goes another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 6] of the same."""
        if float(x.abs().max()) > 1e9:
            return x
        return x * 2 if x.shape[1] % 4 == 0 else x * 3


def test_what_stands_for_a_module_is_compared_at_multiples() -> None:
    axes: DynamicAxes = {"x": {1: DynamicSize("T", 4)}}
    fallbacks = capture_fallbacks(Filled().eval(), lengths(2, 8), {}, axes, ["x"])
    assert "torch.jit.trace" in [fallback.how for fallback in fallbacks]


def test_what_a_module_divides_by_is_tried_and_told(tmp_path: Path) -> None:
    module, _, example, right, refused = CASES["a ladder"]
    target = TractNNEF(dynamic_axes={"x": {0: "B", 2: "H", 3: Dim("W", max=64)}})
    with pytest.warns(
        UserWarning, match=r"DynamicSize\('H', multiple_of=4\), DynamicSize\('W', multiple_of=4\).*correct only where"
    ):
        archive = export_model_to_nnef(module.eval(), example, tmp_path / "m", target, input_names=["x"])
    for tensors in right:
        assert_io(module, tensors, archive, target)
    for tensors in (*refused, picture(1, 8, 68)):
        with TractWheel(timeout_seconds=60).load(archive) as engine, pytest.raises(EngineRunError, match="scenario"):
            engine.run([tensor.numpy() for tensor in tensors])


class TwoWaysDown(nn.Module):
    """A quarter of a picture by two strides, and by a stride and a pool, added: equal at multiples of 4 alone (DLA)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.second = nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 4, H / 4, W / 4] of [B, 3, H, W]."""
        half = self.first(x)
        return self.second(half) + torch.nn.functional.max_pool2d(half, 2)


def test_steps_of_two_are_divisors_together(tmp_path: Path) -> None:
    model, axes = TwoWaysDown().eval(), {"x": {2: "H", 3: "W"}}
    with pytest.warns(UserWarning, match=r"'H', multiple_of=4"):
        archive = export_model_to_nnef(
            model, picture(1, 16, 24), tmp_path / "m", TractNNEF(dynamic_axes=axes), log_level=None
        )
    with TractWheel().load(archive) as engine, torch.no_grad():
        for height, width in ((8, 4), (20, 36)):
            (x,) = picture(1, height, width)
            torch.testing.assert_close(torch.from_numpy(engine.run([x.numpy()])[0]), model(x), atol=1e-5, rtol=0)
        with pytest.raises(EngineRunError):
            engine.run([picture(1, 18, 24)[0].numpy()])


def test_what_several_places_have_in_common_is_no_divisor(tmp_path: Path) -> None:
    model = Function(lambda x: x.reshape(2, -1, 8))
    target = TractNNEF(dynamic_axes={"x": {1: "T"}})
    with pytest.warns(UserWarning, match=r"'T', multiple_of=2"):
        archive = export_model_to_nnef(model, (torch.randn(2, 6, 4),), tmp_path / "m", target, input_names=["x"])
    assert_io(model, (torch.randn(2, 10, 4),), archive, target)


class FilledUpToEven(nn.Module):
    """Strides of two, each followed by a step that halves and doubles what it has filled up to an even size (CPUBone)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.strides = nn.ModuleList(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(2))
        self.down, self.up = nn.Conv2d(4, 4, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        below, beside = -height % 2, -width % 2
        filled = torch.nn.functional.pad(x, (0, beside, 0, below)) if below or beside else x
        half = self.down(filled)
        mixed = half.reshape(half.shape[0], 2, 2, half.shape[2] * half.shape[3]).softmax(-1).reshape(half.shape)
        return self.up(mixed)[..., :height, :width]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 4, H / 8, W / 8] of [B, 3, H, W]."""
        x = self.stem(x)
        for stride in self.strides:
            x = stride(x)
            x = x + self._step(x)
        return x


def test_what_pytorch_cannot_solve_is_captured_for_all_sizes() -> None:
    others = [picture(1, height, width) for height, width in ((24, 48), (17, 33), (8, 8))]
    check(FilledUpToEven().eval(), picture(1, 96, 96), *others, dynamic_axes={"input_0": {2: "H", 3: "W"}})


def test_the_first_refusal_is_told_where_multiples_do_not_help() -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(2, -1, 4, 6)
        return torch.stack([blocks[:, block] for block in range(x.shape[1] // 4)])

    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    with pytest.raises(CaptureError, match=r"restricted by the model: .*S//4"):
        export_model_to_nnef(Function(looped), lengths(2, 16), "unwritten", target, input_names=["x"])


# forwards of [B, S, 6] that take 4 positions or more
FROM_FOUR_ON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a table": lambda x: x[:, :4] * torch.arange(24.0).view(4, 6),
    "the first": lambda x: x[:, :4].reshape(x.shape[0], 24),
    "the last": lambda x: x[:, -4:].reshape(x.shape[0], 24),
}


@pytest.mark.parametrize("name", FROM_FOUR_ON)
def test_a_minimum_that_a_module_needs_is_held_and_told(name: str, tmp_path: Path) -> None:
    forward = FROM_FOUR_ON[name]
    target = TractNNEF(dynamic_axes={"x": {0: "B", 1: "S"}})
    with pytest.warns(UserWarning, match=r"S >= 4.*tract refuses"):
        archive = export_model_to_nnef(Function(forward), lengths(2, 12), tmp_path / "m", target, input_names=["x"])
    for length in (4, 5, 13):
        assert_io(Function(forward), lengths(3, length), archive, target)
    with TractWheel(timeout_seconds=60).load(archive) as engine, pytest.raises(EngineRunError, match="scenario"):
        engine.run([lengths(2, 3)[0].numpy()])


@pytest.mark.parametrize("forward", [lambda x: x[:, :4] + x[:, -4:], lambda x: x[:, 3:] - x[:, :-3]])
def test_sizes_with_a_larger_and_a_smaller_meet(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    others = [lengths(3, length) for length in (1, 3, 4, 5, 31)]
    check(forward, lengths(2, 12), *others, dynamic_axes={"input_0": {0: "B", 1: "S"}})
