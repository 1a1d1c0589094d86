"""The process in which the pip-installed tract runs, because tract may abort and would take PyTorch with it.

In: framed requests on stdin. Out: one framed reply each on stdout; the engine's own prints go to stderr.
Started by path (`python wheel_worker.py PARENT_PID`) and importing only stdlib, numpy and tract, never the
package: a worker costs ~50 MB, not a PyTorch. `wheel.py` imports the framing from here.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

# A frame is: pickle size, buffer count | size of each buffer | pickle | buffers. Array bytes travel as buffers
# (pickle protocol 5, out of band): never copied into the pickle, and read straight into their final memory.
_HEADER = struct.Struct("<QQ")

_LARGEST_IDLE_BYTES = 256 << 20  # numpy and tract take about 50 MB

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3), by glibc's numbers

Put = Callable[[memoryview], None]
Fill = Callable[[memoryview], None]


def write_message(message: Any, put: Put) -> None:
    """Send one message.

    Args:
        message: any picklable object; contiguous arrays inside it are sent without a copy.
        put: writes all of a memoryview.
    """
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    put(memoryview(_HEADER.pack(len(payload), len(views)) + struct.pack(f"<{len(views)}Q", *map(len, views))))
    put(memoryview(payload))
    for view in views:
        if view:
            put(view)


def read_message(fill: Fill) -> Any:
    """Receive one message.

    Args:
        fill: fills all of a memoryview, or raises EOFError.
    """
    header = bytearray(_HEADER.size)
    fill(memoryview(header))
    payload_size, count = _HEADER.unpack(header)
    sizes = bytearray(8 * count)
    payload = bytearray(payload_size)
    fill(memoryview(sizes))
    fill(memoryview(payload))
    buffers = [np.empty(size, np.uint8) for size in struct.unpack(f"<{count}Q", sizes)]
    for buffer in buffers:
        fill(buffer.data)
    return pickle.loads(payload, buffers=buffers)


# --- the worker -------------------------------------------------------------------------------


class EngineWorker:
    """One model and its sessions. Every public method is a request that `wheel.py` may send."""

    def __init__(self, tract: Any) -> None:
        self._tract = tract
        self._runnable: Any = None
        self._runtime: Any = None
        self._timings: dict[str, float] = {}
        self._states: dict[int, Any] = {}
        self._held: dict[int, dict[int, Any]] = {}
        self._fed_back: dict[int, list[Any]] = {}
        self._ids = itertools.count()

    def use_device(self, device: str) -> str | None:
        """Compute on another device than the CPU from the next load on; return the reason where that is impossible."""
        if not hasattr(self._tract, "runtime_for_name"):
            return "this release of the wheel runs on the CPU only"
        try:
            self._runtime = self._tract.runtime_for_name(device)
        except self._tract.TractError as error:
            return str(error)
        return None

    def load(self, archive: str, transforms: list[str], registries: list[str]) -> tuple[list[Any], list[Any]]:
        """Load, transform and optimise; return (name, datum type, shape) of every input and output."""
        with blocks_that_go_back():
            return self._load(archive, transforms, registries)

    def _load(self, archive: str, transforms: list[str], registries: list[str]) -> tuple[list[Any], list[Any]]:
        marks = [time.perf_counter()]
        model = load_model(self._tract, archive, registries)
        marks.append(time.perf_counter())
        for transform in transforms:
            model.transform(transform)
        marks.append(time.perf_counter())
        # Facts are read while the model is alive: symbols lose their names with it
        # (docs/contributing/engine-facts.md#failures-of-the-wheel).
        inputs = [self._fact(model.input_name(i), model.input_fact(i)) for i in range(model.input_count())]
        outputs = [self._fact(model.output_name(i), model.output_fact(i)) for i in range(model.output_count())]
        before = time.perf_counter()
        self._runnable = runnable_of(model) if self._runtime is None else self._runtime.prepare(model)
        steps = (*itertools.pairwise(marks), (before, time.perf_counter()))
        self._timings = {
            name: end - start for name, (start, end) in zip(("load", "transform", "optimise"), steps, strict=True)
        }
        return inputs, outputs

    def reset(self) -> bool:
        """Free the model and every session; return whether the process may serve another model.

        It may not after computing on another device, whose context stays, or while it still holds much memory.
        """
        self._runnable = None
        for by_session in (self._states, self._held, self._fed_back):
            by_session.clear()
        gc.collect()
        _give_memory_back()
        return self._runtime is None and restart_peak_rss() < _LARGEST_IDLE_BYTES

    def convert(self, model: str, archive: str, registries: list[str]) -> None:
        """Write a model, ONNX or NNEF, as a gzipped NNEF archive, the way tract itself spells it."""
        writer = self._tract.nnef()
        for registry in registries:
            writer = getattr(writer, _ENABLERS[registry])()
        writer.write_model_to_tar_gz(load_model(self._tract, model, registries), archive)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run once on a fresh state."""
        return [array_of(self._tract, tensor) for tensor in self._runnable.run(inputs)]

    def spawn(self) -> int:
        """Open a session."""
        session = next(self._ids)
        self._states[session] = self._runnable.spawn_state()
        return session

    def hold(self, session: int, inputs: dict[int, Any]) -> None:
        """Keep some inputs of a session, by their number: its turns are given the others."""
        self._held[session] = {place: self._tract.Tensor.from_numpy(array) for place, array in inputs.items()}

    def turn(self, session: int, inputs: list[Any]) -> list[Any]:
        """Run one turn of a session."""
        fed_back = self._fed_back.get(session, [])
        outputs = self._states[session].run(self._with_held(session, [*inputs, *fed_back]))
        given = len(outputs) - len(fed_back)
        if fed_back:
            self._fed_back[session] = outputs[given:]
        return [array_of(self._tract, tensor) for tensor in outputs[:given]]

    def feed_back(self, session: int, inputs: list[Any]) -> None:
        """Give a session its last inputs; after a turn, the last outputs of it take their place."""
        self._fed_back[session] = [self._tract.Tensor.from_numpy(array) for array in inputs]

    def cut(self, session: int, axes: list[int], length: int) -> None:
        """Leave the first entries, so many, along an axis of each tensor that is fed back."""
        self._fed_back[session] = [
            self._tract.Tensor.from_numpy(tensor.to_numpy()[(slice(None),) * axis + (slice(length),)])
            for tensor, axis in zip(self._fed_back[session], axes, strict=True)
        ]

    def _with_held(self, session: int, inputs: list[Any]) -> list[Any]:
        held, given = self._held.get(session, {}), iter(inputs)
        return [held[place] if place in held else next(given) for place in range(len(held) + len(inputs))]

    def forget(self, sessions: list[int]) -> None:
        """Free the states of closed sessions."""
        for session in sessions:
            self._states.pop(session, None)
            self._held.pop(session, None)
            self._fed_back.pop(session, None)

    def dump(self) -> str:
        """List every node of the optimised graph, nested bodies included, as JSON; nothing is run."""
        listed: str = self._runnable.profile_json(None)
        return listed

    def profile(self, inputs: list[Any]) -> str:
        """Run again and again on fresh states for five seconds, which is tract's choice; times by node, as JSON."""
        measured: str = self._runnable.profile_json(inputs)
        return measured

    def time_turns(self, turns: list[list[Any]], session: int | None = None) -> list[float]:
        """Run turns on one fresh state, or on a session's; return the seconds that each took in the engine."""
        if session is None:
            fresh = self.spawn()
            try:
                return self.time_turns(turns, fresh)
            finally:
                self.forget([fresh])
        fed_back = self._fed_back.get(session, [])
        seconds = []
        for turn in turns:
            given = self._with_held(session, [*turn, *fed_back])
            start = time.perf_counter()
            outputs = self._states[session].run(given)
            seconds.append(time.perf_counter() - start)
            if fed_back:
                fed_back = self._fed_back[session] = outputs[len(outputs) - len(fed_back) :]
        return seconds

    def properties(self) -> dict[str, Any]:
        """Return the properties that are numbers, as arrays: what the archive says, and what transforms noted (`pulse.delay`)."""
        found = {}
        for key in self._runnable.property_keys():
            try:
                found[key] = array_of(self._tract, self._runnable.property(key))
            except self._tract.TractError:  # text has no array form
                continue
        return found

    def timings(self) -> dict[str, float]:
        """Return the seconds that the steps of the load took."""
        return self._timings

    def peak_rss(self) -> int:
        """Return this process's peak resident size in bytes."""
        return peak_rss_bytes()

    def _fact(self, name: str, fact: Any) -> tuple[str, str, tuple[str, ...]]:
        if not hasattr(fact, "dims"):  # up to 0.22 a fact is only its text: "N,64,F32"
            *dims, datum_type = str(fact).split(",")
            return name, datum_type.strip().lower(), tuple(dim.strip() for dim in dims)
        try:
            datum_type = self._tract.DatumType(fact.datum_type()).name.lower()
        except (ValueError, self._tract.TractError):  # TDim, String: outside the public API
            datum_type = str(fact).rpartition(",")[2].strip().lower()
        return name, datum_type, tuple(str(dim) for dim in fact.dims())


# --- what releases up to 0.22 call otherwise --------------------------------------------------------


# How the wheel enables a registry.
_ENABLERS = {
    "tract_transformers": "with_tract_transformers",
    "tract_extra": "with_tract_extra",
    "tract_onnx": "with_onnx",
    "tract_pulse": "with_pulse",
}


@contextmanager
def blocks_that_go_back() -> Iterator[None]:
    """While a model is loaded, freed weights go back to the system; after it, what a turn frees is kept for the next one.

    Loading holds every weight twice for a while, and glibc would keep the first copies
    (docs/contributing/engine-facts.md#memory-of-loads). A turn takes and frees the same blocks again and again, caches among
    them: mapped on their own they are zeroed page by page each time, which takes more than half of a step at 8,192 positions.
    Without glibc nothing happens.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    mallopt(_MMAP_THRESHOLD, 1 << 20)
    mallopt(_TRIM_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        malloc_trim(ctypes.c_size_t(0))
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        mallopt(_TRIM_THRESHOLD, 256 << 20)


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def load_model(tract: Any, archive: str, registries: list[str]) -> Any:
    """Load an archive with the core and some further operators; a file `.onnx` is read as ONNX."""
    if archive.endswith(".onnx"):
        return tract.onnx().load(archive).into_model()
    nnef = tract.nnef()
    for registry in registries:
        nnef = getattr(nnef, _ENABLERS[registry])()
    if hasattr(nnef, "load"):
        return nnef.load(archive)
    return nnef.with_tract_core().model_for_path(archive)


def runnable_of(model: Any) -> Any:
    """Return the optimised model, ready to run; up to 0.22 nothing is optimised unless it is asked for."""
    return (model.into_optimized() if hasattr(model, "into_optimized") else model).into_runnable()


def array_of(tract: Any, tensor: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a result as an array; up to 0.22 the wheel's own conversion takes every element type for f32."""
    if hasattr(tensor, "datum_type"):
        array: np.ndarray[Any, np.dtype[Any]] = tensor.into_numpy()
        return array
    from tract.bindings import check, lib

    kind, rank = ctypes.c_uint32(), ctypes.c_size_t()
    shape, data = ctypes.POINTER(ctypes.c_size_t)(), ctypes.c_void_p()
    references = [ctypes.byref(part) for part in (kind, rank, shape, data)]
    check(lib.tract_value_as_bytes(tensor.ptr, *references))
    dims = [int(shape[axis]) for axis in range(rank.value)]
    dtype = _numpy_dtype(tract, kind.value)
    size = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
    buffer = ctypes.string_at(data, size) if size else b""
    return np.frombuffer(buffer, dtype).reshape(dims).copy()


def _numpy_dtype(tract: Any, code: int) -> np.dtype[Any]:
    """Return the numpy type of a datum type's code: family in the high digit, bytes in the low one (tract.h)."""
    if code == 1:
        return np.dtype(np.bool_)
    family = {1: "u", 2: "i", 3: "f"}.get(code >> 4)
    if family is None:
        raise tract.TractError(f"datum type 0x{code:x} has no NumPy dtype")
    return np.dtype(f"{family}{code & 15}")


def peak_rss_bytes(pid: int | None = None) -> int:
    """Return the peak resident size of a process in bytes; on macOS, where only its own is told, the present size of another.

    Linux: VmHWM, which starts afresh at exec. `ru_maxrss` does not: a child started by a large parent
    inherits the parent's peak (kernel fs/exec.c, exec_mmap).

    Args:
        pid: of the process; this one without it.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    try:
        with Path(f"/proc/{pid or 'self'}/status").open(encoding="ascii") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        if pid is None and sys.platform == "darwin":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        import psutil

        memory = psutil.Process(pid).memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))  # Windows has a peak


def restart_peak_rss() -> int:
    """Make the peak resident size count from now on, where the system can (Linux); return that size in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM
    return peak_rss_bytes()


def answer(worker: EngineWorker | str, method: str, arguments: tuple[Any, ...], closed: list[int]) -> tuple[str, Any]:
    """Serve one request; the reply is ("ok", value), ("error", text) or ("missing", text)."""
    if isinstance(worker, str):
        return "missing", worker
    try:
        worker.forget(closed)
        return "ok", getattr(worker, method)(*arguments)
    except Exception as error:  # the boundary: whatever it is, the parent must hear it
        engine_error = type(error).__name__ == "TractError"
        return "error", str(error) if engine_error else f"{type(error).__name__}: {error}"


def start_engine() -> EngineWorker | str:
    """Import tract; return a worker, or the reason why there is none."""
    try:
        import tract
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return EngineWorker(tract)


def exit_with_parent(stdin: int, parent: int) -> None:
    """Leave at once when the parent closes stdin or dies, even in the middle of a long run.

    Not PR_SET_PDEATHSIG: that follows the parent *thread* that started this process.
    """
    if not hasattr(select, "poll"):  # Windows, whose pipes cannot be waited for: then the parent's end alone is noticed
        import psutil

        with suppress(psutil.NoSuchProcess):
            psutil.Process(parent).wait()
        os._exit(0)
    poller = select.poll()
    poller.register(stdin, 0)  # hang-up and error are always reported
    while True:
        if poller.poll(1000) or os.getppid() != parent:
            os._exit(0)


def main() -> None:
    """Serve requests until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    requests, replies = io.FileIO(0, closefd=False), io.FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not enter the channel
    threading.Thread(target=exit_with_parent, args=(0, int(sys.argv[1])), daemon=True).start()

    def fill(view: memoryview) -> None:
        while view:
            count = requests.readinto(view)
            if not count:
                raise EOFError
            view = view[count:]

    def put(view: memoryview) -> None:
        while view:
            view = view[replies.write(view) :]

    engine = start_engine()
    try:
        while True:
            write_message(answer(engine, *read_message(fill)), put)
    except (EOFError, OSError):  # the parent is gone
        os._exit(0)


if __name__ == "__main__":
    main()
