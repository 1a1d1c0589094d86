"""Cells on this machine: a few hosts, each given one cell after the other."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from t2n_llm.zoo.host import DEFAULT_WORK, READY
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
        fresh: a new interpreter for each cell, instead of a fork of the host; always so where there is no proc(5).
    """

    work: str = DEFAULT_WORK
    fresh: bool = sys.platform != "linux"


class Host:
    """A `t2n_llm.zoo.host` process; started when it is first asked, and again when it died."""

    def __init__(self, options: HostOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._folder: str | None = None
        self._closed = False

    def run(self, cell: Cell) -> CellVerdict:
        """Run one cell and wait for its verdict; a host that died under it is a verdict too."""
        try:
            process = self._started()
            _pipe(process.stdin).write(cell.to_json() + "\n")
            _pipe(process.stdin).flush()
            answer = _pipe(process.stdout).readline()
            if not answer:
                raise OSError("the host died")
            return CellVerdict.from_json(answer)
        except (OSError, ValueError) as error:
            self._end()
            return CellVerdict(
                cell.architecture, cell.dtype, CRASHED, "host", error=type(error).__name__, message=f"{error}"
            )

    def _started(self) -> subprocess.Popen[str]:
        if self._closed:
            raise OSError("the run is over")
        if self._process is None:
            command = [sys.executable, "-m", "t2n_llm.zoo.host", "--work", self._options.work]
            self._folder = tempfile.mkdtemp(prefix="t2n-zoo-")  # removed here: a host that is killed removes nothing
            self._process = subprocess.Popen(
                [*command, *(["--fresh"] if self._options.fresh else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": self._folder, "PYTHONPATH": _import_path()},
            )
            if _pipe(self._process.stdout).readline().strip() != READY:
                raise OSError("the host did not start")
        return self._process

    def close(self) -> None:
        """End the process, and the cell that it runs; no other is started."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _import_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise OSError("a pipe is missing")
    return pipe


def run_local(cells: Sequence[Cell], jobs: int, options: HostOptions | None = None) -> Iterator[CellVerdict]:
    """Yield verdicts as they come.

    Args:
        cells: what to try, in the order in which they are begun.
        jobs: hosts that run at the same time.
        options: how they are started.
    """
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    hosts = [Host(options or HostOptions()) for _ in range(max(1, min(jobs, len(cells))))]
    done: queue.SimpleQueue[CellVerdict] = queue.SimpleQueue()
    threads = [threading.Thread(target=_feed, args=(host, waiting, done), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    try:
        for _ in cells:
            yield done.get()
    finally:
        for host in hosts:
            host.close()


def _feed(host: Host, waiting: queue.SimpleQueue[Cell], done: queue.SimpleQueue[CellVerdict]) -> None:
    while True:
        try:
            cell = waiting.get_nowait()
        except queue.Empty:
            return
        done.put(host.run(cell))
