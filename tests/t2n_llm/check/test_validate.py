"""The verdict itself: what counts as agreement, and that each kind of fault is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from generic_export.errors import OptionError
from t2n_llm.check.agreement import Tolerance, compare_step
from t2n_llm.check.llm_checks import validate_archive
from t2n_llm.check.options import CheckingOptions
from t2n_llm.check.reference import CheckPlan, ReferenceRun, run_reference
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.pipeline import export_llm
from t2n_llm.export.revalidate import validate_folder
from tests.families import config
from tests.shared_folders import SharedExport
from tests.trained_model import REAL_MODEL

VOCAB = 20
AGREED = dict.fromkeys(("prefill", "chunked prefill", "decode", "greedy"), True)


@pytest.fixture(scope="module")
def reference() -> ReferenceRun:
    ids = (1, 300, 41, 52, 963, 74, 85, 96, 107, 218)
    return run_reference(REAL_MODEL, CheckPlan(ids, (3, 4, 10), 5, 6))


@pytest.fixture(scope="module")
def runner(shared_export: SharedExport) -> Iterator[WheelRunner]:
    with WheelRunner(locate_archive(shared_export(REAL_MODEL, dtype="f32", check=False)).path) as engine:
        yield engine


def verdicts(runner: WheelRunner, run: ReferenceRun, dtype: str = "f32") -> dict[str, bool]:
    return {check.name: check.passed for check in validate_archive(runner, run, dtype).checks}


def changed(logits: np.ndarray, row: int, column: int, by: float) -> np.ndarray:
    copy = logits.copy()
    copy[row, column] += by
    return copy


def test_an_honest_export_agrees(runner: WheelRunner, reference: ReferenceRun) -> None:
    assert verdicts(runner, reference) == AGREED


def test_a_difference_in_one_chunk_fails_only_that_check(runner: WheelRunner, reference: ReferenceRun) -> None:
    run = replace(reference, text_logits=changed(reference.text_logits, 2, 7, 0.1))  # the end of the first chunk
    assert verdicts(runner, run) == AGREED | {"chunked prefill": False}


def test_a_difference_late_in_decoding_is_seen(runner: WheelRunner, reference: ReferenceRun) -> None:
    run = replace(reference, greedy_logits=changed(reference.greedy_logits, 5, 3, 1.0))
    assert verdicts(runner, run) == AGREED | {"decode": False, "greedy": False}


def with_rival(reference: ReferenceRun, step: int, lead: float) -> ReferenceRun:
    """PyTorch prefers the runner-up of a step by `lead` logits, where the engine prefers the first."""
    row = reference.greedy_logits[step]
    second, first = (int(i) for i in np.argsort(row)[-2:])
    greedy = changed(reference.greedy_logits, step, second, float(row[first] - row[second]) + lead)
    return replace(reference, greedy_logits=greedy)


def test_another_token_is_forgiven_only_when_it_is_a_tie(runner: WheelRunner, reference: ReferenceRun) -> None:
    gaps = np.diff(np.sort(reference.greedy_logits, axis=1)[:, -2:], axis=1)[:, 0]
    step = int(gaps.argmin())
    scale = max(1.0, float(np.abs(reference.greedy_logits[step]).max()))
    close = with_rival(reference, step, 1e-3)
    greedy = validate_archive(runner, close, "f16", tolerance=Tolerance(float(gaps[step] + 0.01) / scale, 1.0)).checks[
        -1
    ]
    assert greedy.passed
    assert "tie" in greedy.note
    assert len(greedy.steps) == step + 1  # it stops where the texts part
    strict = validate_archive(runner, close, "f32").checks[-1]
    assert not strict.passed
    assert "a real difference" in strict.note


def test_values_that_are_no_numbers_never_agree() -> None:
    expected = np.linspace(-1, 1, VOCAB)
    for bad in (np.nan, np.inf, -np.inf):
        answer = expected.copy()
        answer[3] = bad
        assert not compare_step(0, answer, expected).agrees(Tolerance(1e9, 1e9))


@given(st.integers(0, 1000), st.floats(0, 3))
def test_step_figures(seed: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    expected = random.normal(size=VOCAB) * 3
    answer = expected + random.uniform(-noise, noise, size=VOCAB)
    step = compare_step(0, answer, expected)
    assert step.kl_divergence >= 0
    assert step.max_abs_error <= noise + 1e-9
    assert step.same_top1 == (answer.argmax() == expected.argmax())
    assert step.top1_gap >= 0
    assert step.same_top1 or step.top1_gap <= 2 * step.max_abs_error + 1e-9


def test_a_shift_of_all_logits_changes_no_probability_but_is_an_error() -> None:
    expected = np.linspace(-1, 1, VOCAB)
    step = compare_step(0, expected + 0.5, expected)
    assert step.kl_divergence < 1e-9
    assert not step.agrees(Tolerance.for_dtype("f16"))


def test_unknown_element_types_have_no_tolerance() -> None:
    with pytest.raises(OptionError, match="q4_0"):
        Tolerance.for_dtype("q4_0")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_pytorch_is_fed_as_the_engine_is_where_that_changes_the_answer(kind: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, **factors}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config("llama", rope_parameters=rope)()).save_pretrained(tmp_path / "model")
    result = export_llm(str(tmp_path / "model"), tmp_path / "export", require_tokenizer=False, decode_steps=8)
    assert result.validation is not None and result.validation.passed
    options = ValidateOptions(checking=CheckingOptions(decode_steps=8, device_map="disk"))
    assert validate_folder(result.output_dir, str(tmp_path / "model"), options=options).passed


def test_tokens_that_both_exclude_count_for_neither_error_nor_scale() -> None:
    least = np.finfo(np.float32).min
    expected = np.array([1.0, least, 2.0, least], np.float32)
    step = compare_step(0, np.array([1.0, least, 2.5, least], np.float32), expected)
    assert (step.max_abs_error, step.scale) == (0.5, 2.0)
    halves = compare_step(0, np.array([1.0, -65504.0, 2.0, -65504.0], np.float16), expected)
    assert halves.max_abs_error == 0.0
    one = compare_step(0, np.array([1.0, least, 2.0, 0.0], np.float32), expected)  # written after all
    assert not one.agrees(Tolerance.for_dtype("f32"))
