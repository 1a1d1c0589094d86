"""The pip-installed engine: what it returns, and that none of its deaths reaches the parent or leaves a child."""

import gc
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import (
    EngineCrashError,
    EngineLoadError,
    EngineMissingError,
    EngineRunError,
    EngineTimeoutError,
    OptionError,
)
from generic_export.inference_target.tract.engines import wheel_worker
from generic_export.inference_target.tract.engines.engine import (
    Engine,
    IoFact,
    condense_error,
    conform_inputs,
    last_words,
)
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.engines.wheel_process import WHEEL_VERSION

pytest.importorskip("tract", reason="the tract wheel is not installed")
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="watches child processes through /proc"),
    pytest.mark.usefixtures("new_engine_workers"),  # test_worker_reuse.py covers reused ones
]

HEADER = """version 1.0;
extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol S;
extension tract_symbol P;
"""

ADD_ONE = "graph net(x) -> (y) { x = external<scalar>(shape=[S, 3]); y = x + 1.0; }"

TYPES = """graph net(a, b, c, d, e) -> (oa, ob, oc, od, oe) {
  a = tract_core_external(shape=[S], datum_type="f32");
  b = tract_core_external(shape=[S], datum_type="f16");
  c = tract_core_external(shape=[S], datum_type="i64");
  d = tract_core_external(shape=[S], datum_type="bool");
  e = tract_core_external(shape=[], datum_type="f32");
  oa = a + 1.0; ob = b + 1.0; oc = select(d, c, sub(c, c)); od = not(d); oe = e * 2.0;
}"""

EMBED = """graph net(ids) -> (y) {
  ids = external<integer>(shape=[S]); w = variable<scalar>(label="w", shape=[4, 3]);
  y = tract_core_gather(w, ids, axis=0);
}"""

SUM_OF_CACHE = """graph net(x, past) -> (total, all) {
  x = external<scalar>(shape=[1, S, 2]); past = external<scalar>(shape=[1, P, 2]);
  all = concat([past, x * 2.0], axis=1);
  total = sum_reduce(all, axes=[1]);
}"""

# A small recurrent network. Its run time grows with the length of x: millions of steps take half a minute.
LOOP = """fragment body(x: tensor<scalar>, h: tensor<scalar>, w: tensor<scalar>) -> (h2: tensor<scalar>) {
  h2 = tanh(x + matmul(h, w));
}
graph net(x) -> (y) {
  x = external<scalar>(shape=[1, S, 1]); w = variable<scalar>(label="w", shape=[1, 256, 256]);
  h0 = slice(w, axes=[1], begin=[0], end=[1]);
  y = tract_core_scan(body="body", scan=[("x", x, 1, 1)], full=[("w", w)], state=[("h", h0, "h2")],
                      output=[("h2", "last", 1, 1)], skip=0);
}"""
SLOW_INPUT_SHAPE = (1, 3_000_000, 1)


def write_archive(folder: Path, graph: str, w: np.ndarray | None = None) -> Path:
    """Write graph.nnef and, when given, the f32 weight `w` by hand (docs/contributing/engine-facts.md#tensor-files)."""
    folder.mkdir(exist_ok=True)
    (folder / "graph.nnef").write_text(HEADER + graph)
    if w is not None:
        dims = [*w.shape, *[0] * (8 - w.ndim)]
        header = struct.pack(
            "<BBBBII8IIHH32s11I", 0x4E, 0xEF, 1, 0, w.nbytes, w.ndim, *dims, 32, 0, 0, bytes(32), *[0] * 11
        )
        (folder / "w.dat").write_bytes(header + w.astype(np.float32).tobytes())
    return folder


@pytest.fixture
def engine() -> TractWheel:
    return TractWheel(timeout_seconds=60)


@pytest.fixture
def add_one(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "add_one", ADD_ONE)


@pytest.fixture
def embed(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "embed", EMBED, np.arange(12, dtype=np.float32).reshape(4, 3))


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "slow", LOOP, np.zeros((1, 256, 256), np.float32))


def is_running(pid: int) -> bool:
    """Say whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def engine_processes() -> set[str]:
    """Return the ids of the engine processes that this thread has started; other tests keep some for reuse."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {child for child in children if b"wheel_worker" in Path(f"/proc/{child}/cmdline").read_bytes()}


def ends(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


# --- running ----------------------------------------------------------------------------------


def test_wheel_is_an_engine_in_the_installed_version() -> None:
    engine: Engine = TractWheel()
    assert (engine.name, engine.version) == ("wheel", WHEEL_VERSION)


def test_every_dtype_comes_back_as_it_is(engine: TractWheel, tmp_path: Path) -> None:
    with engine.load(write_archive(tmp_path / "types", TYPES)) as model:
        assert [fact.datum_type for fact in model.inputs] == ["f32", "f16", "i64", "bool", "f32"]
        assert [fact.shape for fact in model.outputs] == [("S",), ("S",), ("S",), ("S",), ()]
        for size in (2, 0):
            inputs: list[np.ndarray] = [
                np.arange(size, dtype=np.float32),
                np.arange(size, dtype=np.float16),
                np.arange(size, dtype=np.int64),
                np.ones(size, dtype=bool),
                np.array(3.0, dtype=">f4"),
            ]
            outputs = model.run(inputs)
            expected = [inputs[0] + 1, inputs[1] + np.float16(1), inputs[2], ~inputs[3], np.float32(6)]
            for output, value in zip(outputs, expected, strict=True):
                np.testing.assert_array_equal(output, value)
            assert [output.dtype for output in outputs] == ["f4", "f2", "i8", "bool", "f4"]


def test_non_contiguous_and_large_inputs(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as model:
        x = np.arange(12, dtype=np.float32).reshape(3, 4).T
        large = np.ones((2_000_000, 3), np.float32)
        np.testing.assert_array_equal(model.run([x])[0], x + 1)
        output = model.run([large])[0]
        assert output.shape == large.shape and output.min() == output.max() == 2
        output += 1  # the array belongs to the caller
        assert 24_000_000 < model.peak_rss_bytes() < 1_000_000_000


def test_peak_rss_is_the_child_s_own(engine: TractWheel, add_one: Path) -> None:
    ballast = np.ones(40_000_000, np.float64)
    with engine.load(add_one) as model:
        assert model.peak_rss_bytes() < ballast.nbytes


def test_operators_are_counted_after_transforms_and_inside_loops(
    engine: TractWheel, tmp_path: Path, slow: Path
) -> None:
    archive = write_archive(tmp_path / "sum", SUM_OF_CACHE)
    with engine.load(archive) as model:
        assert model.operators()["Source"] == 2
    with engine.load(archive, transforms=["transformers_detect_all"]) as model:
        assert model.operators()["Source"] == 1
        assert model.operators()["DynamicKeyValueCache"] == 1
    with engine.load(slow) as model:
        operators = model.operators()
        assert operators["Scan"] == operators["Tanh"] == 1


def test_json_transform_with_parameters(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one, transforms=['{"name": "set_symbols", "values": {"S": 2}}']) as model:
        assert model.inputs == (IoFact("x", "f32", ("2", "3")),)
        with pytest.raises(EngineRunError, match="axis 0 is 2, got 4"):
            model.run([np.zeros((4, 3), np.float32)])


# --- sessions ---------------------------------------------------------------------------------


def test_state_persists_in_a_session_and_not_between_runs(engine: TractWheel, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "sum", SUM_OF_CACHE)
    with engine.load(archive, transforms=["transformers_detect_all"]) as model:
        assert [fact.name for fact in model.inputs] == ["x"]
        first, second = model.spawn_state(), model.spawn_state()
        ones = np.ones((1, 3, 2), np.float32)
        assert first.run([ones])[0].ravel().tolist() == [6, 6]
        assert second.run([ones[:, :1]])[0].ravel().tolist() == [2, 2]
        assert first.run([ones[:, :1]])[0].ravel().tolist() == [8, 8]
        assert model.run([ones])[0].ravel().tolist() == [6, 6]
        first.close()
        first.close()
        with pytest.raises(EngineRunError, match="session is closed"):
            first.run([ones])
        del second
        gc.collect()
        assert model.run([ones])[0].ravel().tolist() == [6, 6]


def test_a_session_holds_inputs_for_its_turns(engine: TractWheel, tmp_path: Path) -> None:
    graph = """graph net(x, y) -> (z) {
      x = external<scalar>(shape=[S]); y = external<scalar>(shape=[1]); z = x - y; }"""
    with engine.load(write_archive(tmp_path / "difference", graph)) as model:
        session, other = model.spawn_state(), model.spawn_state()
        session.hold({"y": np.array([2], np.float32)})
        assert session.run([np.array([5, 7], np.float32)])[0].tolist() == [3, 5]
        session.hold({"x": np.array([1], np.float32)})
        assert session.run([np.array([4], np.float32)])[0].tolist() == [-3]
        assert len(session.time_turns([[np.array([4], np.float32)]] * 2)) == 2
        assert other.run([np.ones(1, np.float32), np.ones(1, np.float32)])[0].tolist() == [0]
        with pytest.raises(EngineRunError, match="has no input 'w'"):
            session.hold({"w": np.ones(1, np.float32)})
        with pytest.raises(EngineRunError, match="takes 1 inputs, but got 2"):
            session.run([np.ones(1, np.float32), np.ones(1, np.float32)])


def test_error_kills_the_session_and_spares_the_model(engine: TractWheel, tmp_path: Path) -> None:
    graph = """graph net(x, y) -> (z) {
      x = external<scalar>(shape=[S, 3]); y = external<scalar>(shape=[S, 3]); z = x + y; }"""
    with engine.load(write_archive(tmp_path / "clash", graph)) as model:
        good, bad = np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32)
        session = model.spawn_state()
        with pytest.raises(EngineRunError, match="clash: tract refused the turn: Clashing resolution for expression"):
            session.run([good, bad])
        with pytest.raises(EngineRunError, match="invalidated"):
            session.run([good, good])
        assert model.run([good, good])[0].shape == (2, 3)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "takes 1 inputs, but got 0. Expected x: \\[S, 3\\] f32"),
        ([np.zeros((2, 3), np.float32)] * 2, "takes 1 inputs, but got 2"),
        ([np.zeros((2, 3), np.float64)], "got dtype f64. Inputs are never cast"),
        ([np.zeros((2, 3), np.complex64)], "got dtype complex64"),
        ([np.zeros(3, np.float32)], "got rank 1, shape \\[3\\]"),
        ([np.zeros((2, 4), np.float32)], "axis 1 is 3, got 4"),
    ],
)
def test_inputs_are_checked_before_the_engine_sees_them(
    engine: TractWheel, add_one: Path, inputs: list[np.ndarray], message: str
) -> None:
    with engine.load(add_one) as model:
        with pytest.raises(EngineRunError, match=message):
            model.run(inputs)
        assert model.run([np.zeros((1, 3), np.float32)])[0].tolist() == [[1, 1, 1]]


def test_load_errors_name_the_archive_and_the_root_cause(engine: TractWheel, tmp_path: Path) -> None:
    bad = write_archive(tmp_path / "bad", "graph net(x) -> (y) { x = external(shape=[2]); y = tract_core_no_such(x); }")
    with pytest.raises(EngineLoadError, match=r'^bad: tract refused the load: No definition .*"tract_core_no_such"'):
        engine.load(bad)
    with pytest.raises(EngineLoadError, match="no such archive"):
        engine.load(tmp_path / "nowhere.nnef.tgz")
    with pytest.raises(EngineLoadError, match="no_such_transform"):
        engine.load(write_archive(tmp_path / "good", ADD_ONE), transforms=["no_such_transform"])
    with pytest.raises(OptionError, match="Use JSON"):
        engine.load(tmp_path / "good", transforms=["set_symbols(values: {})"])


def test_missing_package(engine: TractWheel, add_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])
        with pytest.raises(EngineMissingError, match="pip install tract=="):
            engine.load(add_one)


def test_package_that_does_not_import(
    engine: TractWheel, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken" / "tract").mkdir(parents=True)
    (tmp_path / "broken" / "tract" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(EngineMissingError, match=r"libfoo\.so is missing"):
        engine.load(add_one)


# --- deaths -----------------------------------------------------------------------------------


def test_abort_in_the_engine_is_an_exception_here(engine: TractWheel, embed: Path) -> None:
    with engine.load(embed) as model:
        assert model.run([np.array([2])])[0].tolist() == [[6, 7, 8]]
        session = model.spawn_state()
        with pytest.raises(EngineCrashError, match=r"SIGABRT\): \S*gather\.rs\S* range start index 27 out of range"):
            model.run([np.array([9])])
        assert not is_running(model.pid)
        with pytest.raises(EngineCrashError, match="range start index 27"):
            session.run([np.array([1])])
        session.close()


def test_kill_from_outside_is_named(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as model:
        os.kill(model.pid, signal.SIGKILL)
        with pytest.raises(EngineCrashError, match=r"SIGKILL.*ran out of memory"):
            model.run([np.zeros((3_000_000, 3), np.float32)])


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")
def test_running_out_of_memory_is_one_clear_error(engine: TractWheel, tmp_path: Path) -> None:
    import resource

    product = "matmul(unsqueeze(x, axes=[1]), unsqueeze(x, axes=[0]))"
    archive = write_archive(
        tmp_path / "outer", f"graph net(x) -> (y) {{ x = external<scalar>(shape=[S]); y = {product}; }}"
    )
    with engine.load(archive) as model, engine.load(archive) as other:
        status = Path(f"/proc/{model.pid}/status").read_text()
        used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize"))
        limit = used + (256 << 20)  # with much less the engine hangs while it writes where it failed
        resource.prlimit(model.pid, resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(EngineCrashError, match=r"allocat.*6400000000.*ran out of memory"):
            model.run([np.zeros(40_000, np.float32)])
        assert not is_running(model.pid)
        with pytest.raises(EngineCrashError, match="allocat"):
            model.run([np.zeros(1, np.float32)])
        assert other.run([np.ones(2, np.float32)])[0].tolist() == [[1, 1], [1, 1]]


def test_a_load_that_does_not_end_is_stopped(slow: Path) -> None:
    before = engine_processes()
    with pytest.raises(EngineTimeoutError, match=r"load not finished after 0\.02 s"):
        TractWheel(timeout_seconds=0.02).load(slow)
    assert engine_processes() == before


def test_registries_are_those_asked_for(engine: TractWheel, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "one", ADD_ONE)  # its header declares tract_transformers
    with pytest.raises(EngineLoadError, match="tract_transformers"):
        engine.load(archive, registries=("tract_extra",))
    with engine.load(archive, registries=("tract_transformers", "tract_onnx", "tract_pulse")) as model:
        assert model.run([np.zeros((1, 3), np.float32)])[0].tolist() == [[1, 1, 1]]


def test_long_run_is_stopped_in_time(slow: Path) -> None:
    with TractWheel(timeout_seconds=3).load(slow) as model:
        start = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="run not finished after 3 s"):
            model.run([np.zeros(SLOW_INPUT_SHAPE, np.float32)])
        assert time.monotonic() - start < 8
        assert not is_running(model.pid)


def test_stopped_child_that_does_not_even_read(add_one: Path) -> None:
    model = TractWheel(timeout_seconds=3).load(add_one)
    os.kill(model.pid, signal.SIGSTOP)
    with pytest.raises(EngineTimeoutError):
        model.run([np.zeros((3_000_000, 3), np.float32)])  # more than a pipe holds
    assert not is_running(model.pid)


def test_keyboard_interrupt_leaves_no_child(engine: TractWheel, slow: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = engine.load(slow)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            model.run([np.zeros(SLOW_INPUT_SHAPE, np.float32)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not is_running(model.pid)
    with pytest.raises(EngineRunError, match="model is closed"):
        model.operators()


def test_close_from_another_thread_ends_the_run(engine: TractWheel, slow: Path) -> None:
    model = engine.load(slow)
    timer = threading.Timer(0.5, model.close)
    timer.start()
    with pytest.raises(EngineRunError, match="model is closed"):
        model.run([np.zeros(SLOW_INPUT_SHAPE, np.float32)])
    timer.join()
    assert not is_running(model.pid)


def test_close_collection_and_failed_load_leave_no_child(engine: TractWheel, add_one: Path, tmp_path: Path) -> None:
    before = engine_processes()
    with engine.load(add_one) as model:
        closed = model.pid
    model.close()
    forgotten = engine.load(add_one)
    collected = forgotten.pid
    del forgotten
    gc.collect()
    assert not is_running(closed) and not is_running(collected)
    with pytest.raises(EngineLoadError):
        engine.load(write_archive(tmp_path / "bad", "graph net(x) -> (y) { y = no_such(x); }"))
    assert engine_processes() == before


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_child_leaves_when_its_parent_is_killed(slow: Path, busy: bool) -> None:
    script = f"""
import sys, time, threading, numpy as np
from pathlib import Path
from generic_export.inference_target.tract.engines.wheel import TractWheel
model = TractWheel().load(Path({str(slow)!r}))
print(model.pid, flush=True)
if {busy}:
    model.run([np.zeros({SLOW_INPUT_SHAPE}, np.float32)])
time.sleep(60)
"""
    root = Path(wheel_worker.__file__).parents[4]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1 if busy else 0)
        assert is_running(child)
        parent.kill()
        parent.wait()
        assert ends(child)


# --- pieces -----------------------------------------------------------------------------------


def test_worker_does_not_import_torch(engine: TractWheel, add_one: Path) -> None:
    with engine.load(add_one) as model:
        assert "torch" not in Path(f"/proc/{model.pid}/maps").read_text()


def test_messages_survive_the_frame() -> None:
    stream = bytearray()
    arrays = [np.zeros((1, 0, 3), np.float16), np.array(2.5), np.arange(6).reshape(2, 3), np.array([True])]
    wheel_worker.write_message(("run", arrays), stream.extend)

    def fill(view: memoryview) -> None:
        view[:] = stream[: len(view)]
        del stream[: len(view)]

    name, received = wheel_worker.read_message(fill)
    assert name == "run" and not stream
    for sent, got in zip(arrays, received, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        np.testing.assert_array_equal(got, sent)


def test_conform_inputs_copies_nothing_that_fits() -> None:
    x = np.zeros((2, 3), np.float32)
    assert np.shares_memory(conform_inputs((IoFact("x", "f32", ("S", "3")),), [x])[0], x)


def test_condense_error_puts_the_root_cause_first() -> None:
    text = 'opening file "m"\n\nCaused by:\n    0: In ModelBuilder::translate\n    1: Wiring "y"\n    2: No such op'
    assert condense_error(text) == 'No such op (in: Wiring "y" < In ModelBuilder::translate < opening file "m")'
    assert condense_error("one line") == "one line"
    assert condense_error("") == "no message from the engine"


def test_last_words_skips_the_second_panic() -> None:
    stderr = """thread '<unnamed>' (1) panicked at /home/user/.cargo/registry/src/index-1/tract-core-0.1/src/a.rs:85:59:
index 27 out of range
note: run with `RUST_BACKTRACE=1`

thread '<unnamed>' (1) panicked at library/core/src/panicking.rs:225:5:
panic in a function that cannot unwind
"""
    assert last_words(stderr) == "tract-core-0.1/src/a.rs:85:59: index 27 out of range"
    assert last_words("x\nmemory allocation of 8 bytes failed\n") == "memory allocation of 8 bytes failed"
    assert last_words("nothing useful") is None


OUTER = """graph net(x) -> (y) {
  x = external<scalar>(shape=[S, 1]); w = variable<scalar>(label="w", shape=[1, 1024]);
  y = sum_reduce(tanh(x * w), axes=[1]);
}"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's malloc")
def test_memory_that_a_turn_frees_is_kept_for_the_next(tmp_path: Path) -> None:
    """Caches of thousands of positions are megabytes that every step takes anew: as fresh pages they cost more than the step."""
    archive = write_archive(tmp_path / "outer", OUTER, np.ones((1, 1024), np.float32))
    rows, turns = np.ones((2048, 1), np.float32), 8
    with TractWheel().load(archive) as model:
        model.time_turns([[rows]] * turns)
        before = minor_faults(model.pid)
        model.time_turns([[rows]] * turns)
        product_in_pages = 2048 * 1024 * 4 // 4096
        assert minor_faults(model.pid) - before < turns * product_in_pages // 4


def minor_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
