"""The search: strategies, workers that die, resume, interruption, reproductions."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import KhronosNNEF, TractNNEF
from generic_export.debug.attempt.worker import Worker
from generic_export.diagnose import (
    Diagnosis,
    DiagnosisError,
    Limits,
    Outcome,
    Progress,
    Stage,
    diagnose,
    diagnosis_text,
    observe,
)
from generic_export.errors import OptionError
from tests.generic_export.debug import toys
from tests.generic_export.debug.planted import (
    DecidedByPython,
    HalfNorm,
    UnsupportedOperator,
    WrongEpsilon,
    line_of,
)

ROOT = Path(__file__).resolve().parents[3]


def rows(*counts: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(count, 4),) for count in counts]


def stack(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers).eval()


def outcomes(found: Diagnosis) -> dict[str, Outcome]:
    return {piece.path: found.verdict(piece.key).outcome for piece in found.pieces}


# --- strategies -------------------------------------------------------------------------------------


def test_whole_tries_the_root_only() -> None:
    model = stack(nn.Linear(4, 4), DecidedByPython())
    found = diagnose(model, TractNNEF(), rows(3, 5), strategy="whole")
    assert outcomes(found) == {"": Outcome.FAILED, "0": Outcome.NOT_TRIED, "1": Outcome.NOT_TRIED}


def test_leaves_tries_every_piece_and_no_parent_of_a_failing_one() -> None:
    model = stack(nn.Linear(4, 4), DecidedByPython())
    found = diagnose(model, TractNNEF(), rows(3, 5), strategy="leaves")
    assert outcomes(found) == {"": Outcome.NOT_TRIED, "0": Outcome.OK, "1": Outcome.FAILED}
    assert [culprit.piece.path for culprit in found.culprits()] == ["1"]


def test_isolate_tries_parents_without_their_children() -> None:
    model = stack(stack(nn.Linear(4, 4), DecidedByPython()))
    found = diagnose(model, TractNNEF(), rows(3, 5), strategy="isolate")
    assert outcomes(found)["0"] is Outcome.OK
    assert outcomes(found)["0.1"] is Outcome.FAILED


def test_depth_stops_the_descent() -> None:
    model = stack(stack(nn.Linear(4, 4), DecidedByPython()))
    found = diagnose(model, TractNNEF(), rows(3, 5), depth=1)
    assert outcomes(found)["0"] is Outcome.FAILED
    assert outcomes(found)["0.1"] is Outcome.NOT_TRIED


def test_only_begins_at_a_module_and_refuses_one_that_is_not_there() -> None:
    model = stack(stack(nn.Linear(4, 4), nn.ReLU()), DecidedByPython())
    found = diagnose(model, TractNNEF(), rows(3, 5), only="0")
    assert found.ok
    assert outcomes(found)[""] is Outcome.NOT_TRIED
    with pytest.raises(OptionError, match="no module 'nothing'"):
        diagnose(model, TractNNEF(), rows(3, 5), only="nothing")


def test_two_faults_are_both_found_by_several_workers_at_once() -> None:
    model = stack(nn.Linear(4, 4), DecidedByPython(), nn.ReLU(), UnsupportedOperator())
    seen: list[Progress] = []
    found = diagnose(model, TractNNEF(), rows(3, 5), jobs=2, progress=seen.append)
    assert {culprit.source for culprit in found.culprits()} == {
        line_of(DecidedByPython, "the decision"),
        line_of(UnsupportedOperator, "the operator"),
    }
    ended = [step for step in seen if step.verdict is not None]
    assert [step.done for step in ended] == list(range(1, len(ended) + 1))
    assert ended[-1].done == ended[-1].known
    with pytest.raises(DiagnosisError, match="DecidedByPython"):
        found.raise_if_failed()


def test_a_wrong_result_is_followed_to_the_piece_and_ranked_first() -> None:
    torch.manual_seed(0)
    norm = WrongEpsilon(torch.ones(4), 1e-3)
    found = diagnose(stack(nn.Linear(4, 4), norm, nn.Linear(4, 4)), TractNNEF(), rows(3, 5), strategy="numerics")
    assert found.ranking()[0][0].class_name == "WrongEpsilon"
    (culprit,) = found.culprits()
    assert culprit.piece.class_name == "WrongEpsilon"
    assert culprit.verdict.stage is Stage.COMPARE
    worst = culprit.verdict.worst
    assert worst is not None
    assert worst.snr_db < 60
    assert outcomes(found)["0"] is Outcome.OK


def test_what_is_pointed_at_and_is_right_is_passed_over() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(256, 256), nn.Linear(256, 1)
    with torch.no_grad():
        last.weight.mul_(1e-3)
        last.bias.zero_()
    # What the first layer rounds off is more than the small result may be wrong by.
    model = stack(nn.Sequential(first, WrongEpsilon(torch.ones(256), 1e-2)), last)
    tried: list[str] = []
    found = diagnose(
        model,
        TractNNEF(),
        [(10 * torch.randn(count, 256),) for count in (3, 5)],
        progress=lambda step: tried.append(step.piece.path) if step.verdict else None,
    )
    (culprit,) = found.culprits()
    assert culprit.piece.path == "0.1"
    assert tried[:2] == ["", "0.0"]
    assert outcomes(found)["0.0"] is Outcome.OK


def test_equal_modules_are_tried_one_by_one_when_asked_for() -> None:
    model = stack(nn.Linear(4, 4), nn.Linear(4, 4))
    together = diagnose(model, TractNNEF(), rows(3, 5), strategy="whole")
    assert [piece.label for piece in together.pieces] == ["Sequential", "2 x Linear"]
    each = diagnose(model, TractNNEF(), rows(3, 5), strategy="numerics", every_member=True)
    assert all(verdict.engine_nodes for verdict in each.verdicts)
    assert {piece.path for piece in each.pieces} == {"", "0", "1"}
    assert all(len(piece.paths) == 1 for piece in each.pieces)


def test_switches_that_compute_in_f32_are_suggested_where_they_help() -> None:
    torch.manual_seed(0)
    sets = [(torch.randn(count, 64).half(),) for count in (3, 5)]
    model = stack(HalfNorm(torch.ones(64), 1e-5)).half()
    found = diagnose(model, TractNNEF(), sets, strategy="numerics", only="0")
    (wrong,) = [verdict for verdict in found.verdicts if verdict.failed]
    assert any("force_norm_in_f32" in words for words in wrong.suggestions)
    assert "force_norm_in_f32" in diagnosis_text(found)


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"strategy": "always"}, {"depth": -1}, {"jobs": 0}, {"input_sets": []}, {"input_sets": [torch.zeros(2, 4)]}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"input_sets": rows(3, 5)} | options
    with pytest.raises(OptionError):
        diagnose(toys.Doubled(), TractNNEF(), **arguments)


def test_a_target_that_is_not_tract_is_refused() -> None:
    with pytest.raises(OptionError, match="Khronos"):
        diagnose(toys.Doubled(), KhronosNNEF(), rows(3, 5))  # type: ignore[arg-type]


# --- workers ----------------------------------------------------------------------------------------


def test_a_process_that_dies_is_a_verdict() -> None:
    (culprit,) = diagnose(stack(nn.ReLU(), toys.Dies()), TractNNEF(), rows(3, 5)).culprits()
    assert culprit.piece.class_name == "Dies"
    assert culprit.verdict.stage is Stage.CAPTURE
    assert culprit.verdict.error is not None
    assert "SIGKILL" in culprit.verdict.error.message


def test_a_process_that_hangs_is_ended_in_time() -> None:
    began = time.monotonic()
    found = diagnose(toys.Hangs().eval(), TractNNEF(), rows(3, 5), limits=Limits(seconds=6), strategy="whole")
    assert time.monotonic() - began < 60
    (culprit,) = found.culprits()
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "TimeLimitError"


def test_a_process_that_eats_memory_is_ended() -> None:
    limits = Limits(memory="256MiB")
    found = diagnose(toys.EatsMemory().eval(), TractNNEF(), rows(3, 5), limits=limits, strategy="whole")
    (culprit,) = found.culprits()
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "MemoryLimitError"
    assert culprit.verdict.peak_rss > 256 << 20


def test_an_engine_that_is_killed_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "tract.py"
    fake.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = diagnose(toys.Doubled().eval(), TractNNEF(), rows(3, 5), strategy="whole")
    (culprit,) = found.culprits()
    assert culprit.verdict.stage is Stage.LOAD
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "EngineCrashError"


# --- resume and interruption --------------------------------------------------------------------------


def test_what_passed_is_not_tried_again(tmp_path: Path) -> None:
    model = stack(nn.Linear(4, 4), DecidedByPython())
    sets = rows(3, 5)
    first = diagnose(model, TractNNEF(), sets, out=tmp_path)
    with (tmp_path / "verdicts.jsonl").open("a") as journal:
        journal.write('{"torn')
    second = diagnose(model, TractNNEF(), sets, out=tmp_path)
    cached = {piece.path: second.verdict(piece.key).cached for piece in second.pieces}
    assert cached == {"": False, "0": True, "1": False}
    assert outcomes(first) == outcomes(second)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    for resume in (True, False):
        again = diagnose(model, TractNNEF(), sets, out=tmp_path, only="0", resume=resume)
        assert outcomes(again)["0"] is Outcome.OK
        assert not any(verdict.cached for verdict in again.verdicts), resume


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_leaves_a_report_of_what_is_known(tmp_path: Path) -> None:
    model = stack(nn.Linear(4, 4), toys.Hangs(), DecidedByPython())

    def interrupt(step: Progress) -> None:
        if step.verdict is None and step.piece.class_name == "Hangs":
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    found = diagnose(model, TractNNEF(), rows(3, 5), strategy="leaves", out=tmp_path, progress=interrupt)
    assert found.interrupted
    assert not found.ok
    assert outcomes(found) == {"": Outcome.NOT_TRIED, "0": Outcome.OK, "1": Outcome.NOT_TRIED, "2": Outcome.NOT_TRIED}
    assert "interrupted" in diagnosis_text(found)
    assert Diagnosis.from_json((tmp_path / "diagnosis.json").read_text()) == found


def test_a_worker_ends_with_its_parent() -> None:
    def task(_reached: Any) -> Any:
        time.sleep(100)

    def start_and_die() -> None:
        theirs.send(Worker("key", "path", task, Limits()).pid)
        os._exit(0)

    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=start_and_die)
    parent.start()
    pid = ours.recv()
    parent.join()
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_a_task_that_raises_is_a_verdict_with_its_words() -> None:
    def task(_reached: Any) -> Any:
        raise RuntimeError("something unforeseen")

    worker = Worker("key", "path", task, Limits())
    verdict = None
    while verdict is None:
        verdict = worker.look()
        time.sleep(0.05)
    assert verdict.failed
    assert verdict.error is not None
    assert "something unforeseen" in verdict.error.message


# --- reproductions ------------------------------------------------------------------------------------


def test_a_reproduction_stands_alone_and_holds_nothing_private(tmp_path: Path) -> None:
    model = stack(stack(nn.Linear(4, 4), UnsupportedOperator()))
    sets = rows(3, 5)
    found = diagnose(model, TractNNEF(), sets, out=tmp_path)
    (culprit,) = found.culprits()
    folder = Path(culprit.verdict.repro_path)
    assert folder.parent == tmp_path / "repro"
    run = reproduced(folder)
    assert run.returncode == 1, run.stderr
    assert "aten.linalg_ldl_factor_ex.default" in run.stdout
    for path in folder.iterdir():
        assert str(ROOT).encode() not in path.read_bytes() or path.suffix == ".pt"
    inputs = np.load(folder / "inputs.npz")
    assert {inputs[name].shape for name in inputs.files} == {(3, 4), (5, 4)}


def test_random_weights_stand_for_the_real_ones_unless_asked_otherwise(tmp_path: Path) -> None:
    model = stack(toys.FailsAloneOnly())
    secret = model[0].linear.weight.detach().numpy()
    for name, private in (("private", True), ("open", False)):
        diagnose(model, TractNNEF(), rows(3, 5), out=tmp_path / name, private=private, only="0", depth=0)
    for name, is_there in (("private", False), ("open", True)):
        (folder,) = (tmp_path / name / "repro").iterdir()
        held = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (secret.tobytes() in held) is is_there
        code, said = reproduced_in_fork(folder)
        assert code == 1 and "linalg_ldl_factor_ex" in said, said


def test_a_reproduction_of_a_piece_with_a_state_brings_its_adapter(tmp_path: Path) -> None:
    from generic_export.diagnose import state_adapters
    from tests.generic_export.debug.states import GROWING, FaultyCache

    sets = [{"x": torch.randn(1, 4), "cache": toys.Growing(torch.randn(p, 4))} for p in (3, 5)]
    with state_adapters(GROWING):
        found = diagnose(FaultyCache().eval(), TractNNEF(), sets, out=tmp_path)
    (culprit,) = found.culprits()
    code, said = reproduced_in_fork(Path(culprit.verdict.repro_path))
    assert code == 1 and "linalg_ldl_factor_ex" in said, said


def test_a_class_that_cannot_be_imported_leaves_a_folder_that_says_so(tmp_path: Path) -> None:
    class Local(UnsupportedOperator):
        pass

    found = diagnose(Local().eval(), TractNNEF(), rows(3, 5), out=tmp_path)
    (culprit,) = found.culprits()
    folder = Path(culprit.verdict.repro_path)
    assert "cannot be pickled" in (folder / "README.md").read_text()
    assert not (folder / "piece.pt").exists()


def reproduced(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a reproduction in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, folder / "repro.py"], capture_output=True, text=True, env=environment)


def reproduced_in_fork(folder: Path) -> tuple[int | None, str]:
    """Run a reproduction in a fork, which has imported PyTorch already; return its exit code and what it printed."""

    def run() -> None:
        with (folder / "said.txt").open("w") as said, redirect_stdout(said), redirect_stderr(said):
            runpy.run_path(str(folder / "repro.py"), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode, (folder / "said.txt").read_text()


# --- models without weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # in f16 PyTorch has no eigenvalues on the CPU
def test_a_model_on_the_meta_device_is_tried_with_random_weights_piece_by_piece(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), UnsupportedOperator())).eval().to(dtype)
    with observe(model) as recording, torch.no_grad():
        for count in (3, 5):
            model(torch.zeros(count, 4, device="meta", dtype=dtype))
    found = diagnose(recording, TractNNEF())
    (culprit,) = found.culprits()
    assert culprit.piece.path == "1.1"
    assert culprit.verdict.stage is Stage.TRANSLATE
    linear = next(found.verdict(piece.key) for piece in found.pieces if piece.class_name == "Linear")
    assert linear.outcome is Outcome.OK
    assert linear.metrics
    assert "tried with random weights" in linear.notes
