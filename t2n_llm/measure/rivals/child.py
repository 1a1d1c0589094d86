"""A rival in a child process: requests and replies are lines of JSON; however it ends, it says why.

In: the command that starts a driver, and what to load. Out: `RunningChild`, whose failures are exceptions of `errors.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from generic_export.child_pipes import ChildPipes, OverdueError
from generic_export.errors import EngineCrashError, EngineError, EngineLoadError, EngineRunError, EngineTimeoutError
from generic_export.inference_target.tract.engines.wheel_worker import peak_rss_bytes
from generic_export.processes import Child, Reason
from t2n_llm.measure.rivals.protocol import Turns


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
        self._pipes = ChildPipes(self._child, process.stdin, process.stdout)
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
        return peak_rss_bytes(self._child.pid)

    def close(self) -> None:
        """End the child. Closing twice is harmless."""
        self._child.close()

    def _request(self, asked: Mapping[str, Any], refusal: type[EngineError] = EngineRunError) -> Any:
        try:
            with self._pipes.within(self._timeout_seconds):
                self._pipes.write(memoryview(json.dumps(asked).encode() + b"\n"))
                line = self._pipes.read_line()
            reply = json.loads(line)
        except EOFError:
            self._fail_dead(asked["do"])
        except OverdueError:
            self.close()
            raise EngineTimeoutError(
                f"{self._name}: stopped after {self._timeout_seconds:g} s without a result.",
                "Raise --timeout, or request fewer tokens.",
            ) from None
        except ValueError:
            self.close()
            raise EngineRunError(f"{self._name}: its output is not JSON.") from None
        except BaseException:  # Ctrl-C: the conversation is cut in the middle
            self.close()
            raise
        if "error" in reply:
            self.close()
            raise refusal(f"{self._name}: {reply['error']}")
        return reply["ok"]

    def _fail_dead(self, request: str) -> NoReturn:
        ending = self._child.ending(Reason.ENDED)
        lines = [line.strip() for line in ending.output.splitlines() if line.strip()]
        why = lines[-1] if lines else "no message"
        raise EngineCrashError(f"{self._name}: died during the {request} ({ending.cause}): {why}.") from None


__all__ = ["RunningChild"]
