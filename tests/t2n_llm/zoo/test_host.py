"""The harness, tested with cells that hang, die, eat memory or lie: each is a verdict, and the next one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from generic_export.processes import end_tree, process_tree
from t2n_llm.zoo.host import run_in_process
from t2n_llm.zoo.local import Host, HostOptions, run_local
from t2n_llm.zoo.verdict import CRASHED, MEMORY, RIGHT, TIMEOUT, Cell, CellVerdict
from tests.t2n_llm.zoo import fake_cells

FAKE = "tests.t2n_llm.zoo.fake_cells"


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files; a cell must leave nothing in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def judge(name: str, *, timeout: float = 60.0, memory: int = 1 << 40, fresh: bool = False) -> CellVerdict:
    cell = Cell(name, timeout_seconds=timeout, max_rss_bytes=memory)
    return run_in_process(cell, fake_cells, fresh=fresh)


# what it is called -> words of the message, and of the log
DYING = {
    "killed": ("SIGKILL", "about to be killed"),
    "abort": ("SIGABRT", "thread panicked"),
    "leave": ("exit code 0 and without a verdict", ""),
    "garbage": ("exit code 0 and without a verdict", '{"outcome": "right"}'),
    "another-verdict": ("exit code 0 and without a verdict", ""),
    "system-exit": ("exit code 1 and without a verdict", "SystemExit"),
    "raise": ("exit code 1 and without a verdict", "nobody caught me"),
}


@pytest.mark.parametrize("name", DYING)
def test_a_cell_that_dies_is_a_verdict(name: str, clean: Path) -> None:
    message, log = DYING[name]
    verdict = judge(name)
    assert (verdict.outcome, verdict.stage) == (CRASHED, f"stage of {name}")
    assert message in verdict.message
    assert log in verdict.log
    assert len(verdict.log) <= 4000
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize("name", ["hang", "ignore-term"])
def test_a_cell_that_hangs_is_ended_with_all_it_started(name: str, clean: Path) -> None:
    before = {info.pid for info in process_tree(os.getpid())}
    started = time.monotonic()
    verdict = judge(name, timeout=1.5)
    assert (verdict.outcome, verdict.stage) == (TIMEOUT, f"stage of {name}")
    assert 1.5 <= verdict.seconds <= time.monotonic() - started < 20
    assert list(clean.iterdir()) == []
    assert {info.pid for info in process_tree(os.getpid())} <= before
    assert not _running("sleep 600")


def _running(words: str) -> list[str]:
    """Return our own processes whose command line is `words`."""
    mine = os.getuid()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if line == words and entry.stat().st_uid == mine:
                found.append(entry.name)
        except (OSError, UnicodeDecodeError):
            continue
    return found


@pytest.mark.parametrize("name", ["eat-memory", "eat-memory-in-a-child"])
def test_a_cell_that_eats_memory_is_ended(name: str, clean: Path) -> None:
    limit = 300 << 20
    verdict = judge(name, memory=limit, fresh=True)
    assert (verdict.outcome, verdict.stage) == (MEMORY, f"stage of {name}")
    assert verdict.peak_rss_bytes > limit
    assert "more than the limit" in verdict.message
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize("fresh", [False, True])
def test_a_cell_that_behaves(fresh: bool, clean: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = judge("noise", fresh=fresh)
    assert verdict.outcome == RIGHT
    assert verdict.checks["prefill"].same_tokens == 1
    assert verdict.seconds > 0
    assert capfd.readouterr().out == ""
    assert list(clean.iterdir()) == []


def test_a_fresh_cell_that_dies(clean: Path) -> None:
    assert judge("abort", fresh=True).message.startswith("killed by SIGABRT")


def test_the_pool_survives_its_cells(clean: Path) -> None:
    """Two hosts, among the cells one that kills its host: everyone else gets a verdict."""
    names = ["killed", "good", "kill-host", "garbage", "noise", "leave", "good too", "absent"]
    found = {
        verdict.architecture: verdict for verdict in run_local([Cell(name) for name in names], 2, HostOptions(FAKE))
    }
    assert sorted(found) == sorted(names)
    assert {name for name in names if found[name].outcome == RIGHT} == {"good", "noise", "good too"}
    assert (found["kill-host"].outcome, found["kill-host"].stage) == (CRASHED, "host")
    assert list(clean.iterdir()) == []


def test_a_work_module_that_cannot_be_imported_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    (verdict,) = run_local([Cell("any")], 1, HostOptions("tests.no_such_module"))
    assert (verdict.outcome, verdict.stage) == (CRASHED, "host")
    assert "no_such_module" in capfd.readouterr().err


def test_a_run_that_is_given_up_leaves_no_process_and_no_file(clean: Path) -> None:
    verdicts = run_local([Cell("good"), Cell("hang"), Cell("good too")], 1, HostOptions(FAKE))
    assert next(verdicts).architecture == "good"
    time.sleep(0.5)
    verdicts.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 10
    while _running("sleep 600") and time.monotonic() < end:
        time.sleep(0.05)
    assert not _running("sleep 600")
    assert list(clean.iterdir()) == []


def test_a_host_whose_parent_is_killed_ends_its_cell() -> None:
    code = (
        "import sys; from t2n_llm.zoo.local import *; from t2n_llm.zoo.verdict import Cell\n"
        f"host = Host(HostOptions({FAKE!r})); print(host.run(Cell('good')).outcome, flush=True); host.run(Cell('hang'))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"right\n"
        time.sleep(1.0)
        tree = process_tree(process.pid)
        assert len(tree) >= 3
        process.kill()
    end = time.monotonic() + 20
    while _alive([info.pid for info in tree]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _alive([info.pid for info in tree])


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_tree(pid) and not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ending_a_tree_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    seen = psutil.Process(process.pid)
    process.wait()
    end_tree(seen)
    assert process_tree(process.pid) == []


def test_a_closed_host_starts_no_other() -> None:
    host = Host(HostOptions(FAKE))
    assert host.run(Cell("good")).outcome == RIGHT
    host.close()
    assert host.run(Cell("good")).outcome == CRASHED
