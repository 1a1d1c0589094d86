"""Chat templates rendered in another process, which is killed when one needs too much.

In: a template, messages and variables. Out: the prompt, or an `OptionError` with the line of the template.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from generic_export.child_pipes import ChildEndedError, JsonProgram, OverdueError
from generic_export.errors import OptionError
from t2n_llm.runtime.chat import template_worker

RENDER_SECONDS = 5.0
_ENDED = {
    template_worker.REFUSED: "refuses the conversation",
    template_worker.FAILED: "fails",
    template_worker.STOPPED: "was stopped",
}
_START_SECONDS = (
    10.0  # beyond the template's own time: start on a busy machine, and one long operation that nothing interrupts
)
_CORRECT = "Correct the model's chat template, or generate without it (generate --raw)."


class TemplateProcess:
    """The process that renders; it starts with the first template and ends with this object.

    Args:
        seconds: most that a template may take.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._running: JsonProgram | None = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        named: Sequence[str] = (),
    ) -> str:
        """Return the prompt for an answer to messages.

        Args:
            template: in Jinja.
            messages: `role` and `content`; texts become lists of parts where the template reads those.
            variables: that the template reads beside them.
            named: those of them that the template must mention.

        Raises:
            OptionError: the template fails, refuses the messages, leaves out the last user message, or exceeds a limit: 5 s,
                512 MiB (Linux), 4 characters for each of the messages' and 1 Mi more.
        """
        request = {
            "template": template,
            "messages": list(messages),
            "variables": dict(variables),
            "named": list(named),
            "seconds": self._seconds,
        }
        reply = self._exchange(request)
        if "text" in reply:
            return str(reply["text"])
        place = "" if reply["line"] is None else f" in line {reply['line']}"
        message = f"the model's chat template {_ENDED[reply['kind']]}{place}: {reply['error']}."
        if reply["kind"] == template_worker.STOPPED:
            self.close()
        system = reply["kind"] == template_worker.REFUSED and messages[0]["role"] == "system"
        raise OptionError(
            message, "Omit the system message: some templates do not support one." if system else _CORRECT
        )

    def close(self) -> None:
        """End the process; a later template starts another one."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._running = self._running or JsonProgram(
            [sys.executable, "-u", template_worker.__file__],
            {**os.environ, "PYTHONSAFEPATH": "1"},  # the worker's own folder must not shadow modules
            keep_output=False,
        )
        ended = {"kind": template_worker.STOPPED, "line": None}
        try:
            reply: dict[str, Any] = self._running.exchange(request, self._seconds + _START_SECONDS)
        except OverdueError:
            return ended | {"error": f"it ran for more than {self._seconds:g} s"}
        except ChildEndedError as error:
            return ended | {"error": f"its process ended ({error})"}
        except BaseException:  # an interrupt in the middle of the exchange
            self.close()
            raise
        return reply


__all__ = ["RENDER_SECONDS", "TemplateProcess"]
