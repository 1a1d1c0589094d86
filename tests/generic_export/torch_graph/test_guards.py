"""What an archive is not right for is refused by the engine: sizes of one, bounds, numbers that a module compares a size with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import EngineRunError, SpecializedAxisError
from generic_export.inference_target.tract.checking import assert_io
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torchscript.fallback import capture_fallbacks
from tests.engine_check import Function, check

LENGTH = {"input_0": {0: "B", 1: "T"}}
Forward = Callable[[torch.Tensor], torch.Tensor]

# name -> forward of [B, T, 6], lengths that are right beside the example's 12, and lengths that tract must refuse
CONDITIONS: dict[str, tuple[Forward, tuple[int, ...], tuple[int, ...]]] = {
    "longer ones are cut": (lambda x: x[:, :16] if x.shape[1] > 16 else x, (1, 16), (17, 97)),
    "one alone": (lambda x: x * 2 if x.shape[1] == 1 else x.cumsum(1), (2, 97), (1,)),
    "squeezed": (lambda x: x.squeeze(1) * 2, (2, 97), (1,)),
    "a prime": (lambda x: x * (2.0 if x.shape[1] != 7 else 3.0), (8, 97), (7,)),
    "no less than": (lambda x: x * (2.0 if x.shape[1] <= 5 else 3.0), (6, 97), (1, 5)),
    "multiples": (lambda x: x if x.shape[1] % 4 == 0 else x * 2, (4, 96), (1, 13, 97)),
    "a table": (lambda x: x + torch.arange(20.0)[: x.shape[1], None].expand(x.shape[1], 6), (1, 20), (21, 97)),
    "another axis": (lambda x: x if x.shape[1] > x.shape[0] else x * 2, (3, 97), (1, 2)),
}


@pytest.mark.filterwarnings("ignore:.*the archive is right where")
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_engine_refuses_what_the_archive_is_not_right_for(name: str, tmp_path: Path) -> None:
    forward, right, refused = CONDITIONS[name]
    target = TractNNEF(dynamic_axes={"x": {0: "B", 1: "T"}})
    model = Function(forward).eval()
    archive = export_model_to_nnef(model, (torch.randn(2, 12, 6),), tmp_path / "m", target, input_names=["x"])
    for length in right:
        assert_io(model, (torch.randn(2, length, 6),), archive, target)
    for length in refused:
        with TractWheel(timeout_seconds=60).load(archive) as engine, pytest.raises(EngineRunError, match="scenario"):
            engine.run([torch.randn(2, length, 6).numpy()])


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    pairs = x.shape[1] // 2
    return x[:, : 2 * pairs].reshape(x.shape[0], pairs, 8)


# Of [B, T, 4], as long as the example is; strides in memory are those of a whole tensor there, and elsewhere not.
LAYOUTS: dict[str, Forward] = {
    "reshape": _in_pairs,
    "flatten": lambda x: x[:, :6].flatten(1).sum(1),
    "flatten the batch": lambda x: x[:, :6].flatten(0, 1) * 2,
    "contiguous": lambda x: x[:, :6].contiguous() + 1,
    "view": lambda x: x[:, :6].contiguous().view(-1, 4) + 1,
    "of a half": lambda x: _in_pairs(x[:, x.shape[1] // 2 :]),
    "of a cut": lambda x: x[:, 1:][:, : 2 * ((x.shape[1] - 1) // 2)].reshape(x.shape[0], -1, 8),
}


@pytest.mark.parametrize("length", [6, 7])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_value_depends_on_how_tensors_lie_in_memory(
    name: str, length: int, recwarn: pytest.WarningsRecorder
) -> None:
    others = [(torch.randn(3, other, 4),) for other in (2, 3, 5, 6, 7, 8, 31)]
    check(Function(LAYOUTS[name]), (torch.randn(2, length, 4),), *others, dynamic_axes=LENGTH)
    assert not [each for each in recwarn if "right where" in str(each.message)]


class Helped(nn.Module):
    """What drops an axis is written in a method of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 4], or [B, 4] where T is 1."""
        return self.without_ones(x) * 2

    def without_ones(self, x: torch.Tensor) -> torch.Tensor:
        """Return x without its second axis, where it has one position."""
        return x.squeeze(1) + 1


def test_the_line_of_a_method_is_named() -> None:
    with pytest.warns(UserWarning, match=r"test_guards\.py:\d+: the archive is right where T >= 2"):
        check(Helped(), (torch.randn(2, 4, 4),), (torch.randn(2, 9, 4),), dynamic_axes=LENGTH)


def test_an_example_that_is_itself_no_size_of_the_graph_is_refused() -> None:
    with pytest.raises(SpecializedAxisError, match=r"test_guards\.py:\d+: .*right only where T >= 2"):
        check(Helped(), (torch.randn(2, 1, 4),), dynamic_axes=LENGTH)


def test_packed_sequences_are_named() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]

    with pytest.raises(
        SpecializedAxisError, match=r"test_guards\.py:\d+: the sizes of a packed sequence .*padded batch"
    ):
        check(Packing(), (torch.randn(2, 5, 4), torch.tensor([5, 3])), dynamic_axes={**LENGTH, "input_1": {0: "B"}})


def test_an_encoder_that_skips_padding_says_so_without_any() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    model = Function(lambda x, padding: encoder(x, src_key_padding_mask=padding))
    model.encoder = encoder
    axes = {**LENGTH, "input_1": {0: "B", 1: "T"}}
    with pytest.warns(UserWarning, match="skips the positions that src_key_padding_mask leaves out"):
        check(model, (torch.randn(2, 5, 8), nothing), dynamic_axes=axes)
    assert not encoder._forward_pre_hooks


def test_a_question_about_one_size_is_tried_at_that_size(recwarn: pytest.WarningsRecorder) -> None:
    """Both answers come to the same there: the sum and the mean of one."""
    check(
        lambda x: x.sum(0) if x.shape[0] == 1 else x.mean(0),
        (torch.randn(2, 12, 6),),
        (torch.randn(1, 1, 6),),
        dynamic_axes=LENGTH,
    )
    assert not [each for each in recwarn if "is right where" in str(each.message)]


def test_what_is_written_in_place_is_written_at_other_sizes_too(recwarn: pytest.WarningsRecorder) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        copy[:, 1::2, 2] += 5.0
        return copy

    check(forward, (torch.randn(2, 6, 4),), (torch.randn(2, 3, 4),), dynamic_axes={"input_0": {1: "T"}})
    assert not [each for each in recwarn if "is right where" in str(each.message)]


def test_parts_are_counted_where_the_example_is(tmp_path: Path) -> None:
    model = Function(lambda x: x.chunk(2, dim=1)).eval()
    target = TractNNEF(dynamic_axes={"x": {1: "T"}})
    with pytest.warns(UserWarning, match="T >= 2"):
        archive = export_model_to_nnef(model, (torch.randn(2, 6, 8),), tmp_path / "m", target, input_names=["x"])
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        assert len(engine.run([torch.randn(2, 3, 8).numpy()])) == 2


def test_a_warning_names_the_line() -> None:
    with pytest.warns(UserWarning, match=r"test_guards\.py:\d+: the archive is right where .*T"):
        check(lambda x: x * (2.0 if x.shape[1] != 7 else 3.0), (torch.randn(2, 12, 6),), dynamic_axes=LENGTH)


def test_bounds_hold_in_each_scenario_of_the_user(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "B", 1: "T"}})
    model = Function(lambda x: x[:, :16] if x.shape[1] > 16 else x).eval()
    archive = export_model_to_nnef(
        model, (torch.randn(2, 12, 6),), tmp_path / "m", target, ["x"], custom_extensions=["one: B == 1", "two: B == 2"]
    )
    for shape, fits in (((1, 16, 6), True), ((2, 3, 6), True), ((3, 3, 6), False), ((2, 17, 6), False)):
        with TractWheel(timeout_seconds=60).load(archive) as engine:
            if fits:
                engine.run([torch.randn(shape).numpy()])
                continue
            with pytest.raises(EngineRunError, match="scenario"):
                engine.run([torch.randn(shape).numpy()])


class OneForLong(nn.Module):
    """What it reads from a tensor keeps it from being captured, and it sums what is long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 6] of [B, T, 6]."""
        if float(x.abs().max()) > 1e9:
            return x.amax(1)
        return x.sum(1) if x.shape[1] > 4 else x.mean(1)


@pytest.mark.filterwarnings("ignore")
def test_what_stands_for_a_module_is_not_wrong_at_small_sizes() -> None:
    with pytest.raises((SpecializedAxisError, EngineRunError), match=r"freezes|scenario"):
        check(OneForLong().eval(), (torch.randn(2, 6, 6),), (torch.randn(2, 3, 6),), dynamic_axes=LENGTH)


def test_a_trace_is_compared_at_small_sizes_too() -> None:
    found = capture_fallbacks(OneForLong().eval(), (torch.randn(2, 6, 6),), {}, {"x": {1: "T"}})
    assert next(found).how == "torch.jit.script"
    assert next(found).how != "torch.jit.trace"


class Convolved(nn.Module):
    """A convolution of each channel, behind a number that is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=6)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 6]."""
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return F.glu(torch.cat([self.conv(x.transpose(1, 2))] * 2, 1), 1).transpose(1, 2) * mask[..., None]


@pytest.mark.filterwarnings("ignore:.*It was captured through")
def test_a_trace_holds_no_value_of_its_example() -> None:
    lengths = torch.tensor([9, 7])
    check(Convolved().eval(), (torch.randn(2, 9, 6), lengths), (torch.randn(2, 9, 6), lengths))


@pytest.mark.filterwarnings("ignore:.*the archive is right where")
@pytest.mark.parametrize(
    "forward", [lambda x, y: x[:, : y.shape[1]] + y, lambda x, y: torch.cat([x[:, : y.shape[1]], y], 2)]
)
@pytest.mark.parametrize("example", [6, 4])
def test_one_input_cut_to_the_size_of_another(
    forward: Callable[..., torch.Tensor], example: int, tmp_path: Path
) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "U"}})
    model = Function(forward).eval()
    given = (torch.randn(2, 6, 3), torch.randn(2, example, 3))
    archive = export_model_to_nnef(model, given, tmp_path / "m", target, input_names=["x", "y"])
    for batch, length, cut in ((1, 9, 9), (3, 5, 2), (1, 1, 1)):
        assert_io(model, (torch.randn(batch, length, 3), torch.randn(batch, cut, 3)), archive, target)
