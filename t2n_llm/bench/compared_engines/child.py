"""A rival in a child process: requests and replies are lines of JSON; however it ends, it says why.

In: the command that starts a driver, and what to load. Out: `RunningChild`, whose failures are exceptions of `errors.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from generic_export.child_pipes import ChildEndedError, JsonProgram, OverdueError
from generic_export.errors import EngineCrashError, EngineError, EngineLoadError, EngineRunError, EngineTimeoutError
from generic_export.inference_target.tract.engines.wheel_worker import peak_rss_bytes
from t2n_llm.bench.compared_engines.protocol import Turns


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
        self._program = JsonProgram(command, {**os.environ, **(environment or {})})
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
        return peak_rss_bytes(self._program.pid)

    def close(self) -> None:
        """End the child. Closing twice is harmless."""
        self._program.close()

    def _request(self, asked: Mapping[str, Any], refusal: type[EngineError] = EngineRunError) -> Any:
        try:
            reply = self._program.exchange(asked, self._timeout_seconds)
        except ChildEndedError as error:
            lines = [line.strip() for line in error.ending.output.splitlines() if line.strip()]
            why = lines[-1] if lines else "no message"
            raise EngineCrashError(f"{self._name}: died during the {asked['do']} ({error}): {why}.") from None
        except OverdueError:
            raise EngineTimeoutError(
                f"{self._name}: no answer after {self._timeout_seconds:g} s; it was stopped.",
                "Raise --timeout, or ask for fewer tokens.",
            ) from None
        except ValueError:
            raise EngineRunError(f"{self._name}: its driver answered something that is no JSON.") from None
        if "error" in reply:
            self.close()
            raise refusal(f"{self._name}: {reply['error']}")
        return reply["ok"]


__all__ = ["RunningChild"]
