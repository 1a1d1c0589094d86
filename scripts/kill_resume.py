#!/usr/bin/env python3
"""Kill exports at random moments, resume them, and compare the archives with one that was left alone.

usage: scripts/kill_resume.py [--rounds N] [--megabytes M] [--seed S] [--work DIR]

Makes a random Llama of about M megabytes (default 400) and exports it once in each form for reference. Then, N times
(default 20): an export is started and killed with SIGKILL at a random moment of its writing; nothing may be there under the final
name, and nothing but hidden partials beside it; every third time the resumed export is killed as well; then one with
`resume` runs to its end (a .tgz starts again), and its archive must equal the reference byte for byte. Exit code 1 if
anything differs.
Everything is made in DIR (default: the temporary folder) and deleted. POSIX only: every export is a fork of this process.
Run it with the project's environment: .venv/bin/python scripts/kill_resume.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from random_llama import Shape, write_checkpoint

PROJECT = Path(__file__).resolve().parent.parent
FORMS = ("tar", "dir", "tgz")
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 600.0


class KillError(Exception):
    """An export did not do what it should; the message says which."""


@dataclass(frozen=True)
class Reference:
    """An export that was left alone: digests of its archive's files, and how long writing took."""

    digests: dict[str, str]
    seconds: float


def make_model(folder: Path, megabytes: int) -> None:
    """Write a random Llama checkpoint of about that size in bf16."""
    hidden, layers = 512, 4
    vocab = max(512, (megabytes * 1_000_000 // 2 - layers * 4_000_000) // (2 * hidden))
    write_checkpoint(folder, Shape("random", hidden, layers, 8, 4, 64, 2048, vocab, False, 8.0))


def start_export(model: Path, target: Path, form: str, *, resume: bool) -> int:
    """Start an export in a process of its own and return its id."""
    from t2n_llm.export.pipeline import export_llm

    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        export_llm(str(model), target, archive=form, resume=resume, check=False, require_tokenizer=False)
        code = 0
    except BaseException as error:
        print(f"export failed: {error!r}", file=sys.stderr)
    finally:
        os._exit(code)


def finish_export(model: Path, target: Path, form: str, *, resume: bool) -> float:
    """Run an export to its end; return how long it took from its first partial file on."""
    child = start_export(model, target, form, resume=resume)
    begin = _wait_for_partial(child, target)
    _, status = os.waitpid(child, 0)
    if status:
        raise KillError(f"{target.name}: an export{' with resume' * resume} ended with status {status}")
    return time.monotonic() - begin


def kill_export(model: Path, target: Path, form: str, moment: float, *, resume: bool) -> bool:
    """Start an export and kill it `moment` seconds after its first partial file; False when it was done before."""
    child = start_export(model, target, form, resume=resume)
    _wait_for_partial(child, target)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise KillError(f"{target.name}: an export failed before it was killed")
    return os.WIFSIGNALED(status)


def _wait_for_partial(child: int, target: Path) -> float:
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        if target.exists() or any(target.parent.glob(f".{target.name}.partial-*/.model.nnef*.journal")):
            return time.monotonic()
        with suppress(ChildProcessError):
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return time.monotonic()
        time.sleep(_POLL_SECONDS)
    raise KillError(f"{target.name}: no export was seen writing")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of an export but `export.json`, which bears the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "export.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_rounds(model: Path, work: Path, rounds: int, seed: int) -> Iterator[str]:
    """Kill and resume; yield a line for each round.

    Raises:
        KillError: something was left under the final name, could not be resumed, or differs.
    """
    dice = random.Random(seed)
    references: dict[str, Reference] = {}
    for number in range(1, rounds + 1):
        form = FORMS[(number - 1) % len(FORMS)]
        if form not in references:
            target = work / f"reference-{form}"
            seconds = finish_export(model, target, form, resume=False)
            references[form] = Reference(digests(target), seconds)
            shutil.rmtree(target)
        yield f"{number} of {rounds}: {form}, {_round(model, work, form, references[form], dice, number)}"


def _round(model: Path, work: Path, form: str, reference: Reference, dice: random.Random, number: int) -> str:
    target, moments = work / "export", []
    window = reference.seconds
    for turn in range(2 if number % 3 == 0 else 1):
        while True:
            moment = dice.uniform(0.0, window)
            if kill_export(model, target, form, moment, resume=turn > 0):
                break
            shutil.rmtree(target)  # it was quicker this time
            window *= 0.7
        moments.append(f"{moment:.2f} s")
        left = [path.name for path in work.iterdir() if path != model]
        if target.exists() or not all(name.startswith(".export.partial-") for name in left):
            raise KillError(f"round {number}: the killed export left {left}")
    kept = sum(journal.read_bytes().count(b"\n") - 1 for journal in work.glob(".export.partial-*/.*.journal"))
    finish_export(model, target, form, resume=True)
    if digests(target) != reference.digests:
        raise KillError(f"round {number}: the resumed {form} differs from the uninterrupted one")
    left = [path.name for path in work.iterdir() if path not in (model, target)]
    if left:
        raise KillError(f"round {number}: the resumed export left {left}")
    shutil.rmtree(target)
    return f"killed after {' and '.join(moments)} of {reference.seconds:.2f} s with {kept} tensors whole: identical"


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(PROJECT))
    try:
        with tempfile.TemporaryDirectory(prefix="t2n-kill-", dir=options.work) as work:
            make_model(Path(work) / "model", options.megabytes)
            for line in run_rounds(Path(work) / "model", Path(work), options.rounds, options.seed):
                print(line, flush=True)
    except KillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
