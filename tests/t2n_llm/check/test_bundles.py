"""The test bundles of an export, run by the real `tract` command as a user would; and validation with that command."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.errors import EngineMissingError, ReferenceDiedError
from generic_export.inference_target.tract.engines.cli import CommandOptions, TractCli
from t2n_llm.check.reference import run_reference_apart
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.revalidate import validate_folder
from tests.shared_folders import SharedExport
from tests.trained_model import REAL_MODEL

BUNDLES = ("prefill", "chunked_prefill", "decode_step", "generation")


@pytest.fixture(scope="module")
def cli() -> TractCli:
    try:
        return TractCli()
    except EngineMissingError as error:
        pytest.skip(f"the tract command is not installed (scripts/install_tract_cli): {error.message}")


@pytest.fixture(scope="module", params=["f32", "f16"])
def exported(request: pytest.FixtureRequest, short_model: Path, shared_export: SharedExport) -> Path:
    return shared_export(short_model, dtype=request.param, decode_steps=24)


def test_every_bundle_is_there_and_holds_no_f16(exported: Path) -> None:
    files = sorted(path.stem for path in (exported / "tests").glob("*.npz"))
    assert files == sorted(BUNDLES)
    for name in files:
        with np.load(exported / "tests" / f"{name}.npz") as arrays:
            assert {array.dtype.str for array in arrays.values()} <= {"<i8", "<f4"}


@pytest.mark.parametrize("bundle", BUNDLES)
def test_the_command_agrees_with_the_bundle(cli: TractCli, exported: Path, bundle: str) -> None:
    half = read_manifest(exported)["graph"]["dtype"] == "f16"
    check = cli.check_bundle(
        exported / "model.nnef.tar",
        exported / "tests" / f"{bundle}.npz",
        CommandOptions(allow_float_casts=half, atol=2e-2 if half else 1e-4, rtol=2e-2 if half else 1e-4),
    )
    assert check.passed, check.output
    # prefill and decode_step compare the caches of the two layers too
    assert check.checked_outputs >= (5 if bundle in ("prefill", "decode_step") else 1)


def test_the_command_decodes_token_by_token_with_the_caches_as_its_state(cli: TractCli, exported: Path) -> None:
    """Every turn of the generation bundle under `--llm`: the token that PyTorch chose next is the likeliest."""
    bundle = exported / "tests" / "generation.npz"
    outputs = cli.run_bundle(
        exported / "model.nnef.tar", bundle, CommandOptions(unfold_kv_cache=False, allow_float_casts=True)
    )
    with np.load(bundle) as arrays:
        turns = sum(name.endswith("/input_ids") for name in arrays)
        fed = [int(arrays[f"turn_{turn}/input_ids"][0, 0]) for turn in range(1, turns)]
        last = int(arrays["outputs"][0, -1].argmax())
    assert turns > 10
    assert len(outputs) == turns  # logits only: no cache comes out
    chosen = [int(outputs[f"turn_{turn}/outputs"][0, -1].argmax()) for turn in range(turns)]
    assert chosen == [*fed, last]


def test_the_bundles_are_checked_as_a_language_model(cli: TractCli, exported: Path) -> None:
    for bundle in BUNDLES:
        line = cli.assert_io_cmd_str(
            exported / "model.nnef.tar", exported / "tests" / f"{bundle}.npz", CommandOptions()
        )
        assert " --llm " in line


def test_the_command_line_of_the_documentation(cli: TractCli, exported: Path) -> None:
    line = (
        f"{cli.binary} {exported}/model.nnef.tar --llm --transform unfold-kv-cache -O run --allow-float-casts "
        f"--allow-missing-outputs --input-from-npz {exported}/tests/decode_step.npz "
        f"--assert-output-bundle {exported}/tests/decode_step.npz --approx very"
    )
    subprocess.run(line, shell=True, check=True, capture_output=True)


def test_a_wrong_answer_is_noticed(cli: TractCli, exported: Path, tmp_path: Path) -> None:
    with np.load(exported / "tests" / "decode_step.npz") as arrays:
        values = dict(arrays)
    values["outputs"] = values["outputs"] + 0.5
    np.savez(tmp_path / "wrong.npz", **values)
    check = cli.check_bundle(
        exported / "model.nnef.tar",
        tmp_path / "wrong.npz",
        CommandOptions(allow_float_casts=True, atol=2e-2, rtol=2e-2),
    )
    assert not check.passed


def test_validation_with_the_command_is_the_wheels(cli: TractCli, exported: Path, short_model: Path) -> None:
    with_cli = validate_folder(exported, str(short_model), options=ValidateOptions.of(decode_steps=20, engine="cli"))
    with_wheel = validate_folder(exported, str(short_model), options=ValidateOptions.of(decode_steps=20))
    assert with_cli.passed
    assert with_wheel.passed
    assert (with_cli.engine, with_wheel.engine) == ("cli", "wheel")
    for ours, theirs in zip(with_cli.checks, with_wheel.checks, strict=True):
        assert len(ours.steps) == len(theirs.steps)
        assert abs(ours.max_abs_error - theirs.max_abs_error) < 1e-2


def test_a_reference_process_that_is_killed_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from generic_export.processes import TaskProcess
    from t2n_llm.check.reference import CheckPlan

    def killed(process: Any) -> tuple[list[Any], Any]:
        os.kill(process.pid, signal.SIGKILL)
        return [], process.ending()

    monkeypatch.setattr(TaskProcess, "news", killed)
    with pytest.raises(ReferenceDiedError, match=r"the PyTorch process died \(SIGKILL\)"):
        run_reference_apart(REAL_MODEL, CheckPlan((1, 20, 30), (3,), 2, 1))
