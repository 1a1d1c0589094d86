"""A few threads that do independent tasks, while the calling thread watches and stays open to Ctrl-C.

In: tasks, best the longest first. Out: nothing; the first error of a task stops the others and is raised here.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from generic_export.allocator import Malloc, malloc_settings
from generic_export.errors import ArchiveError
from generic_export.interrupts import raise_if_interrupted

# One more than the processors: while one thread waits for the disk, the others compute.
THREADS = min((os.cpu_count() or 1) + 1, 6)
_TICK_SECONDS = 0.1

# One heap that keeps its pages: the threads reuse each other's buffers. glibc gives each thread a heap of its own, and each keeps
# what its largest buffers took: 418 to 526 MiB over the imports for one and the same export, against some 300 from one heap.
# And it hands the pages of freed buffers back at once: quantising spent a third of its time in page faults.
_ONE_HEAP = {Malloc.ARENA_MAX: 1, Malloc.MMAP_THRESHOLD: 32 << 20, Malloc.TRIM_THRESHOLD: 256 << 20}

T = TypeVar("T")
Task = Callable[["WorkerThreads"], None]


class StoppedError(Exception):
    """Raised inside a task when the threads were told to stop."""


class WorkerThreads:
    """Runs tasks in threads; each thread may keep something of its own between its tasks."""

    def __init__(self) -> None:
        self._threads = THREADS
        self._local = threading.local()
        self._tasks: deque[Task] = deque()
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None

    def check(self) -> None:
        """To be called by tasks from time to time.

        Raises:
            StoppedError: another task failed, or the user interrupted.
        """
        if self._stop.is_set():
            raise StoppedError

    def own(self, make: Callable[[], T]) -> T:
        """Return this thread's own object, made at its first use."""
        if not hasattr(self._local, "owned"):
            self._local.owned = make()
        owned: T = self._local.owned
        return owned

    def run(self, tasks: Sequence[Task], tick: Callable[[], None] | None = None) -> None:
        """Do all tasks; `tick` is called now and then, in the calling thread."""
        self._tasks.extend(tasks)
        with _one_thread_in_torch(), malloc_settings(_ONE_HEAP):
            threads = [
                threading.Thread(target=self._work, name=f"archive-{number}", daemon=True)
                for number in range(min(self._threads, len(tasks)))
            ]
            running = 0
            try:
                for thread in threads:
                    thread.start()
                    running += 1
                # A thread that a tracer or a profiler ends before its work never says so.
                while running and any(thread.is_alive() for thread in threads):
                    running -= self._ended.acquire(timeout=_TICK_SECONDS)
                    raise_if_interrupted()
                    if tick is not None:
                        tick()
            finally:
                self._stop.set()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        if self._error is not None:
            raise self._error
        if self._tasks:
            raise ArchiveError("the threads that write the archive ended early.", "Their errors are printed above.")

    def _next(self) -> Task | None:
        try:
            return self._tasks.popleft()
        except IndexError:
            return None

    def _work(self) -> None:
        try:
            while not self._stop.is_set() and (task := self._next()) is not None:
                task(self)
        except StoppedError:
            pass
        except BaseException as error:  # raised again in the calling thread
            self._error = self._error or error
            self._stop.set()
        finally:
            self._ended.release()


@contextmanager
def _one_thread_in_torch() -> Iterator[None]:
    """Keep torch from splitting each operation over all processors: these threads do that already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
