"""The command line as a user meets it: run it, interrupt it, and judge what it said and what it left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from tests.shared_folders import content
from tests.t2n_llm.fork_server import PipedCommand
from tests.t2n_llm.hub_variables import hub_variables

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What one run of the command gave."""

    code: int
    out: str
    err: str

    def line(self, kind: str) -> str:
        """Return the one line that starts with `kind:`; there must be exactly one."""
        (line,) = [line for line in self.err.splitlines() if line.strip().startswith(f"{kind}:")]
        return line.strip()


def call(*arguments: object, variables: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in this process.

    Args:
        arguments: of the command line.
        variables: of huggingface-hub, which it reads again; None leaves it as it is.
    """
    from t2n_llm.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    hub = contextlib.nullcontext() if variables is None else hub_variables(variables)
    with hub, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def run(*arguments: object, stdin: IO[bytes] | None = None, variables: Mapping[str, str] | None = None) -> Outcome:
    """Run the command as a process: its own exit code, streams and exit handlers. `fork_server` says how it is started.

    Args:
        arguments: of the command line.
        stdin: a file that it reads; None is an empty one.
        variables: of the environment, besides those of this process.
    """
    running = PipedCommand([str(argument) for argument in arguments], {**os.environ, **(variables or {})}, stdin)
    out, err = running.communicate()
    running.close()
    assert running.returncode is not None
    return Outcome(running.returncode, out, err)


def run_new(*arguments: object) -> Outcome:
    """Run the command in a new interpreter, for tests of what that imports and how long it takes to start."""
    command = [sys.executable, "-m", "t2n_llm.cli.app", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_python(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> str:
    """Run Python code in a process of its own and return what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(outcome: Outcome, *words: str) -> None:
    """Assert that bad input was answered as promised: exit code 2, one error line with `words`, a hint, no traceback."""
    assert outcome.code == 2, outcome
    assert outcome.out == "", outcome
    assert "Traceback" not in outcome.err, outcome.err
    error, hint = outcome.line("error"), outcome.line("hint")
    assert [line.strip() for line in outcome.err.splitlines()][-2:] == [error, hint], outcome.err
    for word in words:
        assert word in error, error


def strict_json(text: str) -> dict[str, Any]:
    """Parse one JSON object as any reader would: no NaN, nothing after it."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# --- what is left behind ----------------------------------------------------------------------


@contextlib.contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Assert that the block leaves folders as it found them, byte for byte."""
    before = [content(folder) for folder in folders]
    yield
    assert [content(folder) for folder in folders] == before


# --- a run that is interrupted ----------------------------------------------------------------


class RunningCommand:
    """The command, running in a session of its own as in a terminal."""

    def __init__(self, *arguments: object) -> None:
        self._said = ""
        self._process = PipedCommand([str(argument) for argument in arguments], dict(os.environ))

    def wait_for_stage(self, title: str) -> None:
        """Read what it says until a stage begins."""
        for line in self._process.stderr:
            self._said += line
            if title in line:
                return
        raise AssertionError(f"{title!r} was never said:\n{self._said}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until a condition holds."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert self._process.poll() is None and time.monotonic() < end, self._said
            time.sleep(0.002)

    def children(self, word: str) -> list[int]:
        """Return the processes it started whose command line holds a word."""
        return [pid for pid in self.processes() if pid != self._process.pid and word in _command_line(pid)]

    def processes(self) -> list[int]:
        """Return every living process of the run, itself included."""
        return self._process.processes()

    def press_ctrl_c(self) -> None:
        """Interrupt the whole group, as a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)  # tests that do this are marked: Windows has no such call

    def terminate(self) -> None:
        """Ask the one process to end, as a job scheduler does."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the one process, which can do nothing about it."""
        psutil.Process(self._process.pid).kill()

    def end(self) -> Outcome:
        """Wait for the end; assert that none of its processes outlives it."""
        out, err = self._process.communicate(timeout=_PATIENCE_SECONDS)
        end = time.monotonic() + 3
        while self.processes() and time.monotonic() < end:
            time.sleep(0.02)
        left = self.processes()
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self._process.close()
        assert not left, f"{len(left)} processes outlived the command"
        assert self._process.returncode is not None
        return Outcome(self._process.returncode, out, self._said + err)


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:  # it has ended
        return ""


# --- a small disk -----------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *flags: str) -> Iterator[Path | None]:
    """Yield a file system of its own mounted on `folder`, or None where mounting is not allowed."""
    folder.mkdir()
    options = ",".join([f"size={size}", *flags])
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, ballast: str = "ballast") -> None:
    """Take all the space of a disk, as another program would."""
    block = bytes(1 << 16)
    with (disk / ballast).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(block)
    with (disk / ballast).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0"):
            pass
