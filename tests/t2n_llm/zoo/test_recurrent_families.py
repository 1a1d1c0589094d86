"""Families that keep more than keys and values: the four checks in the real engine, from one graph for prefill and decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from generic_export.errors import EngineMissingError, ValidationError
from generic_export.inference_target.tract.engines.cli import CommandOptions, TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from kvcache.recurrent import LastRead
from t2n_llm import export_llm
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import WheelRunner, open_runner
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.graph.interface import recorded_states
from tests import families
from tests.recurrent_families import RECURRENT_FAMILIES
from tests.t2n_llm.zoo.attention_families import nightly_unless

MAX_ABS_ERROR = 1e-4
DECODE_STEPS = 16


@pytest.fixture(scope="module")
def cli() -> TractCli:
    try:
        return TractCli()
    except EngineMissingError as error:
        pytest.skip(f"the tract command is not installed (scripts/install_tract_cli): {error.message}")


def export(family: str, folder: Path, dtype: str = "f32", **options: object) -> ExportResult:
    stored = torch.bfloat16 if dtype == "f16" else torch.float32
    source = families.save_tiny_model(family, folder / "model", stored, configs=RECURRENT_FAMILIES)
    return export_llm(
        str(source), folder / "export", dtype=dtype, decode_steps=DECODE_STEPS, require_tokenizer=False, **options
    )


# Of each recurrence of ours, each form of states and each way to keep them one; LFM2 is below. The others are made of these.
EVERY_TIME = {
    "mamba": "a selective scan; several layers",
    "falcon_h1": "a dual form, beside attention in the same layer",
    "qwen3_5_text": "a delta rule, beside layers of attention",
    "minimax": "a form of its own, positions counted by us",
    "recurrent_gemma": "a form of its own",
    "rwkv": "a form of its own",
    "xlstm": "a form of its own",
}


@pytest.mark.parametrize("family", nightly_unless(EVERY_TIME, sorted({*RECURRENT_FAMILIES} - {"lfm2"})))
def test_family_in_f32(family: str, tmp_path: Path) -> None:
    _require_exact(export(family, tmp_path))


def _require_exact(result: ExportResult) -> None:
    report = result.validation
    assert report is not None
    assert [check.name for check in report.checks] == ["prefill", "chunked prefill", "decode", "greedy"]
    for check in report.checks:
        assert check.max_abs_error <= MAX_ABS_ERROR, check.name
        assert check.same_top1_count == len(check.steps), check.name
    assert len(report.checks[3].steps) == DECODE_STEPS >= 16
    # The logits must be worth comparing.
    assert max(step.scale for check in report.checks for step in check.steps) > 1.5
    assert any(not state.grows for state in recorded_states(result.manifest))


@pytest.mark.parametrize(
    "family",
    nightly_unless(["mamba"], ["mamba", "mamba2", "qwen3_5_text", "lfm2", "falcon_h1", "rwkv"]),
)
def test_family_in_f16(family: str, tmp_path: Path) -> None:
    result = export(family, tmp_path, dtype="f16")
    assert result.validation is not None
    assert result.validation.passed
    # What transformers accumulates in f32 stays so between calls.
    kinds = {(state.kind, state.dtype) for state in recorded_states(result.manifest)}
    assert ("recurrent_state", "f16") not in kinds


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export("lfm2", tmp_path_factory.mktemp("lfm2"))


def test_convolutions_beside_attention_in_f32(lfm2: ExportResult) -> None:
    _require_exact(lfm2)


def test_states_are_described_in_the_manifest(lfm2: ExportResult) -> None:
    states = json.loads((lfm2.output_dir / "export.json").read_text())["graph"]["states"]
    described = {state["input_name"]: (state["shape"], state["axis"], state["dtype"]) for state in states}
    assert described == {
        "in_conv_state_0": (["B", 64, 3], None, "f32"),
        "in_cache_key_1": (["B", 2, "P", 16], 2, "f32"),
        "in_cache_value_1": (["B", 2, "P", 16], 2, "f32"),
        "in_conv_state_2": (["B", 64, 3], None, "f32"),
    }
    with TractWheel().load(lfm2.archive) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids", *described]


def test_a_session_keeps_fixed_states_itself(lfm2: ExportResult) -> None:
    """What `generate` uses: only token ids go in, whatever the engine does not keep is fed back."""
    ids = np.array([[5, 9, 11, 3]], np.int64)
    with WheelRunner(lfm2.archive) as runner:
        (expected,) = runner.run_turns([ids[0].tolist()], stateful=False)
        session = runner.open_session()
        for token in ids[0]:
            (logits,) = session.run([np.array([[token]], np.int64)])
        again = runner.open_session().run([ids[:, -1:]])[0]
    assert np.abs(logits[0] - expected).max() < 1e-5
    assert np.abs(again[0] - expected).max() > 1e-2, "a fresh session must not know what another one was told"


def test_bundles_hold_the_states_before_a_step(lfm2: ExportResult) -> None:
    with np.load(lfm2.output_dir / "tests" / "decode_step.npz") as bundle:
        assert bundle["in_conv_state_0"].shape == (1, 64, 3)
        assert np.abs(bundle["in_conv_state_0"]).max() > 0
        assert np.abs(bundle["out_conv_state_0"] - bundle["in_conv_state_0"]).max() > 0
        assert bundle["in_cache_key_1"].shape[2] + 1 == bundle["out_cache_key_1"].shape[2]
    names = {path.stem for path in (lfm2.output_dir / "tests").iterdir()}
    assert names == {"prefill", "decode_step"}, "the command cannot feed fixed states from turn to turn"


def test_bundles_run_in_the_command(lfm2: ExportResult, cli: TractCli) -> None:
    for name in ("prefill", "decode_step"):
        bundle = lfm2.output_dir / "tests" / f"{name}.npz"
        check = cli.check_bundle(
            lfm2.archive, bundle, CommandOptions(llm=False, unfold_kv_cache=False, atol=1e-4, rtol=1e-4)
        )
        assert check.passed, check.output
        assert check.checked_outputs >= 5, "logits and four states"


def test_the_command_runs_turn_by_turn(lfm2: ExportResult, cli: TractCli) -> None:
    turns = [[5, 9, 11], [3], [7, 2]]
    states = recorded_states(lfm2.manifest)
    with open_runner(lfm2.archive, states, "f32", EngineOptions("cli")) as command, WheelRunner(lfm2.archive) as wheel:
        for stateful in (False, True):
            found = command.run_turns(turns, stateful=stateful)
            expected = wheel.run_turns(turns, stateful=stateful)
            for one, other in zip(found, expected, strict=True):
                assert np.abs(one - other).max() < 1e-5


def test_a_folder_is_validated_again(lfm2: ExportResult, tmp_path: Path) -> None:
    source = lfm2.output_dir.parent / "model"
    assert validate_folder(lfm2.output_dir, str(source), options=ValidateOptions.of(decode_steps=4)).passed


def test_a_dropped_state_would_be_seen(captures: dict[Any, Any], tmp_path: Path) -> None:
    """The checks can tell a graph whose recurrence starts from zeros: chunked prefill and decode differ, prefill does not."""
    with (
        mock.patch.dict(captures, clear=True),
        mock.patch.object(LastRead, "take", lambda self, rank: None),
        pytest.raises(ValidationError, match="chunked prefill"),
    ):
        export("mamba", tmp_path)


@pytest.mark.parametrize("family", nightly_unless(["falcon_h1"], ["falcon_h1", "mamba2", "lfm2"]))
def test_sequences_of_a_batch_do_not_mix(family: str, tmp_path: Path) -> None:
    result = export(family, tmp_path, batch=True, check=False, num_logits_to_keep=0)
    states = recorded_states(result.manifest)
    ids = np.array([[5, 9, 11, 3], [7, 7, 2, 40]], np.int64)
    with TractWheel().load(result.archive) as model:
        together = model.run([ids, *(state.at_start(2) for state in states)])[0]
        alone = [model.run([row[None], *(state.at_start(1) for state in states)])[0][0] for row in ids]
    assert together.shape[:2] == (2, 4)
    assert np.abs(together - np.stack(alone)).max() < 1e-5
    assert np.abs(together[0] - together[1]).max() > 1e-2
