"""The command in a terminal of its own: what is typed goes in as keys, Ctrl-C included, and what it shows is read."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from pathlib import Path
from types import TracebackType

from tests.t2n_llm.fork_server import Command

_PATIENCE_SECONDS = 120.0
_ASLEEP_LOOKS = 7  # at 0.1 s each: longer than two presses that are taken for one
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class TypedCommand:
    """`t2n-llm` on a pseudo terminal; a context manager. Tests that use it are marked `needs_terminal`."""

    def __init__(self, *arguments: object) -> None:
        import pty

        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        self._terminal, theirs = pty.openpty()
        try:
            self._process = Command([str(argument) for argument in arguments], environment, [theirs] * 3)
        finally:
            os.close(theirs)
        self._shown = ""
        self._read_until = 0

    def __enter__(self) -> TypedCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.close()
        os.close(self._terminal)

    @property
    def shown(self) -> str:
        """Everything it has shown, without colours."""
        return self._shown

    def type(self, text: str) -> None:
        """Type a line."""
        self.press(text + "\n")

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C: the terminal sends SIGINT to the command and its children."""
        self.press("\x03")

    def wait_until_it_reads(self) -> None:
        """Wait until the command sleeps: Python sees a Ctrl-C that comes just before it waits for a key with the next key only."""
        end = time.monotonic() + _PATIENCE_SECONDS
        asleep = 0
        while asleep < _ASLEEP_LOOKS:
            assert time.monotonic() < end, f"it never waited for a key:\n{self._shown}"
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2][0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.1)

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown after what was waited for before; return what stands between."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while text not in self._shown[self._read_until :]:
            assert time.monotonic() < end and self._more(), f"{text!r} was never shown:\n{self._shown}"
        place = self._shown.index(text, self._read_until)
        between, self._read_until = self._shown[self._read_until : place], place + len(text)
        return between

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while self._more():
            assert time.monotonic() < end, self._shown
        return self._process.wait(_PATIENCE_SECONDS)

    def _more(self) -> bool:
        """Read what is shown; say whether there may be more."""
        if not select.select([self._terminal], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self._shown += _CONTROL.sub("", data.decode(errors="replace"))
        return bool(data)


def typed_chat(folder: Path, *arguments: object) -> TypedCommand:
    """Return a chat, ready to be typed into."""
    chat = TypedCommand("chat", folder, *arguments)
    chat.wait_for("/help lists the commands.")
    chat.wait_for("> ")
    return chat
