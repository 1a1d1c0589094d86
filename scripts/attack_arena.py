"""Where scripts/attack.py attacks: a model, exports of it in processes of their own, and what it is to survive one.

In: arguments of the command line, and a fault for that process. Out: how it ended. An export survives when it ends with 0, 1 or 2
or is killed by us, says at most one line of error, leaves under its name nothing or a whole export, and no process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from random_llama import Shape, write_checkpoint

FORMS = ("tar", "tgz", "dir")
_SHAPE = Shape("attacked", 256, 2, 4, 2, 64, 512, 32000, True, 8.0)  # 18 MB: long enough to be killed while it writes
_PATIENCE_SECONDS = 180.0
_GOOD_CODES = (0, 1, 2)
_PR_SET_CHILD_SUBREAPER = 36


class NotSurvivedError(Exception):
    """An attack succeeded; the message says in what."""


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code (a signal's number below zero), and all it said."""

    code: int
    said: str


class Run:
    """One command in a fork of this process, in a process group of its own."""

    def __init__(self, arguments: Sequence[object], log: Path, fault: Callable[[], None] | None = None) -> None:
        sys.stdout.flush()
        self._log = log
        self._others = _descendants()
        self.pid = os.fork()
        if not self.pid:
            _be_the_command([str(argument) for argument in arguments], log, fault)

    def ended(self) -> bool:
        """Say whether it has ended; it is still to be waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> End:
        """Wait for the end, and that of whatever it started.

        Raises:
            NotSurvivedError: it hangs, or processes outlive it.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.ended():
            if time.monotonic() > end:
                _kill(_descendants() - self._others)
                os.waitpid(self.pid, 0)
                raise NotSurvivedError(f"still running after {_PATIENCE_SECONDS:.0f} s")
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        _refuse_leftover_processes(self._others)
        return End(code, self._log.read_text(errors="replace"))

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the one process, or to its group as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def engine(self) -> psutil.Process | None:
        """Return a process of the engine that it has started, if there is one now."""
        with suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE and "engines" in " ".join(process.cmdline()):
                        return process
        return None


def _be_the_command(arguments: list[str], log: Path, fault: Callable[[], None] | None) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a job in the background ignores Ctrl-C
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        from t2n_llm.cli.app import main

        if fault is not None:
            fault()
        main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:  # before the command was there to hear it
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 3
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def adopt_orphans() -> None:
    """Let processes whose parent has died become children of this one, where the system can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _refuse_leftover_processes(others: set[psutil.Process]) -> None:
    """Wait for the end of all descendants but `others`, which ran before the command."""
    end = time.monotonic() + 10
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants() - others
        if not left:
            return
        if time.monotonic() > end:
            names = [_words(child) for child in left]
            _kill(left)
            raise NotSurvivedError(f"processes outlived the command: {names}")
        time.sleep(0.02)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[-160:]
    except psutil.Error:
        return "gone"


class Arena:
    """A model whose graph was captured once, exports that were left alone, and an empty folder for each case.

    Attributes:
        model: the checkpoint.
    """

    def __init__(self, work: Path) -> None:
        self._work, self._cases = work, 0
        self.model = work / "model"
        write_checkpoint(self.model, _SHAPE)
        (self.model / "generation_config.json").write_text("{}")
        _capture_once(self.model)
        self._seconds: dict[tuple[str, bool], float] = {}

    def reference(self, form: str, *, checked: bool = False) -> Path:
        """Return an export that was left alone.

        Raises:
            NotSurvivedError: not even that one succeeded.
        """
        target = self._work / "reference" / f"{form}-{checked}"
        if (form, checked) not in self._seconds:
            started = time.monotonic()
            end = Run(self.export_words(target, form, checked=checked), self._work / "log").wait()
            if end.code:
                raise NotSurvivedError(f"the reference itself: {end}")
            self._seconds[form, checked] = time.monotonic() - started
        return target

    def seconds(self, form: str, *, checked: bool) -> float:
        """Return how long an export takes that is left alone."""
        self.reference(form, checked=checked)
        return self._seconds[form, checked]

    @property
    def tensors(self) -> Any:
        """Digests of what an export has to hold."""
        return tensors_of(self.reference("tar"))

    def case(self) -> Path:
        """Return a new folder with an empty `exports` in it; the last one is removed."""
        shutil.rmtree(self._work / f"case-{self._cases}", ignore_errors=True)
        self._cases += 1
        folder = self._work / f"case-{self._cases}"
        (folder / "exports").mkdir(parents=True)
        return folder

    def export_words(
        self,
        target: Path,
        form: str = "tar",
        *,
        checked: bool = False,
        force: bool = False,
        resume: bool = False,
        model: Path | None = None,
    ) -> list[object]:
        """Return the words of an export."""
        flags = ["--force"] * force + ["--resume"] * resume + ([] if checked else ["--no-check"])
        return [
            *("export", model or self.model, "-o", target, "--archive", form, "--no-tokenizer"),
            *("--decode-steps", 2, *flags),
        ]

    def earlier_export(self, target: Path) -> str:
        """Put a whole export under a name, and return what tells it from others."""
        shutil.copytree(self.reference("tar"), target)
        return mark_of(target)


def _capture_once(model: Path) -> None:
    """Capture the graph here; forks have it."""
    from t2n_llm.graph.options import GraphOptions
    from t2n_llm.source.hub import open_source
    from t2n_llm.tasks import text_generation

    tasks: Any = text_generation
    capture, captured = tasks.build_graph, {}

    def build_graph(config: Any, options: Any, **further: Any) -> Any:
        key = config.to_json_string(), options, tuple(further.items())
        if key not in captured:
            captured[key] = capture(config, options, **further)
        return captured[key]

    tasks.build_graph = build_graph
    source = open_source(str(model), require_tokenizer=False)
    text_generation.TextGeneration().graphs(source, GraphOptions())


# --- what is to hold --------------------------------------------------------------------------


def mark_of(target: Path) -> str:
    """Return what tells one export from another: when it was made is in its manifest."""
    return hashlib.sha256((target / "export.json").read_bytes()).hexdigest()


def tensors_of(target: Path) -> Any:
    """Return the digests of an export's tensors."""
    return json.loads((target / "export.json").read_text())["tensors"]


def refuse_bad_end(end: End, *signals: int) -> None:
    """Hold an end against what was promised.

    Args:
        end: of a command.
        signals: that may have ended it.

    Raises:
        NotSurvivedError: another exit code, a traceback, or an error of several lines.
    """
    if end.code not in (*_GOOD_CODES, *(-number for number in signals)):
        raise NotSurvivedError(f"exit code {end.code}: {end.said[-600:]}")
    if "Traceback" in end.said or "Exception ignored" in end.said:
        raise NotSurvivedError(f"a traceback: {end.said[-1200:]}")
    lines = [line.strip() for line in end.said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    if len(errors) > 1 or (end.code == 2 and not errors):
        raise NotSurvivedError(f"{len(errors)} lines of error at exit code {end.code}: {end.said[-600:]}")
    if errors and not lines[-1].startswith(("error:", "hint:")):
        raise NotSurvivedError(f"an error of several lines: {end.said[-600:]}")


def refuse_bad_place(target: Path, earlier: str | None, *, partials: bool) -> str:
    """Hold what lies where an export was to go against what was promised; return which one is there.

    Args:
        target: the name.
        earlier: mark of the export that was there before.
        partials: whether hidden partials may lie beside it.

    Raises:
        NotSurvivedError: half an export, none where there was one, or something beside it.
    """
    from t2n_llm.export.verify import verify_export

    beside = [name for name in os.listdir(target.parent) if name != target.name]
    if any(not (partials and name.startswith(f".{target.name}.partial-")) for name in beside):
        raise NotSurvivedError(f"left behind: {beside}")
    if not target.exists():
        if earlier is not None and not beside:
            raise NotSurvivedError("the earlier export is lost")
        return "none"
    report = verify_export(target)
    if not report.passed:
        raise NotSurvivedError(f"half an export under the final name: {report.findings[:3]}")
    return "old" if mark_of(target) == earlier else "new"
