"""What a text is cut into, and how far two models are apart on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from generic_export.errors import EngineRunError, OptionError
from t2n_llm.compress.text import builtin_text, evaluation_text
from t2n_llm.inspect.quality import ArchiveReading, compare_windows, windows_of


def rows(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_divergence_agreement_and_perplexity() -> None:
    expected = rows([0.5, 0.25, 0.25], [0.1, 0.8, 0.1])
    actual = rows([0.25, 0.5, 0.25], [0.1, 0.8, 0.1])
    quality = compare_windows([[0, 1, 1]], lambda _: expected + 3.0, lambda _: actual - 1.0)
    assert quality.positions == 2
    assert quality.mean_kl_divergence == pytest.approx((0.5 - 0.25) * np.log(2) / 2, rel=1e-5)
    assert quality.max_kl_divergence == pytest.approx(2 * quality.mean_kl_divergence, rel=1e-5)
    assert quality.mean_kl_divergence < quality.p99_kl_divergence <= quality.max_kl_divergence
    assert quality.same_top1_share == 0.5
    assert quality.perplexity == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-5)
    assert quality.reference_perplexity == pytest.approx((0.25 * 0.8) ** -0.5, rel=1e-5)


def test_long_windows_are_compared_in_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(99, 50, generator=generator) for _ in range(2))
    window = torch.randint(50, (100,), generator=generator).tolist()
    quality = compare_windows([window], lambda _: left, lambda _: right)
    log_p, log_q = left.double().log_softmax(-1), right.double().log_softmax(-1)
    assert quality.mean_kl_divergence == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-5)
    surprise = torch.nn.functional.cross_entropy(right, torch.tensor(window[1:]))
    assert quality.perplexity == pytest.approx(float(surprise.exp()), rel=1e-5)


def test_logits_that_are_not_finite_are_an_error() -> None:
    good = torch.zeros(1, 4)
    with pytest.raises(EngineRunError, match="not finite"):
        compare_windows([[0, 1]], lambda _: good, lambda _: good / 0)


def test_windows_lie_evenly_and_do_not_overlap() -> None:
    windows = windows_of(list(range(100)), 3, 20)
    assert windows == [list(range(start, start + 20)) for start in (0, 33, 66)]
    assert len(windows_of(list(range(100)), 30, 20)) == 5
    assert windows_of(list(range(100)), 3, 21, [-1]) == [[-1, *window] for window in windows]
    with pytest.raises(OptionError, match="10 tokens"):
        windows_of(list(range(10)), 3, 20)
    with pytest.raises(OptionError, match="nothing to score"):
        windows_of(list(range(10)), 3, 1)


class Recorder:
    """Remembers its turns; the logits of a token are its id."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.turns: list[list[int]] = []
        self.stateful = False

    engine_name = engine_version = "recorder"

    def run_turns(self, turns, *, stateful: bool) -> list[np.ndarray]:
        self.turns, self.stateful = [list(turn) for turn in turns], stateful
        return [np.array(turn, np.float16)[-self.kept :, None] for turn in turns]


@pytest.mark.parametrize(("kept", "turns"), [(0, [5]), (1, [1] * 5), (2, [2, 2, 1]), (8, [5])])
def test_a_window_is_read_in_as_few_runs_as_the_archive_allows(kept: int, turns: list[int]) -> None:
    runner = Recorder(kept)
    logits = ArchiveReading(kept).predict(runner, [10, 11, 12, 13, 14, 15])
    assert logits.flatten().tolist() == [10, 11, 12, 13, 14]
    assert [len(turn) for turn in runner.turns] == turns
    assert runner.stateful == bool(kept)
    assert ArchiveReading(kept).runs(6) == len(turns)


def test_the_text_to_measure_on_is_not_the_text_to_calibrate_on(tmp_path: Path) -> None:
    calibration = builtin_text()
    paragraphs = [part for part in evaluation_text(None).split("\n\n") if len(part) > 60]
    assert len(paragraphs) > 20 and not any(part in calibration for part in paragraphs)
    with pytest.raises(OptionError, match="absent"):
        evaluation_text(tmp_path / "absent")
