"""An attempt in a process of its own, which may crash, hang or eat all memory: each is a verdict, not the end.

In: a task that gives a `Verdict` and tells its stages. Out: the verdict, or one that says how the process died. A worker is a fork
of this process, so it has PyTorch and the model at once; what it changes of them stays its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import psutil
import torch

from generic_export import processes
from generic_export.debug.privacy import redacted
from generic_export.debug.records import ErrorRecord, Outcome, Stage, Verdict
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.engine import last_words
from generic_export.processes import Ending, ProcessLimits, Reason, start_task
from generic_export.sizes import parse_size

Task = Callable[[Callable[[Stage], None]], Verdict]

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """What one attempt may take.

    Attributes:
        seconds: wall-clock time.
        memory: bytes beyond what this process holds already, the engine's included, such as `8GiB`.
    """

    seconds: float = 300.0
    memory: str | int = "8GiB"

    @property
    def memory_bytes(self) -> int:
        """The memory limit in bytes."""
        return parse_size(self.memory)


class Worker:
    """One running attempt.

    Args:
        key, path: of the piece, for the verdict of a process that died.
        task: what to do; runs in the fork.
        limits: what it may take.
        isolated: for that verdict, too.

    Raises:
        OptionError: this system cannot fork.
    """

    def __init__(self, key: str, path: str, task: Task, limits: Limits, *, isolated: bool = False) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise OptionError(
                "a diagnosis needs a system that can fork processes.", "Run it on Linux or macOS, or in WSL."
            )
        self.key, self.path, self.isolated = key, path, isolated
        self._limits = limits
        self._stage: Stage | None = None

        def alone(parent: Connection) -> None:
            torch.set_num_threads(1)  # the thread pools of the parent do not exist in a fork
            parent.send(task(parent.send))

        self._process = start_task(
            alone,
            method="fork",
            limits=ProcessLimits(limits.seconds, limits.memory_bytes),
            shared_bytes=psutil.Process().memory_info().rss,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def stage(self) -> Stage | None:
        """The stage that it told last."""
        return self._stage

    def look(self) -> Verdict | None:
        """Return the verdict once there is one; kills a worker that is beyond its limits."""
        messages, ending = self._process.news()
        for message in messages:
            if isinstance(message, Verdict):
                self.kill()
                return replace(message, seconds=self._process.seconds, peak_rss=self._process.peak_bytes)
            self._stage = message
        return None if ending is None else self._dead(*self._explained(ending))

    def kill(self) -> None:
        """End it without a verdict, and the engine that it started with it."""
        self._process.close()

    def _explained(self, ending: Ending) -> tuple[str, str, str]:
        """Return the kind, the message and the hint of an error that says how the process died."""
        if ending.reason is Reason.OVERTIME:
            return "TimeLimitError", f"no end after {self._limits.seconds:g} s", "Raise limits.seconds."
        if ending.reason is Reason.MEMORY:
            used = f"{self._process.peak_bytes / 2**30:.1f} GiB"
            return "MemoryLimitError", f"took {used}, {self._limits.memory} are allowed", "Raise limits.memory."
        words = last_words(ending.output)
        hint = "Most often the machine ran out of memory." if ending.cause == "SIGKILL" else ""
        return "WorkerDiedError", f"the process died ({ending.cause}){f': {words}' if words else ''}", hint

    def _dead(self, kind: str, message: str, hint: str) -> Verdict:
        return Verdict(
            key=self.key,
            path=self.path,
            outcome=Outcome.FAILED,
            stage=self._stage or Stage.CAPTURE,
            isolated=self.isolated,
            error=ErrorRecord(kind, redacted(message), hint),
            seconds=self._process.seconds,
            peak_rss=self._process.peak_bytes,
        )


def wait_for_news(workers: Sequence[Worker]) -> None:
    """Sleep until a worker has something to say, or it is time to look at their limits."""
    processes.wait_for_news([worker._process for worker in workers], _LOOK_SECONDS)


__all__ = ["Limits", "Task", "Worker", "wait_for_news"]
