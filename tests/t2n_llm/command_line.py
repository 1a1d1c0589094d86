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
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.shared_folders import content

_MODULE = [sys.executable, "-m", "t2n_llm.cli.app"]
_MARK = "T2N_TEST_PROCESS"
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


def call(*arguments: object) -> Outcome:
    """Run the command in this process."""
    from t2n_llm.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def run(*arguments: object) -> Outcome:
    """Run the command as a process of its own."""
    done = subprocess.run([*_MODULE, *map(str, arguments)], capture_output=True, text=True, timeout=300)
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
    """The command, running in a process group of its own as in a terminal."""

    def __init__(self, *arguments: object) -> None:
        self._mark = uuid.uuid4().hex
        self._said = ""
        self._process = subprocess.Popen(
            [*_MODULE, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run that a shell put in the background ignores SIGINT, and its children with it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, _MARK: self._mark, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_stage(self, title: str) -> None:
        """Read what it says until a stage begins."""
        assert self._process.stderr is not None
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
        return [pid for pid in self.processes() if pid != self._process.pid and word in _text(pid, "cmdline")]

    def processes(self) -> list[int]:
        """Return every living process of the run, itself included."""
        running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        mark = f"{_MARK}={self._mark}"
        return [pid for pid in running if mark in _text(pid, "environ") and not _is_zombie(pid)]

    def press_ctrl_c(self) -> None:
        """Interrupt the whole group, as a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Ask the one process to end, as a job scheduler does."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the one process, which can do nothing about it."""
        self._process.kill()

    def end(self) -> Outcome:
        """Wait for the end; assert that none of its processes outlives it."""
        out, err = self._process.communicate(timeout=_PATIENCE_SECONDS)
        end = time.monotonic() + 3
        while self.processes() and time.monotonic() < end:
            time.sleep(0.02)
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes outlived the command"
        return Outcome(self._process.returncode, out, self._said + err)


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_zombie(pid: int) -> bool:
    return _text(pid, "stat").rpartition(")")[2].split()[:1] == ["Z"]


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
