#!/usr/bin/env python3
"""Compare a device with the CPU: 200 operators at many sizes in f32 and f16, and language models token by token.

usage: scripts/check_device.py FOLDER --prepare [--ops N] [--only REGEX] [--model CHECKPOINT ...] [--jobs N]
       scripts/check_device.py FOLDER --device cuda|metal|cpu [--minutes N] [--workers N] [--json FILE] [--markdown FILE] [--again]

--prepare exports everything to FOLDER on a machine without the device: for each operator of PyTorch's operator database, and each
element type, one archive with a dynamic axis and what tract on the CPU answers at sizes from 1 to 1,000; and language models with
PyTorch's logits. It needs the environment of this project.

--device runs them there. It needs the folder, this file, device_inputs.py beside it, the file wheel_worker.py of generic_export,
tract's wheel and numpy. The engine runs in worker processes, since it can abort. Results are appended to
FOLDER/results-DEVICE.jsonl, so that an interrupted run goes on where it stopped; --again starts afresh. Every size, and every text,
is run twice: an answer that changes is `unsteady`.
Exit code 0: everything is right. 1: something is not. 2: there is no such device.
"""

from __future__ import annotations

import argparse
import json
import queue
import runpy
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from device_inputs import Array, inputs_at

OUTCOMES = ("right", "wrong", "unsteady", "refused", "error", "abort", "timeout", "not run")
WORKER = Path("generic_export/inference_target/tract/engines/wheel_worker.py")
REGISTRIES = ["tract_transformers", "tract_extra"]
DETECT_ALL = "transformers_detect_all"

LIMITS: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2}
"""Largest error of an operator, relative to its largest finite value on the CPU (at least 1)."""

LOGITS_LIMIT = 2e-2
"""The same of a language model, from PyTorch in f32."""

FIRST_SECONDS = 240.0  # the first archive compiles the kernels of the machine
ARCHIVE_SECONDS = 60.0


# --- the worker: one device, one archive after another --------------------------------------------


def work(folder: Path, device: str) -> int:
    """Run the entries that arrive on stdin, a line of JSON each, and print a result for each."""
    import tract

    worker = runpy.run_path(str(Path(__file__).resolve().parent.parent / WORKER))
    engine = worker["EngineWorker"](tract)
    missing = None if device == "cpu" else engine.use_device(device)
    print(json.dumps({"missing": missing}), flush=True)
    if missing is not None:
        return 2
    for line in sys.stdin:
        print(json.dumps(_judged(engine, folder, json.loads(line))), flush=True)
    return 0


def _judged(engine: Any, folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    operator = entry["kind"] == "operator"
    result: dict[str, Any] = {"name": entry["name"], "kind": entry["kind"], "dtype": entry["dtype"]}
    try:
        archive = str(folder / entry["name"] / "model.nnef.tgz")
        engine.load(archive, [] if operator else [DETECT_ALL], REGISTRIES)
    except Exception as error:
        return result | {"outcome": "refused", "detail": _line(error), "seconds": time.monotonic() - started}
    with np.load(folder / entry["name"] / "data.npz") as data:
        cases = _sizes(engine, entry, data) if operator else _texts(engine, entry, data)
        errors: dict[str, float] = {}
        unsteady: list[str] = []
        try:
            for case, largest, steady in cases:
                errors[case] = largest
                unsteady += [] if steady else [case]
        except Exception as error:
            return result | {"outcome": "error", "detail": _line(error), "seconds": time.monotonic() - started}
    limit = LIMITS["float16" if entry["dtype"] == "f16" else "float32"] if operator else LOGITS_LIMIT
    wrong = [case for case, error in errors.items() if not error <= limit]
    outcome = "wrong" if wrong else "unsteady" if unsteady else "right"
    return result | {
        "outcome": outcome,
        "detail": ", ".join(wrong or unsteady),
        "error": max(errors.values(), default=0.0),
        "errors": errors,
        "seconds": time.monotonic() - started,
    }


def _sizes(engine: Any, entry: Mapping[str, Any], data: Any) -> Iterator[tuple[str, float, bool]]:
    """Yield for each size the error, relative to the CPU's answer, and whether two runs were the same."""
    samples = [data[f"input_{place}"] for place in range(len(entry["axes"]))]
    for size in entry["sizes"]:
        inputs = [np.asarray(array, order="C") for array in inputs_at(samples, entry["axes"], size)]
        first, again = engine.run(inputs), engine.run(inputs)
        expected = [data[f"output_{size}_{place}"] for place in range(len(first))]
        steady = all(np.array_equal(one, two, equal_nan=_is_float(one)) for one, two in zip(first, again, strict=True))
        yield str(size), max(map(relative_error, first, expected), default=0.0), steady


def _texts(engine: Any, entry: Mapping[str, Any], data: Any) -> Iterator[tuple[str, float, bool]]:
    """Yield for each prompt the largest error of its turns, relative to the largest logit, and whether two runs were the same."""
    ids = data["ids"]
    for turns in entry["turns"]:
        runs = []
        for _ in range(2):
            session, rows, end = engine.spawn(), [], 0
            for turn in turns:
                (logits,) = engine.turn(session, [ids[None, end : end + turn]])
                end += turn
                rows.append((end, logits[0, -1].astype(np.float32)))
            engine.forget([session])
            runs.append(rows)
        worst = max(
            float(np.abs(row - data[f"logits_{end}"]).max() / np.abs(data[f"logits_{end}"]).max())
            for end, row in runs[0]
        )
        steady = all(np.array_equal(one[1], two[1]) for one, two in zip(*runs, strict=True))
        prompt = sum(turns) - sum(turn == 1 for turn in turns)
        yield f"{prompt} in chunks of {max(turns)}", worst if np.isfinite(worst) else float("inf"), steady


def relative_error(answer: Array, expected: Array) -> float:
    """Return the largest difference relative to the largest finite expected value (at least 1); infinite for another form.

    NaN equals NaN, and infinities themselves. Values that are no floats must be equal.
    """
    if answer.dtype != expected.dtype or answer.shape != expected.shape:
        return float("inf")
    if not _is_float(expected):
        return 0.0 if np.array_equal(answer, expected) else float("inf")
    wide, truth = answer.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(truth)
    if not np.array_equal(wide[~finite], truth[~finite], equal_nan=True) or not np.isfinite(wide[finite]).all():
        return float("inf")
    scale = max(1.0, float(np.abs(truth[finite]).max(initial=0.0)))
    return float(np.abs(wide[finite] - truth[finite]).max(initial=0.0)) / scale


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f"


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines)[:300] or type(error).__name__


# --- the parent --------------------------------------------------------------------------------


class MissingDeviceError(Exception):
    """There is no such device."""


class Worker:
    """A worker process; started again after an abort or a timeout."""

    def __init__(self, folder: Path, device: str) -> None:
        self._command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--device", device, "--worker"]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seconds = FIRST_SECONDS

    def judge(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Run an entry and return its result, even if the worker process dies.

        Raises:
            MissingDeviceError: there is no such device.
        """
        process = self._started()
        assert process.stdin is not None
        result = {"name": entry["name"], "kind": entry["kind"], "dtype": entry["dtype"]}
        try:
            process.stdin.write(json.dumps(entry) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self._seconds)
        except (OSError, queue.Empty) as error:
            self.close()
            outcome = "timeout" if isinstance(error, queue.Empty) else "abort"
            return result | {"outcome": outcome, "detail": f"{self._seconds:g} s" if outcome == "timeout" else ""}
        if line is None:
            code = process.wait()
            self.close()
            return result | {"outcome": "abort", "detail": f"exit code {code}"}
        self._seconds = ARCHIVE_SECONDS
        judged: dict[str, Any] = json.loads(line)
        return judged

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._lines = queue.Queue()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
            greeting = self._lines.get(timeout=FIRST_SECONDS)
            missing = json.loads(greeting)["missing"] if greeting else "the worker does not start"
            if missing is not None:
                self.close()
                raise MissingDeviceError(missing)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # the engine prints too
            lines.put(line)
    lines.put(None)


def run(folder: Path, device: str, minutes: float, workers: int, *, again: bool) -> list[dict[str, Any]]:
    """Run everything that has no result yet, as long as there is time.

    Raises:
        MissingDeviceError: there is no such device.
    """
    entries = json.loads((folder / "index.json").read_text())
    log = folder / f"results-{device}.jsonl"
    if again:
        log.unlink(missing_ok=True)
    done = {record["name"]: record for record in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    deadline = time.monotonic() + 60 * minutes
    todo: queue.Queue[dict[str, Any]] = queue.Queue()
    for entry in entries:
        if entry["name"] not in done:
            todo.put(entry)
    first = Worker(folder, device)
    lock = threading.Lock()

    def record(result: dict[str, Any]) -> None:
        with lock, log.open("a") as file:
            done[result["name"]] = result
            file.write(json.dumps(result) + "\n")

    if not todo.empty() and time.monotonic() < deadline:
        record(first.judge(todo.get()))  # alone, since it compiles the kernels that the others find
    loops = [
        threading.Thread(target=_drain, args=(worker, todo, record, deadline))
        for worker in (first, *(Worker(folder, device) for _ in range(workers - 1)))
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    missed = {"outcome": "not run", "detail": "no time left"}
    return [
        done.get(entry["name"], {**missed, **{key: entry[key] for key in ("name", "kind", "dtype")}})
        for entry in entries
    ]


def _drain(
    worker: Worker, todo: queue.Queue[dict[str, Any]], record: Callable[[dict[str, Any]], None], deadline: float
) -> None:
    try:
        while time.monotonic() < deadline:
            record(worker.judge(todo.get_nowait()))
    except queue.Empty:
        pass
    finally:
        worker.close()


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of outcomes by kind and element type, and a line for everything that is not right."""
    rows = ["| | " + " | ".join(OUTCOMES) + " |", "|---|" + "--:|" * len(OUTCOMES)]
    groups = sorted({(result["kind"], result["dtype"]) for result in results})
    for kind, dtype in groups:
        counts = Counter(result["outcome"] for result in results if (result["kind"], result["dtype"]) == (kind, dtype))
        rows.append(f"| {kind}s, {dtype} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    bad = [result for result in results if result["outcome"] != "right"]
    if bad:
        rows += ["", "| not right | outcome | largest error | where, why |", "|---|---|--:|---|"]
    for result in bad:
        error = f"{result['error']:.2g}" if "error" in result else ""
        rows.append(
            f"| {result['name']} | {result['outcome']} | {error} | {str(result.get('detail', '')).replace('|', '/')} |"
        )
    models = [result for result in results if result["kind"] == "language model" and "errors" in result]
    if models:
        rows += ["", "| language model | prompt | largest error / largest logit |", "|---|---|--:|"]
        rows += [
            f"| {each['name']} | {case} | {error:.2g} |" for each in models for case, error in each["errors"].items()
        ]
    return "\n".join(rows)


def versions() -> dict[str, str]:
    """Return the versions of the engine and of numpy, and the name of the card where torch knows it."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("tract", "numpy")}
    try:
        import torch

        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name()
    except ImportError:
        pass
    return found


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="archives and results")
    parser.add_argument("--prepare", action="store_true", help="export the archives")
    parser.add_argument("--ops", type=int, default=200, help="--prepare: operators")
    parser.add_argument("--only", default="", help="--prepare: regular expression on operator names")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="--prepare: checkpoint of a language model"
    )
    parser.add_argument("--jobs", type=int, default=2, help="--prepare: processes")
    parser.add_argument("--device", choices=("cuda", "metal", "cpu"), help="what to run on")
    parser.add_argument("--minutes", type=float, default=6.0, help="--device: stop after that time")
    parser.add_argument("--workers", type=int, default=4, help="--device: processes")
    parser.add_argument("--json", type=Path, help="--device: write all results")
    parser.add_argument("--markdown", type=Path, help="--device: write the tables")
    parser.add_argument("--again", action="store_true", help="--device: forget earlier results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        from device_archives import prepare

        prepare(options.folder, options.ops, options.model, options.jobs, options.only)
        return 0
    if options.device is None:
        parser.error("give --prepare or --device")
    if options.worker:
        return work(options.folder, options.device)
    try:
        results = run(options.folder, options.device, options.minutes, options.workers, again=options.again)
    except MissingDeviceError as error:
        print(f"tract cannot compute on {options.device} here: {error}", file=sys.stderr)
        return 2
    text = summary(results)
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps({"versions": versions(), "device": options.device, "results": results}, indent=1)
        )
    if options.markdown:
        heading = ", ".join(f"{name} {version}" for name, version in versions().items())
        options.markdown.write_text(f"# {options.device}\n\n{heading}\n\n{text}\n")
    return 0 if all(result["outcome"] == "right" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
