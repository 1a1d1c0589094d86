#!/usr/bin/env python3
"""Fuzz readers of foreign files, guided by the branches they take: any error that is none of ours, or a hang, is a finding.

usage: scripts/fuzz.py READER|all [--minutes N] [--corpus DIR] [--findings DIR] [--seed S] [--replay] [--list]

Starts from tests/faults/corpus/READER and what lies in DIR/READER (default out/fuzz/corpus), where inputs that reach new code
are added. Every finding is one file in --findings (default out/fuzz/findings): READER-ERROR-PLACE.bin, once for each place; a
hang or a death of the process as libFuzzer names it. --replay only reads the inputs again. The last line of each reader:
inputs, coverage, findings. Exit code 1 when there are findings. Needs atheris (`pip install --no-deps atheris`).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuzz_readers import CORPORA, PROJECT, READERS, Finding, Reader, judge, make_importable

_TIMEOUT_SECONDS = 20
_COMPILED = ["quant.prequantized.gguf_blocks"]  # by numba, which knows none of what atheris puts into it
_MEMORY_MB = 3072  # torch and the corpus are 700 of it
_STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What fuzzing one reader gave.

    Attributes:
        inputs: how many were read.
        coverage: branches of the instrumented modules that were taken.
        corpus: inputs that reach something of their own.
        findings: files, one a finding.
    """

    reader: str
    inputs: int = 0
    coverage: int = 0
    corpus: int = 0
    findings: tuple[str, ...] = ()


def inputs_of(reader: Reader, *folders: Path) -> Iterator[Path]:
    """Yield every input of a reader's corpora."""
    for folder in folders:
        if (folder / reader.name).is_dir():
            yield from sorted(path for path in (folder / reader.name).iterdir() if path.is_file())


def save_finding(reader: Reader, finding: Finding, data: bytes, folder: Path) -> bool:
    """Keep an input; False when there is one of its kind already."""
    place = re.sub(r"[^\w.]+", "-", finding.place)
    path = folder / f"{reader.name}-{finding.error.replace(' ', '-')}-{place}.bin"
    if path.exists():
        return False
    path.write_bytes(data)
    print(f"finding: {path.name}: {finding.detail!r}", file=sys.stderr, flush=True)
    return True


def replay(reader: Reader, corpus: Path, findings: Path) -> Outcome:
    """Read every input of the corpora once more."""
    names, count = [], 0
    with tempfile.TemporaryDirectory(prefix="t2n-fuzz-") as work:
        for path in inputs_of(reader, CORPORA, corpus):
            count += 1
            finding = judge(reader, path.read_bytes(), Path(work))
            if finding is not None:
                names.append(f"{path.name}: {finding}")
                save_finding(reader, finding, path.read_bytes(), findings)
    return Outcome(reader.name, count, 0, count, tuple(names))


def fuzz(reader: Reader, corpus: Path, findings: Path, seconds: float, seed: int) -> Outcome:
    """Fuzz in processes of their own, one after the other where one ends early, until the time is over."""
    end = time.monotonic() + seconds
    before = set(findings.iterdir())
    total = Outcome(reader.name)
    (corpus / reader.name).mkdir(parents=True, exist_ok=True)
    while (left := end - time.monotonic()) > 1:
        command = [sys.executable, __file__, reader.name, "--child", "--findings", str(findings), "--"]
        command += [f"-seed={seed}", f"-timeout={_TIMEOUT_SECONDS}", f"-rss_limit_mb={_MEMORY_MB}"]
        command += [f"-max_total_time={int(left)}", f"-max_len={reader.largest}"]
        command += [f"-artifact_prefix={findings}/{reader.name}-"]
        command += [str(corpus / reader.name)]
        command += [str(CORPORA / reader.name)] if (CORPORA / reader.name).is_dir() else []
        done = _run(command)
        total = _added(total, done.stderr)
        sys.stderr.writelines(line + "\n" for line in done.stderr.splitlines() if line.startswith("finding:"))
        if not _STATUS.search(done.stderr):
            raise SystemExit(f"error: the fuzzer did not start:\n{done.stderr[-2000:]}")
        seed += 1
    found = sorted(path.name for path in set(findings.iterdir()) - before)
    return replace(total, findings=tuple(found))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer with a folder in memory for its files, where there is one; it ends without cleaning up."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="t2n-fuzz-", dir=memory if memory.is_dir() else None) as work:
        return subprocess.run(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": work},
        )


def _added(total: Outcome, said: str) -> Outcome:
    lines = _STATUS.findall(said)
    if not lines:
        return total
    inputs, _, coverage, _, corpus = lines[-1]
    return replace(
        total,
        inputs=total.inputs + int(inputs),
        coverage=max(total.coverage, int(coverage)),
        corpus=int(corpus),
    )


def run_child(reader: Reader, findings: Path, arguments: Sequence[str]) -> None:
    """Be the fuzzer: instrument what the reader is made of, and read until libFuzzer ends the process."""
    import atheris

    guiding = list(reader.modules)
    with atheris.instrument_imports(include=guiding, exclude=_COMPILED, enable_loader_override=False):
        _import_before(reader)
    # A tensor that a damaged file announces must not be asked for: fail there and not in the kernel.
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
    work = tempfile.mkdtemp(prefix="t2n-fuzz-")

    def one_input(data: bytes) -> None:
        finding = judge(reader, data, Path(work))
        if finding is not None:
            save_finding(reader, finding, data, findings)

    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


def _import_before(reader: Reader) -> None:
    """Import what a reader imports, by reading nothing."""
    with tempfile.TemporaryDirectory(prefix="t2n-fuzz-") as work:
        judge(reader, b"", Path(work))
        for path in inputs_of(reader, CORPORA):
            judge(reader, path.read_bytes(), Path(work))


def _chosen(name: str) -> list[Reader]:
    if name == "all":
        return list(READERS.values())
    if name not in READERS:
        raise SystemExit(f"error: no reader {name!r}. Readers: all, {', '.join(READERS)}.")
    return [READERS[name]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("reader", nargs="?", default="all")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each reader")
    parser.add_argument("--corpus", type=Path, default=PROJECT / "out" / "fuzz" / "corpus")
    parser.add_argument("--findings", type=Path, default=PROJECT / "out" / "fuzz" / "findings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given.index("--") if "--" in given else len(given)  # what follows is libFuzzer's
    options = parser.parse_args(given[:own])
    make_importable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.list:
        print("\n".join(READERS))
        return 0
    readers = _chosen(options.reader)
    options.findings.mkdir(parents=True, exist_ok=True)
    if options.child:
        run_child(readers[0], options.findings, given[own + 1 :])
    failed = False
    for reader in readers:
        if options.replay:
            outcome = replay(reader, options.corpus, options.findings)
        else:
            outcome = fuzz(reader, options.corpus, options.findings, 60 * options.minutes, options.seed)
        failed = failed or bool(outcome.findings)
        print(
            f"{outcome.reader}: {outcome.inputs} inputs, {outcome.coverage} branches, corpus of {outcome.corpus}, "
            f"{len(outcome.findings)} findings {' '.join(outcome.findings)}".rstrip(),
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())
