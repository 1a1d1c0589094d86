"""Recordings of any length: the number of rows, as a formula and in exports of Gemma 3n, Gemma 4 and Fun-ASR."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2n_llm.export.folder import read_manifest
from t2n_llm.tasks.multimodal.any_length import AnyLengthSound, RowCount, find_row_count
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from tests.t2n_llm.tasks.multimodal.test_multimodal import exported

_CONVOLUTIONS = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4)


@given(_CONVOLUTIONS, st.integers(1, 3))
def test_the_row_count_of_convolutions_is_found(convolutions: list[tuple[int, int, int]], rows: int) -> None:
    def count(length: int) -> int:
        for kernel, stride, padding in convolutions:
            length = max(0, (length + 2 * padding - kernel) // stride + 1)
        return rows * length

    found = find_row_count(count, 3_001, 1 << 20)
    assert isinstance(found, RowCount)
    for length in (3_000, 3_333, 9_999, 123_457):
        assert found(length) == count(length)
        symbol = eval(str(found).replace("/", "//"), {"T": length})
        assert symbol == count(length)


def test_other_row_counts_are_not_described() -> None:
    assert find_row_count(lambda length: 0, 100, 1_024) is None
    assert find_row_count(lambda length: 7, 100, 1_024) is None
    assert find_row_count(lambda length: length * length, 100, 1_024) is None
    assert find_row_count(lambda length: length // 3 if length < 900 else 300, 100, 1_024) is None


def test_a_batch_is_split_where_its_recordings_end() -> None:
    form = AnyLengthSound((1, 8, 2), 1, "input_features_mask", RowCount(1, 0, 1))
    batch = np.arange(24, dtype=np.float32).reshape(2, 6, 2)
    mask = np.array([[True] * 4 + [False] * 2, [True] * 6])
    first, second = form.split({"sound": batch, "input_features_mask": mask}, "sound") or ()
    assert np.array_equal(first, batch[:1, :4]) and np.array_equal(second, batch[1:])
    joined = form.joined([torch.from_numpy(first), torch.from_numpy(second)])
    assert joined.shape == (2, 6, 2) and not joined[0, 4:].any()
    assert torch.equal(form.known([first.shape, second.shape])["input_features_mask"], torch.from_numpy(mask))


@pytest.mark.parametrize(("family", "rows"), [("gemma4", "(T+3)/4"), ("fun_asr_nano", "T")])
def test_models_hear_recordings_of_any_length(family: str, rows: str, tmp_path: Path) -> None:
    """The check runs a prompt with one recording, one with two of other lengths, and text alone."""
    save_tiny_model(build_tiny_model(family, task=AUDIO_TEXT_TO_TEXT), tmp_path / "model", AUDIO_TEXT_TO_TEXT)
    result = exported(tmp_path / "model", tmp_path / "out", task=AUDIO_TEXT_TO_TEXT)
    assert result.validation is not None and len(result.validation.checks) == 3
    assert max(check.max_abs_error for check in result.validation.checks) <= 5e-4
    processed = read_manifest(tmp_path / "out")["multimodal"]
    assert processed["input_features"]["shape"][1] == "T" and processed["rows_per_segment"] == rows


@pytest.mark.nightly
def test_gemma_3n_fills_up_the_rows_of_a_recording(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    test_models_hear_recordings_of_any_length("gemma3n", 188, tmp_path)  # type: ignore[arg-type]


def test_a_model_that_sees_and_hears_is_exported_for_the_task_that_is_asked_for() -> None:
    config = build_tiny_model("gemma4", task=AUDIO_TEXT_TO_TEXT).config
    assert family_of(config).medium.task == IMAGE_TEXT_TO_TEXT
    assert family_of(config, task=AUDIO_TEXT_TO_TEXT).medium.task == AUDIO_TEXT_TO_TEXT
