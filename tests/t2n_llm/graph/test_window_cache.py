"""`--window-cache`: sliding layers keep their window only, and every answer stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.errors import CaptureError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.inference_target.tract.releases.install import find_tract_cli
from kvcache.states.tensors import StateTensor
from t2n_llm import export_llm
from t2n_llm.export.options import ExportOptions, ValidateOptions
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.graph.interface import recorded_states
from t2n_llm.zoo.tiny_model import save_tiny_model as save_zoo_model
from tests.families import FAMILIES, WINDOW, save_tiny_model
from tests.t2n_llm.command_line import call
from tests.t2n_llm.zoo.attention_families import family_model, fewest_layers

# What makes each one different; families outside `tests.families` are the zoo's.
_SLIDING = {
    "mistral": "every layer slides: the length of the past is a state of its own",
    "gemma2": "every second layer slides; soft-capped scores",
    "gemma3_text": "one layer in six sees everything; two rotary bases",
    "qwen2": "the first layer sees everything",
    "phi3": "every layer slides; partial rotary",
    "gpt_oss": "sinks, experts",
    "llama4_text": "chunks instead of windows: a key is seen up to the end of its chunk",
    "gemma3n_text": "layers that share the keys and values of an earlier one",
}
_CHANGES = {
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    }
}
_EVEN: dict[str, Any] = {"dtype": "f32", "decode_steps": 3 * WINDOW, "require_tokenizer": False, "window_cache": True}


def export(source: Path, folder: Path, **options: Any) -> ExportResult:
    return export_llm(str(source), folder, **(_EVEN | options))


def save(family: str, folder: Path) -> Path:
    if family in FAMILIES:
        return save_tiny_model(family, folder)
    save_zoo_model(family_model(family, {**fewest_layers(family), **_CHANGES.get(family, {})}), folder)
    return folder


@contextmanager
def loaded(result: ExportResult) -> Iterator[tuple[WheelModel, tuple[StateTensor, ...]]]:
    with TractWheel().load(result.archive) as model:
        yield model, recorded_states(result.manifest)


# Whose windows are arranged as in another one.
_ALIKE = ("gemma3_text", "qwen2", "phi3")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly if name in _ALIKE else ()) for name in _SLIDING]
)
def test_the_four_checks_far_beyond_the_window(family: str, tmp_path: Path) -> None:
    result = export(save(family, tmp_path / "model"), tmp_path / "out")
    assert result.validation is not None
    for check in result.validation.checks:
        assert check.passed and check.max_abs_error <= 1e-4, check.name
        assert check.same_top1_count == len(check.steps), check.name
    assert [len(check.steps) for check in result.validation.checks][2:] == [3 * WINDOW, 3 * WINDOW]
    states = recorded_states(result.manifest)
    assert f"W{WINDOW}" in result.manifest["graph"]["symbols"]
    assert {state.window for state in states} >= {WINDOW}
    assert any(state.grows or state.kind == "past_length" for state in states)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportResult, ExportResult]:
    """Gemma 2, with windows and with all positions."""
    folder = tmp_path_factory.mktemp("windows")
    source = save_tiny_model("gemma2", folder / "model")
    return export(source, folder / "cut"), export(source, folder / "whole", window_cache=False, check=False)


@pytest.mark.parametrize(
    "ends",
    [
        (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 40),
        (WINDOW - 1, 2 * WINDOW + 3, 40),
        (3 * WINDOW, 3 * WINDOW + 1, 40),
        tuple(range(1, 41)),
    ],
    ids=["around the window", "chunks that straddle it", "one chunk beyond it", "token by token"],
)
def test_wherever_a_text_is_cut_the_answers_are_those_of_all_positions(
    gemma: tuple[ExportResult, ExportResult], ends: tuple[int, ...]
) -> None:
    ids = np.random.default_rng(0).integers(3, 160, size=40)
    cut, whole = gemma
    with loaded(whole) as (model, states):
        expected = [model.run([ids[None, :end], *(state.at_start(1) for state in states)])[0][0, -1] for end in ends]
    with loaded(cut) as (model, states):
        held = [state.at_start(1) for state in states]
        for (start, end), row in zip(pairwise((0, *ends)), expected, strict=True):
            logits, *held = model.run([ids[None, start:end], *held])
            np.testing.assert_allclose(logits[0, -1], row, atol=1e-4)
            assert [state.shape for state in held] == [state.sizes(1, end) for state in states]


def test_what_is_beyond_the_window_takes_no_memory(gemma: tuple[ExportResult, ExportResult]) -> None:
    def state_bytes(result: ExportResult) -> int:
        with loaded(result) as (model, states):
            _, *held = model.run([np.ones((1, 64), np.int64), *(state.at_start(1) for state in states)])
        return sum(array.nbytes for array in held)

    token = 2 * 2 * 16 * 4  # key and value, two heads of 16, f32
    cut, whole = (state_bytes(result) for result in gemma)
    assert whole == 2 * 64 * token
    assert cut == (64 + WINDOW - 1) * token


def test_the_layers_that_see_everything_still_become_engine_state(gemma: tuple[ExportResult, ExportResult]) -> None:
    with TractWheel().load(gemma[0].archive, transforms=["transformers_detect_all"]) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids", "in_cache_key_0", "in_cache_value_0"]


def test_bundles_hold_windows(tmp_path: Path) -> None:
    result = export(save_tiny_model("mistral", tmp_path / "model"), tmp_path / "out", decode_steps=4)
    files = {path.stem: path for path in (result.output_dir / "tests").iterdir()}
    assert set(files) == {"prefill", "decode_step"}, "the command feeds back what grows, and nothing else"
    with loaded(result) as (model, states), np.load(files["decode_step"]) as bundle:
        given = [bundle[state.input_name] for state in states]
        outputs = model.run([bundle["input_ids"], *given])
        assert int(bundle["in_past_length_0"][0]) > 3 * WINDOW
        assert given[0].shape[2] == WINDOW - 1
        np.testing.assert_allclose(outputs[0], bundle["outputs"], atol=1e-4)
        for state, output in zip(states, outputs[1:], strict=True):
            np.testing.assert_allclose(output, bundle[state.output_name], atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"batch": True, "num_logits_to_keep": 0}, {"dtype": "f16", "compress": "q4_0"}], ids=str
)
def test_with_other_options(options: dict[str, Any], tmp_path: Path) -> None:
    result = export(save_tiny_model("mistral", tmp_path / "model"), tmp_path / "out", **options)
    assert result.validation is not None and result.validation.passed


def test_sequences_of_a_batch_share_the_length(tmp_path: Path) -> None:
    result = export(
        save_tiny_model("mistral", tmp_path / "model"), tmp_path / "out", batch=True, num_logits_to_keep=0, check=False
    )
    ids = np.random.default_rng(1).integers(3, 160, size=(2, 30))
    with loaded(result) as (model, states):

        def answers(rows: np.ndarray) -> np.ndarray:
            held: list[np.ndarray] = [state.at_start(len(rows)) for state in states]
            for start, end in ((0, 13), (13, 29), (29, 30)):
                logits, *held = model.run([rows[:, start:end], *held])
            assert prod(held[0].shape) == len(rows) * prod(states[0].sizes(1, 30))
            return logits

        together = answers(ids)
        for row, expected in zip(ids, together, strict=True):
            np.testing.assert_allclose(answers(row[None])[0], expected, atol=1e-4)


def test_the_command_line_and_both_engines(tmp_path: Path) -> None:
    source = save_tiny_model("gemma2", tmp_path / "model")
    target = tmp_path / "out"
    done = call(
        "export", source, "-o", target, "--window-cache", "--dtype", "f32", "--no-tokenizer", "--decode-steps", "6"
    )
    assert done.code == 0, done.err
    assert call("validate", target, "--reference", source, "--decode-steps", "6").code == 0
    if find_tract_cli() is not None:
        assert validate_folder(target, str(source), options=ValidateOptions.of(engine="cli", decode_steps=6)).passed


def test_models_without_a_window_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="LlamaForCausalLM has no sliding layer"):
        export(tiny_llama, tmp_path / "out")


def test_a_window_that_no_mask_knows_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="has no sliding layer"):
        export(save("moshi", tmp_path / "model"), tmp_path / "out")


@pytest.mark.parametrize("options", [{"stateful": True}, {"kv_cache": "int8"}, {"task": "feature-extraction"}])
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"--window-cache|cut a cache"):
        ExportOptions.of(window_cache=True, **options)
