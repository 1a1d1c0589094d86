"""Commands that start in 0.05 s: a server process imports PyTorch and transformers once, and each command is a fork of it.

The fork has its own session, environment, working folder and standard files, handles signals as a new interpreter does, and runs
exit handlers. It reads the variables of huggingface-hub, whose pauses between attempts are a hundredth of what they are. It differs
from a new process in what is imported already: tests of imports and of other variables that are read while importing start a real
process.

On Linux alone: Windows cannot fork, and on macOS importing PyTorch starts threads. There each command is a new interpreter
(`NewCommand`), which takes seconds to start and pauses as long as usual.

In: arguments, environment, files. Out: a `Command`, which has the methods of `subprocess.Popen` that tests use.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

_PRELOADED = (
    "torch",
    "huggingface_hub.hf_api",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "t2n_llm.cli.app",
    "t2n_llm.export.pipeline",
    "t2n_llm.tasks.text_generation",
    "tests.t2n_llm.hub_variables",
)
_ROOT = Path(__file__).resolve().parents[2]
_MESSAGE_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36


class ForkedCommand:
    """A running command, forked from the server, in a session of its own.

    Args:
        arguments: of `t2n-llm`.
        environment: all of its variables.
        standard: file descriptors of its input, output and error output; a terminal becomes its controlling one.

    Attributes:
        pid: of the command.
        returncode: its exit code, negative for a signal; None until it is known to have ended.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], standard: Sequence[int]) -> None:
        self._replies, theirs = socket.socketpair()
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
        with theirs:
            _send(_server()[0], request, [*standard, theirs.fileno()])
        self.returncode: int | None = None
        self.pid, self._keeper = self._reply(timeout=120)

    def processes(self) -> list[int]:
        """Return every living process that descends from the command, itself included, whoever its parent is now."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._keeper).children(recursive=True)
            return [child.pid for child in children if _status(child) != psutil.STATUS_ZOMBIE]
        return []

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            with suppress(BlockingIOError):
                self.returncode = self._reply(timeout=0)
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        """Wait for the end; return the exit code."""
        if self.returncode is None:
            self.returncode = self._reply(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, and to none of its descendants."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Stop following its descendants."""
        self._replies.close()

    def _reply(self, timeout: float) -> Any:
        self._replies.settimeout(timeout)
        return json.loads(self._replies.recv(_MESSAGE_BYTES))


class NewCommand:
    """A running command in a new interpreter, in a session of its own where the system has sessions.

    Of its descendants, those are not found whose parent ended before `processes` was called.

    Args:
        arguments, environment, standard: as for `ForkedCommand`. A terminal does not become its controlling one.

    Attributes:
        pid, returncode: as of `ForkedCommand`.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], standard: Sequence[int]) -> None:
        stdin, stdout, stderr = standard
        paths = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "t2n_llm.cli.app", *arguments],
            env={"OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": paths},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=sys.platform != "win32",
        )
        self.pid = self._process.pid
        self._known = {psutil.Process(self.pid)}

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def processes(self) -> list[int]:
        """Return every living process that descends from the command, itself included."""
        for process in list(self._known):
            with suppress(psutil.NoSuchProcess):
                self._known.update(process.children(recursive=True))
        return [each.pid for each in self._known if each.is_running() and _status(each) != psutil.STATUS_ZOMBIE]

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float = 300.0) -> int:
        """Wait for the end; return the exit code."""
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process. On Windows, any signal kills it."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Nothing is left open."""


if sys.platform == "linux":
    Command = ForkedCommand
else:
    Command = NewCommand


class PipedCommand(Command):
    """A running command whose output is read through pipes.

    Args:
        arguments, environment: as for `ForkedCommand`.
        stdin: a file that it reads; None is an empty one.

    Attributes:
        stdout, stderr: what it prints.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdin: IO[bytes] | None = None
    ) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        try:
            with open(os.devnull, "rb") as nothing:
                super().__init__(arguments, environment, [(stdin or nothing).fileno(), out_end, err_end])
        finally:
            os.close(out_end)
            os.close(err_end)
        self.stdout, self.stderr = (os.fdopen(descriptor, encoding="utf-8") for descriptor in (out, err))

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Read what it prints until it ends; return what was not read before."""
        texts = {}

        def read(stream: IO[str]) -> None:
            texts[stream] = stream.read()

        readers = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[self.stdout], texts[self.stderr]

    def close(self) -> None:
        """Stop following its descendants, and close the pipes."""
        super().close()
        self.stdout.close()
        self.stderr.close()


def _status(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return psutil.STATUS_ZOMBIE


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server of this process; it ends when the socket is closed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT, env=environment)
    theirs.close()
    return ours, process


def _send(to: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(to, [len(data).to_bytes(8, "little")], descriptors)
    to.sendall(data)


# --- the server -------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork a command per request, until the client closes the socket."""
    for name in _PRELOADED:
        __import__(name)
    if psutil.Process().num_threads() > 1:
        raise SystemExit("the fork server has threads: a fork could wait for a lock that one of them holds.")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        size, descriptors, _, _ = socket.recv_fds(requests, 8, 4)
        if not size:
            return
        request = json.loads(requests.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
        if not os.fork():
            requests.close()
            _keep(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict, descriptors: list[int]) -> None:
    """Start the command, report its end, and adopt what it leaves behind until the client hangs up."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    *standard, replies = descriptors
    command = os.fork()
    if not command:
        os.close(replies)
        _become(request, standard)
    for descriptor in standard:
        os.close(descriptor)
    client = socket.socket(fileno=replies)
    client.send(json.dumps([command, os.getpid()]).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with suppress(OSError):
        client.send(json.dumps(code).encode())
        client.recv(1)
    os._exit(0)


def _become(request: dict, standard: list[int]) -> None:
    """Run the command as a new interpreter would."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _take_standard_files(standard)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        from t2n_llm.cli.app import main
        from tests.t2n_llm.hub_variables import read_hub_variables

        read_hub_variables()

        main(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter that ends does
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_standard_files(descriptors: list[int]) -> None:
    import fcntl
    import termios

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors) - {0, 1, 2}:
        os.close(descriptor)
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    encoding, errors = sys.stdin.encoding, sys.stdin.errors  # those of the locale
    sys.stdin = os.fdopen(0, "r", encoding=encoding, errors=errors)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, errors=errors)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding, errors="backslashreplace")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
