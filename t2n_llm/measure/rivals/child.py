"""A rival in a child process: requests and replies are lines of JSON; however it ends, it says why.

In: the command that starts a driver, and what to load. Out: `RunningChild`, whose failures are exceptions of `errors.py`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from generic_export.errors import EngineCrashError, EngineError, EngineLoadError, EngineRunError, EngineTimeoutError
from generic_export.processes import Child, Reason
from t2n_llm.measure.rivals.protocol import Turns

_READ_BYTES = 1 << 20


class RunningChild:
    """A model loaded by a driver. A driver answers `{"do": "load" | "time" | "top", ...}` with `{"ok": ...}` or `{"error": text}`.

    Args:
        name: of the rival, for messages.
        command: starts the driver.
        load: what it is told to load.
        timeout_seconds: for each request.
        environment: variables that the driver gets besides ours.

    Raises:
        EngineLoadError: it refuses the model.
        EngineCrashError, EngineTimeoutError: it died, or took too long.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        load: Mapping[str, Any],
        *,
        timeout_seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._timeout_seconds = name, timeout_seconds
        self._unread = b""
        printed = tempfile.TemporaryFile(prefix="t2n-rival-")  # noqa: SIM115 - lives as long as the child
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**os.environ, **(environment or {})},
            bufsize=0,
        )
        self._child = Child(process, printed, process.stdin, process.stdout)
        if process.stdin is None or process.stdout is None:
            raise EngineError(f"{name}: its process has no pipe.")
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe, False)
        loaded = self._request({"do": "load", **load}, EngineLoadError)
        self.load_seconds, self.version = float(loaded["seconds"]), str(loaded["version"])

    def time_turns(self, turns: Turns, *, fresh: bool) -> list[float]:
        """Feed token ids; see `Running.time_turns`."""
        asked = {"do": "time", "fresh": fresh, "turns": [list(map(int, turn)) for turn in turns]}
        return [float(seconds) for seconds in self._request(asked)]

    def top_logits(self, turns: Turns, count: int) -> list[tuple[int, float]]:
        """Return the largest logits after a fresh sequence: (token id, logit), the largest first."""
        asked = {"do": "top", "turns": [list(map(int, turn)) for turn in turns], "count": count}
        return [(int(token), float(logit)) for token, logit in self._request(asked)]

    def peak_rss_bytes(self) -> int:
        """Largest resident size of the child so far, in bytes."""
        return peak_resident_bytes(self._child.pid)

    def close(self) -> None:
        """End the child. Closing twice is harmless."""
        self._child.close()

    def _request(self, asked: Mapping[str, Any], refusal: type[EngineError] = EngineRunError) -> Any:
        deadline = time.monotonic() + self._timeout_seconds
        try:
            self._write(json.dumps(asked).encode() + b"\n", deadline)
            reply = json.loads(self._line(deadline))
        except (EOFError, BrokenPipeError):
            self._fail_dead(asked["do"])
        except TimeoutError:
            self.close()
            raise EngineTimeoutError(
                f"{self._name}: no answer after {self._timeout_seconds:g} s; it was stopped.",
                "Raise --timeout, or ask for fewer tokens.",
            ) from None
        except ValueError:
            self.close()
            raise EngineRunError(f"{self._name}: its driver answered something that is no JSON.") from None
        except BaseException:  # Ctrl-C: the conversation is cut in the middle
            self.close()
            raise
        if "error" in reply:
            self.close()
            raise refusal(f"{self._name}: {reply['error']}")
        return reply["ok"]

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            view = view[os.write(self._stdin, view) :]

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            self._wait(self._stdout, select.POLLIN, deadline)
            arrived = os.read(self._stdout, _READ_BYTES)
            if not arrived:
                raise EOFError
            self._unread += arrived
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    @staticmethod
    def _wait(pipe: int, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(pipe, event)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def _fail_dead(self, request: str) -> NoReturn:
        ending = self._child.ending(Reason.ENDED)
        lines = [line.strip() for line in ending.output.splitlines() if line.strip()]
        why = lines[-1] if lines else "no message"
        raise EngineCrashError(f"{self._name}: died during the {request} ({ending.cause}): {why}.") from None


def peak_resident_bytes(pid: int) -> int:
    """Return the largest resident size of a process so far; where the system does not tell, its size now.

    Linux: VmHWM, which starts afresh when a program starts, where `ru_maxrss` keeps the parent's peak.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(psutil.Process(pid).memory_info().rss)


__all__ = ["RunningChild", "peak_resident_bytes"]
