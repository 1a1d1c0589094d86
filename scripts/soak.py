#!/usr/bin/env python3
"""Let `serve` and `generate` run for hours with faults, and see that memory, descriptors and processes do not grow.

usage: scripts/soak.py [--hours H] [--seed S] [--export DIR] [--records FILE]

Turns go round until the time (default 2 hours) is over. The server gets a request, one to be streamed, a client that is gone in the
middle, a damaged request, or its engine is killed; in a process that stays, a model is opened and asked, with its engine killed
or the temporary folder full. Every request after a fault has to be answered as before. After each round the resident memory (the
process and its engine), open descriptors and processes of both are a line of FILE (default out/soak.jsonl). At the end: the
medians of the first quarter after warming up and of the last; exit code 1 when memory grew by more than 10 % and 32 MB,
or descriptors or processes at all. DIR is an export (default: the bundled model, exported first). Linux.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from attack import small_disk
from fuzz_readers import PROJECT, make_importable

_PROMPT = "The old man"
_TOKENS = 12
_WARM_ROUNDS = 10
_GROWTH, _GROWTH_BYTES = 0.10, 32 << 20
_PATIENCE_SECONDS = 120


class SoakError(Exception):
    """Something was not answered, or answered otherwise than before."""


@dataclass(frozen=True)
class Usage:
    """What a process and all that it started take.

    Attributes:
        resident: bytes.
        descriptors: open files and sockets.
        processes: itself included.
    """

    resident: int
    descriptors: int
    processes: int


def usage_of(pid: int) -> Usage:
    """Measure a process with its children."""
    found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    resident = descriptors = alive = 0
    for process in found:
        with suppress(psutil.NoSuchProcess):
            resident += process.memory_info().rss
            descriptors += process.num_fds()
            alive += 1
    return Usage(resident, descriptors, alive)


def kill_engine(pid: int) -> None:
    """Kill the engine that a process has started."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "wheel_worker" in " ".join(process.cmdline()):
                process.kill()


# --- the server -------------------------------------------------------------------------------


class Server:
    """`t2n-llm serve` in a process of its own."""

    def __init__(self, export: Path) -> None:
        command = [sys.executable, "-m", "t2n_llm.cli.app", "serve", str(export), "--port", "0", "--name", "m"]
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        assert self._process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self._process.stderr.readline())
        if found is None:
            raise SoakError(f"no server: {self._process.stderr.read()}")
        self.port, self.pid = int(found[1]), self._process.pid
        self._expected = self._answer()

    def end(self) -> None:
        """Press Ctrl-C; it has to end well."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=_PATIENCE_SECONDS)
        if self._process.returncode:
            raise SoakError(f"the server ended with {self._process.returncode}")

    def _post(self, body: bytes) -> bytes:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as reply:
            return bytes(reply.read())

    def _answer(self) -> str:
        return str(json.loads(self._post(_request()))["choices"][0]["text"])

    def ask(self, dice: random.Random) -> None:
        """One answer."""
        del dice
        if self._answer() != self._expected:
            raise SoakError("another answer than before")

    def stream(self, dice: random.Random) -> None:
        """One streamed answer."""
        del dice
        if b"[DONE]" not in self._post(_request(stream=True)):
            raise SoakError("a stream without an end")

    def leave(self, dice: random.Random) -> None:
        """A client that is gone before it has all of a long answer."""
        body = _request(stream=True, max_tokens=400)
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE_SECONDS) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.settimeout(dice.uniform(0.01, 0.5))
            with suppress(TimeoutError):
                client.recv(4096)

    def refuse(self, dice: random.Random) -> None:
        """A request that is none."""
        with suppress(urllib.error.HTTPError):
            self._post(_request()[: dice.randrange(5, 40)])
            raise SoakError("half a request was answered")

    def lose_engine(self, dice: random.Random) -> None:
        """The engine is killed: one error, then answers as before."""
        del dice
        kill_engine(self.pid)
        with suppress(urllib.error.HTTPError):
            self._post(_request())


def _request(**further: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, **further}).encode()


# --- generate ---------------------------------------------------------------------------------


def generate_for_ever(export: Path, disk: Path | None, connection: Connection) -> None:
    """In a process of its own: open the model and ask it, for each fault that is named, until None is."""
    from generic_export.errors import T2NError
    from t2n_llm.runtime.generate import ExportedModel
    from t2n_llm.runtime.sampling.options import Sampling

    for fault in iter(connection.recv, None):
        answer = ""
        tempfile.tempdir = str(disk) if fault == "full disk" and disk is not None else None
        try:
            pieces = ExportedModel.open(export).generate(
                _PROMPT, max_new_tokens=_TOKENS, sampling=Sampling(temperature=0.0), chat=False
            )
            answer = next(pieces, "")
            if fault == "engine killed":
                kill_engine(os.getpid())
            answer += "".join(pieces)
        except T2NError as error:
            answer = f"error: {error}"
        except OSError as error:  # of the temporary folder; the command line says it in a line
            answer = f"error: {error}"
        connection.send(answer)


class Generator:
    """The process of `generate_for_ever`."""

    def __init__(self, export: Path, disk: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=generate_for_ever, args=(export, disk, theirs))
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid or 0)
        self._expected = self._asked("")

    def _asked(self, fault: str) -> str:
        self._connection.send(fault)
        if not self._connection.poll(_PATIENCE_SECONDS):
            raise SoakError(f"no answer after {fault or 'nothing'}")
        return str(self._connection.recv())

    def turn(self, fault: str) -> None:
        """One answer with a fault, if it is to have one, and one without."""
        if fault:
            self._asked(fault)
        if self._asked("") != self._expected:
            raise SoakError(f"another answer than before, after {fault or 'nothing'}")

    def end(self) -> None:
        """End it."""
        self._connection.send(None)
        self._process.join(_PATIENCE_SECONDS)


# --- the whole --------------------------------------------------------------------------------


def rounds(server: Server, generator: Generator, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """Go round until the time is over; yield what both take after each round."""
    dice = random.Random(seed)
    faults: tuple[Callable[[random.Random], None], ...] = (
        server.stream,
        server.leave,
        server.refuse,
        server.lose_engine,
    )
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        fault = dice.choice(faults)
        fault(dice)
        server.ask(dice)
        other = dice.choice(("", "engine killed", "full disk"))
        generator.turn(other)
        number += 1
        both = {"serve": asdict(usage_of(server.pid)), "generate": asdict(usage_of(generator.pid))}
        yield {"round": number, "fault": fault.__name__, "other": other or "none", **both}


def growth(records: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Compare the first quarter after warming up with the last; say what each is, and whether anything grew."""
    warm = records[_WARM_ROUNDS:]
    quarter = max(1, len(warm) // 4)
    lines, grew = [], False
    for which in ("serve", "generate"):
        for what in ("resident", "descriptors", "processes"):
            first, last = (median(record[which][what] for record in part) for part in (warm[:quarter], warm[-quarter:]))
            allowed = max(_GROWTH * first, _GROWTH_BYTES) if what == "resident" else 0
            grew = grew or last - first > allowed
            shown = [f"{value / 1e6:.0f} MB" if what == "resident" else f"{value:g}" for value in (first, last)]
            lines.append(f"| {which} | {what} | {shown[0]} | {shown[1]} |")
    return lines, grew


@contextmanager
def _full_disk(work: Path) -> Iterator[Path | None]:
    with small_disk(work / "disk", 1 << 16) as disk:
        if disk is not None:
            with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        yield disk


def _export(work: Path) -> Path:
    target = work / "export"
    command = [sys.executable, "-m", "t2n_llm.cli.app", "export", str(PROJECT / "examples/models/tiny-llama-real")]
    command += ["-o", str(target), "--no-check"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--records", type=Path, default=PROJECT / "out" / "soak.jsonl")
    options = parser.parse_args(arguments)
    make_importable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with tempfile.TemporaryDirectory(prefix="t2n-soak-") as work, _full_disk(Path(work)) as disk:
        export = options.export or _export(Path(work))
        server, generator = Server(export), Generator(export, disk)
        with options.records.open("w") as file:
            for record in rounds(server, generator, 3600 * options.hours, options.seed):
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
        server.end()
        generator.end()
    if len(records) < 2 * _WARM_ROUNDS:
        print(f"error: {len(records)} rounds are too few to tell.", file=sys.stderr)
        return 1
    lines, grew = growth(records)
    head = [f"{len(records)} rounds", "", "| process | what | first quarter | last quarter |", "|---|---|---|---|"]
    print("\n".join(head + lines))
    return int(grew)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())
