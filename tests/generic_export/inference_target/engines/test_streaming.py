"""Archives on inputs that come in pieces: equal to PyTorch as far as is known by then, remembered, or refused by name."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import KhronosNNEF, Streaming, TractNNEF, export_model_to_nnef, open_stream
from generic_export.errors import EngineLoadError, MismatchError, OptionError, TranslationError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.engine_check import Function

EXAMPLE = runpy.run_path(str(Path(__file__).parents[4] / "examples" / "streaming.py"))


def target(axis: int, pulse: int = 4, **options: Any) -> TractNNEF:
    return TractNNEF(dynamic_axes={"x": {axis: "T"}}, streaming=Streaming("T", pulse), **options)


def exported(model: nn.Module | Callable[..., Any], x: torch.Tensor, folder: Path, to: TractNNEF) -> Path:
    module = model if isinstance(model, nn.Module) else Function(model)
    return export_model_to_nnef(module, (x,), folder / "model", to, input_names=["x"])


@pytest.mark.parametrize(
    ("name", "delay"), [("causal", 0), ("centred", 3), ("recurrent", 0), ("log_mel", 2), ("detector", 3)]
)
def test_the_example_in_pulses(name: str, delay: int, tmp_path: Path) -> None:
    late, distance = EXAMPLE["in_pulses"](name, tmp_path)
    assert late == delay
    assert distance < 1e-5


def test_the_example_with_explicit_state(tmp_path: Path) -> None:
    assert EXAMPLE["with_explicit_state"](tmp_path) < 1e-5


@pytest.mark.parametrize("pulse", [1, 2, 8])
def test_a_delay_in_front_of_a_loop_does_not_reach_its_state(pulse: int, tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.lstm = nn.Conv1d(4, 6, 5, padding=2), nn.LSTM(6, 5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(torch.relu(self.convolution(x)).mT)[0]

    torch.manual_seed(0)
    streaming, x = Streaming("T", pulse), torch.randn(1, 4, 24)
    archive = exported(Mixed(), x, tmp_path, target(2, pulse))
    with open_stream(archive, streaming) as stream:
        (first,) = stream.run([x.numpy()])
        (again,) = stream.run([x.numpy()])  # a stream of its own: nothing of the first one is left
    assert first.delay == 2
    assert first.values.shape == (1, 22, 5)
    np.testing.assert_array_equal(first.values, again.values)


def test_without_streaming_a_loop_forgets_after_each_run(tmp_path: Path) -> None:
    model, x = EXAMPLE["Recurrent"](), torch.randn(1, 8, 4)
    archive = exported(model, x, tmp_path, TractNNEF(dynamic_axes={"x": {1: "T"}}))
    with TractWheel().load(archive) as engine:
        session = engine.spawn_state()
        np.testing.assert_array_equal(session.run([x.numpy()])[0], session.run([x.numpy()])[0])


@pytest.mark.parametrize(
    ("model", "x", "axis", "said"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.randn(1, 12, 4), 1, "SDPA"),
        (lambda x: x - x.mean(1, keepdim=True), torch.randn(1, 12, 4), 1, "Reduce<Sum>"),
        (lambda x: x.flip(1), torch.randn(1, 12, 4), 1, "Gather"),
        (lambda x: nn.functional.pad(x, (3, 3), mode="reflect"), torch.randn(1, 4, 12), 2, "Reflect padding"),
    ],
)
def test_what_needs_the_whole_input_is_refused_with_its_node(
    model: Any, x: torch.Tensor, axis: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineLoadError, match=f"in pulses of 4 along T: .*{said}.*docs/how-to/streaming.md"):
        exported(model, x, tmp_path, target(axis))


def test_a_backward_direction_is_refused(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 6, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(x)[0]

    with pytest.raises(TranslationError, match=r"gru \(.*\): a loop from the last step to the first"):
        exported(Both(), torch.randn(1, 8, 4), tmp_path, target(1))


def test_what_the_engine_takes_but_computes_on_each_piece_alone_is_a_mismatch(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"run in pulses of 4 along T: .*It agrees when run as a whole"):
        exported(lambda x: x.softmax(1), torch.randn(1, 12, 4), tmp_path, target(1))


def test_an_example_that_ends_before_anything_is_known(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"1 whole pulses of 4 along T.*6 frames late.*longer"):
        exported(nn.Conv1d(4, 3, 7), torch.randn(1, 4, 7), tmp_path, target(2))


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="pulse is 0"):
        Streaming("T", 0)
    with pytest.raises(
        OptionError, match=r"'T', which is not the symbol of a dynamic axis. Symbols of dynamic_axes: N\."
    ):
        TractNNEF(dynamic_axes={"x": {0: "N"}}, streaming=Streaming("T", 4))
    with pytest.raises(OptionError, match="checked with the wheel"):
        target(1, version="0.22.4")
    assert target(1, version="0.22.4", check_io=False).spelling.streamed == "T"
    assert not hasattr(KhronosNNEF(), "streaming")
