"""Cells on this machine: a few hosts, each given one cell after the other."""

from __future__ import annotations

import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

from generic_export.processes import TaskProcess, start_task
from t2n_llm.zoo.host import DEFAULT_WORK, serve
from t2n_llm.zoo.verdict import CRASHED, Cell, CellVerdict

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the hosts are what uses the cores; and a host that forks must have one thread
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class HostOptions:
    """How hosts are started.

    Attributes:
        work: module whose `run_cell` is run.
        fresh: a new interpreter for each cell, instead of a fork of the host; elsewhere than on Linux a fork is not safe.
    """

    work: str = DEFAULT_WORK
    fresh: bool = sys.platform != "linux"


class Host:
    """A `t2n_llm.zoo.host` process; started when it is first asked, and again when it died."""

    def __init__(self, options: HostOptions) -> None:
        self._options = options
        self._process: TaskProcess | None = None
        self._folder = ""
        self._lock = threading.Lock()  # a host is closed while another thread starts it or waits for its verdict
        self._closed = False

    def run(self, cell: Cell) -> CellVerdict:
        """Run one cell and wait for its verdict; a host that died under it is a verdict too."""
        try:
            connection = self._started().connection
            connection.send(cell)
            verdict: CellVerdict = connection.recv()
            return verdict
        except (OSError, EOFError) as error:
            self._end()
            message = f"{error}" or "the host died"
            return cell.ended(CRASHED, "host", error=type(error).__name__, message=message)

    def _started(self) -> TaskProcess:
        with self._lock:
            if self._closed:
                raise OSError("the run has ended")
            if self._process is None:
                # Removed here: a host that is killed removes nothing.
                self._folder = tempfile.mkdtemp(prefix="t2n-zoo-")
                environment = {**_ENVIRONMENT, "TMPDIR": self._folder}
                task = partial(serve, self._options.work, environment, self._options.fresh)
                self._process = start_task(task, method="spawn", keep_output=False)
            return self._process

    def close(self) -> None:
        """End the process, and the cell that it runs; no other is started."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
                shutil.rmtree(self._folder, ignore_errors=True)
            self._process = None


def run_local(cells: Sequence[Cell], jobs: int, options: HostOptions | None = None) -> Iterator[CellVerdict]:
    """Yield verdicts as they come.

    Args:
        cells: what to try, in the order in which they are begun.
        jobs: hosts that run at the same time.
        options: how they are started.
    """
    hosts = [Host(options or HostOptions()) for _ in range(max(1, min(jobs, len(cells))))]
    idle: queue.SimpleQueue[Host] = queue.SimpleQueue()
    for host in hosts:
        idle.put(host)
    pool = ThreadPoolExecutor(len(hosts))
    try:
        for done in as_completed([pool.submit(_run_on_idle, idle, cell) for cell in cells]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for host in hosts:
            host.close()


def _run_on_idle(idle: queue.SimpleQueue[Host], cell: Cell) -> CellVerdict:
    host = idle.get()
    try:
        return host.run(cell)
    finally:
        idle.put(host)
