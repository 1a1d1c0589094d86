"""Engine processes that load one model after another: what carries over (the process), and what never does (everything else)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import EngineCrashError, EngineLoadError, EngineRunError, EngineTimeoutError
from generic_export.inference_target.tract.engines import wheel_worker
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from generic_export.processes import start_task

tract = pytest.importorskip("tract", reason="the tract wheel is not installed")

HEADER = "version 1.0; extension tract_registry tract_core; extension tract_registry tract_transformers;\n"
SYMBOLS = "extension tract_symbol S; extension tract_symbol P;\n"
ADD = "graph net(x) -> (y) {{ x = external<scalar>(shape=[S, 3]); y = x + {}; }}"
SUM_OF_CACHE = """graph net(x, past) -> (total, all) {
  x = external<scalar>(shape=[1, S, 2]); past = external<scalar>(shape=[1, P, 2]);
  all = concat([past, x * 2.0], axis=1);
  total = sum_reduce(all, axes=[1]);
}"""
GATHER = """graph net(ids) -> (y) {
  ids = external<integer>(shape=[S]); w = [[1.0, 2.0], [3.0, 4.0]]; y = tract_core_gather(w, ids, axis=0);
}"""
ONES = np.ones((2, 3), np.float32)


@pytest.fixture(autouse=True)
def _own_pool() -> Iterator[None]:
    """Start each test without idle processes."""
    with reuse_workers(False), reuse_workers():
        yield


@pytest.fixture
def engine() -> TractWheel:
    return TractWheel(timeout_seconds=60)


def archive_of(folder: Path, graph: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "graph.nnef").write_text(HEADER + SYMBOLS + graph)
    return folder


@pytest.fixture
def add_one(tmp_path: Path) -> Path:
    return archive_of(tmp_path / "add_one", ADD.format("1.0"))


@pytest.fixture
def add_two(tmp_path: Path) -> Path:
    return archive_of(tmp_path / "add_two", ADD.format("2.0"))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_next_model_is_loaded_by_the_same_process(engine: TractWheel, add_one: Path, add_two: Path) -> None:
    with engine.load(add_one) as first:
        assert first.run([ONES])[0].max() == 2
    with engine.load(add_two) as second:
        assert second.pid == first.pid
        assert second.run([ONES])[0].max() == 3
        assert not first.alive
        with pytest.raises(EngineRunError, match="add_one: the model is closed"):
            first.run([ONES])
        first.close()
        assert second.run([ONES])[0].max() == 3


def test_no_session_carries_over(engine: TractWheel, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "sum", SUM_OF_CACHE)
    token = np.ones((1, 1, 2), np.float32)
    pids = set()
    for _ in range(2):
        with engine.load(archive, transforms=["transformers_detect_all"]) as model:
            pids.add(model.pid)
            session = model.spawn_state()
            assert session.run([token])[0].max() == 2
            assert session.run([token])[0].max() == 4
    assert len(pids) == 1
    with engine.load(archive, transforms=["transformers_detect_all"]):
        with pytest.raises(EngineRunError, match="the model is closed"):
            session.run([token])
        session.close()


def test_what_a_session_held_is_freed(engine: TractWheel, tmp_path: Path) -> None:
    """Otherwise the process would hold too much memory to be used again."""
    archive = archive_of(tmp_path / "sum", SUM_OF_CACHE)
    with engine.load(archive) as first:
        session = first.spawn_state()
        session.hold({"past": np.zeros((1, 40_000_000, 2), np.float32)})
    with engine.load(archive) as second:
        assert second.pid == first.pid


def test_models_that_are_open_together_have_a_process_each(engine: TractWheel, add_one: Path, add_two: Path) -> None:
    with engine.load(add_one) as first, engine.load(add_two) as second:
        assert first.pid != second.pid
        assert (first.run([ONES])[0].max(), second.run([ONES])[0].max()) == (2, 3)


def test_a_refused_load_leaves_the_process_usable(engine: TractWheel, add_one: Path, tmp_path: Path) -> None:
    with engine.load(add_one) as first:
        pass
    for _ in range(3):
        with pytest.raises(EngineLoadError, match="no_such"):
            engine.load(archive_of(tmp_path / "bad", "graph net(x) -> (y) { y = no_such(x); }"))
    with engine.load(add_one) as again:
        assert again.pid == first.pid
        assert again.run([ONES])[0].max() == 2


def test_a_crashed_process_is_replaced_and_reports_its_own_model_only(
    engine: TractWheel, add_one: Path, tmp_path: Path
) -> None:
    gather = archive_of(tmp_path / "gather", GATHER)
    for index in (27, 99):
        with engine.load(add_one) as before:
            pass
        with engine.load(gather) as model:
            assert model.pid == before.pid
            with pytest.raises(EngineCrashError, match=rf"^gather: .*index {2 * index} out of range"):
                model.run([np.array([index])])
        assert not is_running(before.pid)
        with engine.load(add_one) as after:
            assert after.pid != before.pid
            assert after.run([ONES])[0].max() == 2


def test_a_process_killed_while_idle_is_replaced(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as first:
        pass
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    with engine.load(add_one) as second:
        assert second.pid != first.pid
        assert second.run([ONES])[0].max() == 2


def test_a_process_that_does_not_answer_is_not_used_again(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one):
        pass
    model = TractWheel(timeout_seconds=2).load(add_one)
    os.kill(model.pid, signal.SIGSTOP)
    with pytest.raises(EngineTimeoutError):
        model.run([ONES])
    assert not is_running(model.pid)
    with TractWheel(timeout_seconds=60).load(add_one) as again:
        assert again.pid != model.pid


def test_an_interrupt_while_a_process_is_freed_ends_it(engine: TractWheel, add_one: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = engine.load(add_one)
    os.kill(model.pid, signal.SIGSTOP)  # it does not answer
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            model.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not is_running(model.pid)
    with engine.load(add_one) as again:
        assert again.run([ONES])[0].max() == 2


def test_settings_of_the_engine_are_those_of_its_own_process(
    engine: TractWheel, add_one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.load(add_one) as first:
        pass
    with TractWheel(threads=3).load(add_one) as threaded:
        assert threaded.pid != first.pid
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    with engine.load(add_one) as changed:
        assert changed.pid not in (first.pid, threaded.pid)
    monkeypatch.undo()
    monkeypatch.setenv("UNRELATED", "5")
    with engine.load(add_one) as again:
        assert again.pid == first.pid


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux restarts the peak")
def test_peak_memory_is_that_of_the_model(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as model:
        model.run([np.ones((5_000_000, 3), np.float32)])
        large = model.peak_rss_bytes()
    with engine.load(add_one) as again:
        assert again.pid == model.pid
        assert again.peak_rss_bytes() < large - 40_000_000


def test_a_process_that_holds_much_memory_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = wheel_worker.EngineWorker(tract)
    monkeypatch.setattr(wheel_worker, "restart_peak_rss", lambda: wheel_worker._LARGEST_IDLE_BYTES - 1)
    assert worker.reset()
    monkeypatch.setattr(wheel_worker, "restart_peak_rss", lambda: wheel_worker._LARGEST_IDLE_BYTES)
    assert not worker.reset()


def test_few_idle_processes_stay_and_none_outlives_the_block(engine: TractWheel, add_one: Path) -> None:
    models: list[WheelModel] = [engine.load(add_one) for _ in range(6)]
    left_open = engine.load(add_one)
    with reuse_workers():  # a nested block shares the processes of the outer one
        for model in models:
            model.close()
    idle = [model.pid for model in models if is_running(model.pid)]
    assert len(idle) == 4
    with reuse_workers(False):
        with engine.load(add_one) as fresh:
            assert fresh.pid not in idle
        assert not is_running(fresh.pid)
    with reuse_workers(False), reuse_workers():
        with engine.load(add_one) as inner:
            pass
        assert is_running(inner.pid)
    assert not is_running(inner.pid)
    assert left_open.run([ONES])[0].max() == 2
    left_open.close()


def test_a_model_that_outlives_the_block_ends_its_process(engine: TractWheel, add_one: Path) -> None:
    with reuse_workers(False), reuse_workers():
        model = engine.load(add_one)
    assert model.run([ONES])[0].max() == 2
    model.close()
    assert not is_running(model.pid)


def _load_in_a_fork(connection: Connection) -> None:
    archive = connection.recv()
    with TractWheel(timeout_seconds=60).load(archive) as model:
        connection.send((model.pid, float(model.run([ONES])[0].max())))


def test_a_fork_does_not_use_the_processes_of_its_parent(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as model:
        pass
    with start_task(_load_in_a_fork, method="fork") as task:
        task.connection.send(add_one)
        pid, largest = task.connection.recv()
        assert pid != model.pid and largest == 2
    with engine.load(add_one) as again:
        assert again.pid == model.pid
        assert again.run([ONES])[0].max() == 2
