#!/usr/bin/env python3
"""Measure operator coverage on PyTorch's own operator database: export each sample, run it in tract, compare.

usage: scripts/opinfo_report.py [--ops REGEX] [--samples N] [--jobs N] [--json FILE] [--markdown FILE] [--show-failures] [--strict]

For each entry of `op_db` the first N usable samples (float32; int64 or bool where float is not supported) are called with
their tensors as graph inputs. An operator counts when all its samples are right. The engine runs in worker processes, so that
an abort is a result and not the end.

Operators that tract cannot express are listed, with the engine fact that proves it, in scripts/inexpressible_ops.json; they are
measured like the others (one that turns out right is reported: its row must go) but do not count.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import multiprocessing
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table_source import print_source, source
from torch import nn
from torch.utils import _pytree as pytree

SAMPLE_SECONDS = 60
INEXPRESSIBLE = Path(__file__).with_name("inexpressible_ops.json")
DTYPES = (torch.float32, torch.int64, torch.bool)
KINDS = ("core", "other", "linalg, special, fft")
OUTCOMES = ("right", "wrong", "engine error", "engine abort", "no translation", "no capture", "timeout", "other error")


@dataclass(frozen=True)
class SampleResult:
    """One sample of one operator: what became of it, and the first line of the reason."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class OpResult:
    """One entry of the operator database."""

    name: str
    variant: str
    kind: str
    samples: tuple[SampleResult, ...]

    @property
    def full_name(self) -> str:
        """Name and variant, as op_db tells them apart."""
        return f"{self.name}.{self.variant}" if self.variant else self.name

    @property
    def outcome(self) -> str:
        """`right` when every sample is, else the first other outcome; `untested` without samples."""
        if not self.samples:
            return "untested"
        return next((sample.outcome for sample in self.samples if sample.outcome != "right"), "right")


class SampleModule(nn.Module):
    """An operator call with its tensors as inputs and everything else fixed."""

    def __init__(self, op: Callable[..., Any], spec: Any, leaves: list[Any]) -> None:
        super().__init__()
        self.op, self.spec = op, spec
        self.template = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the operator; only tensors are returned."""
        leaves = list(self.template)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.op(*args, **kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def run_sample(op: Callable[..., Any], sample: Any) -> SampleResult:
    """Export one sample, run it and compare."""
    from generic_export import TractNNEF, export_model_to_nnef
    from generic_export.errors import CaptureError, EngineCrashError, EngineError, EngineTimeoutError, T2NError

    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    module = SampleModule(op, spec, leaves).eval()
    inputs = tuple(leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor))
    try:
        with torch.no_grad():
            expected = module(*(value.clone() for value in inputs))
        with tempfile.TemporaryDirectory(prefix="opinfo-") as folder:
            names = [f"x{index}" for index in range(len(inputs))]
            target = TractNNEF(check_io=False)
            archive = export_model_to_nnef(module, inputs, Path(folder) / "m", target, names, compression_level=None)
            answers = run_in_engine(archive, inputs)
            result = compare(answers, expected)
            closer = result.outcome == "wrong" and is_closer_to_f64(answers, expected, module, inputs)
            return SampleResult("right") if closer else result
    except EngineCrashError as error:
        return SampleResult("engine abort", first_line(error))
    except EngineTimeoutError as error:
        return SampleResult("timeout", first_line(error))
    except EngineError as error:
        return SampleResult("engine error", first_line(error))
    except CaptureError as error:
        return SampleResult("no capture", first_line(error))
    except T2NError as error:
        return SampleResult("no translation", first_line(error))
    except _OverdueError:
        return SampleResult("timeout", f"more than {SAMPLE_SECONDS} s")
    except Exception as error:
        return SampleResult("other error", f"{type(error).__name__}: {first_line(error)}")


def run_in_engine(archive: Path, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """Run an archive in a fresh engine process."""
    from generic_export.inference_target.tract.engines.wheel import TractWheel

    with TractWheel(timeout_seconds=SAMPLE_SECONDS).load(archive) as model:
        return model.run([value.numpy() for value in inputs])


def compare(answers: list[np.ndarray], expected: tuple[torch.Tensor, ...]) -> SampleResult:
    """Compare with PyTorch: element types, shapes, values (NaN equals NaN)."""
    if not expected:
        return SampleResult("no translation", "the result is no tensor")
    for index, (answer, value) in enumerate(zip(answers, expected, strict=True)):
        reference = value.detach().resolve_conj().resolve_neg()
        if reference.is_complex():
            reference = torch.view_as_real(reference)
        wanted = reference.contiguous().numpy()
        if answer.dtype != wanted.dtype or answer.shape != wanted.shape:
            return SampleResult(
                "wrong", f"output {index}: {answer.dtype}{answer.shape}, not {wanted.dtype}{wanted.shape}"
            )
        if not np.allclose(answer, wanted, rtol=1e-3, atol=1e-4, equal_nan=True):
            with np.errstate(all="ignore"):
                worst = np.nanmax(np.abs(answer.astype(np.float64) - wanted.astype(np.float64)), initial=0.0)
            return SampleResult("wrong", f"output {index}: max abs error {worst:.3g}")
    return SampleResult("right")


def is_closer_to_f64(
    answers: list[np.ndarray],
    expected: tuple[torch.Tensor, ...],
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
) -> bool:
    """Say whether the engine is nearer to the float64 answer than PyTorch's own float32 is (matrix_exp of large values)."""
    if not all(value.dtype is torch.float32 for value in expected):
        return False
    wide = tuple(value.double() if value.dtype is torch.float32 else value.clone() for value in inputs)
    with torch.no_grad():
        exact = [value.numpy() for value in module(*wide)]
    if any(
        value.dtype != np.float64 or value.shape != answer.shape for value, answer in zip(exact, answers, strict=True)
    ):
        return False
    return all(
        np.max(np.abs(answer - truth), initial=0.0) <= np.max(np.abs(value.numpy() - truth), initial=0.0)
        for answer, value, truth in zip(answers, expected, exact, strict=True)
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error, cut to a table's width."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


class _OverdueError(Exception):
    pass


def _overdue(*_: object) -> None:
    raise _OverdueError


def samples_of(info: Any, count: int) -> Iterator[Any]:
    """Yield the first usable samples of an operator, in the first element type it supports."""
    dtype = next((dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    found = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            continue
        yield sample
        found += 1
        if found == count:
            return


def measure(position: int, count: int) -> OpResult:
    """Measure one entry of op_db."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _overdue)
    info = operators()[position]
    results = []
    try:
        for sample in samples_of(info, count):
            signal.alarm(SAMPLE_SECONDS)
            results.append(run_sample(info.op, sample))
            signal.alarm(0)
    except Exception as error:
        results.append(SampleResult("other error", f"sample: {type(error).__name__}: {first_line(error)}"))
    finally:
        signal.alarm(0)
    return OpResult(info.name, info.variant_test_name, kind_of(info), tuple(results))


def operators() -> list[Any]:
    """Return PyTorch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def kind_of(info: Any) -> str:
    """Return `core` for operators tagged so, `linalg, special, fft, ...` for those, else `other`."""
    if info.name.startswith(("linalg.", "special.", "fft.")) or "complex" in info.name or "random" in info.name:
        return "linalg, special, fft"
    packet = getattr(torch.ops.aten, info.aten_name or info.name.rsplit(".", 1)[-1], None)
    if packet is None or not hasattr(packet, "overloads"):
        return "other"
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return "core" if torch.Tag.core in tags else "other"


def _measure(task: tuple[int, int]) -> OpResult:
    return measure(*task)


def inexpressible() -> dict[str, str]:
    """Return the operators that tract cannot express, with the reason of each."""
    return dict(json.loads(INEXPRESSIBLE.read_text())) if INEXPRESSIBLE.is_file() else {}


def summary(results: list[OpResult]) -> str:
    """Return the table: per kind of operator, how many have which outcome, and the share of the expressible ones."""
    excluded = inexpressible()
    rows = [f"{'kind':<22}{'tested':>8}{'excluded':>10}" + "".join(f"{outcome:>15}" for outcome in OUTCOMES)]
    for kind in KINDS:
        tested = [result for result in results if result.kind == kind and result.samples]
        counted = [result for result in tested if result.full_name not in excluded]
        counts = Counter(result.outcome for result in counted)
        share = f"  {counts['right'] / len(counted):.1%}" if counted else ""
        cells = "".join(f"{counts[outcome]:>15}" for outcome in OUTCOMES)
        rows.append(f"{kind:<22}{len(tested):>8}{len(tested) - len(counted):>10}{cells}{share}")
    surprises = [result.full_name for result in results if result.outcome == "right" and result.full_name in excluded]
    if surprises:
        rows.append(f"listed as inexpressible, yet right (take them off the list): {', '.join(surprises)}")
    return "\n".join(rows)


def markdown(results: list[OpResult]) -> str:
    """Return docs/measurements/operators.md: the figures, and what is not right. The rest is in the CSV file beside it."""
    excluded = inexpressible()
    lines = [
        "# Operators",
        "",
        "PyTorch's operator database (OpInfo): the first samples of each operator, with tensors as graph inputs. Each sample runs "
        "in tract and is compared with PyTorch. [operators.csv](operators.csv) lists every operator.",
        "",
        f"{source([__file__, '--markdown', 'docs/measurements/operators.md'])[:-1]}, PyTorch {torch.__version__}.",
        "",
        "```text",
        summary(results),
        "```",
        "",
        "Operators without a translation go through PyTorch's decompositions. `t2n-llm coverage MODEL` lists those of a model.",
        "",
        "## Operators that do not pass",
        "",
        "<!-- operators table: begin -->",
        "",
        "| operator | result | reason |",
        "|---|---|---|",
    ]
    for result in _measured(results):
        if result.outcome != "right":
            lines.append(f"| `{result.full_name}` | {_verdict(result, excluded)} | {_reason(result, excluded)} |")
    lines += ["", "<!-- operators table: end -->"]
    return "\n".join(lines) + "\n"


def table(results: list[OpResult]) -> str:
    """Return docs/measurements/operators.csv: every measured operator, and every translated overload."""
    import generic_export.ops  # noqa: F401 - registers the translations
    import kvcache  # noqa: F401 - and these
    from generic_export.translate.registry import translated_overloads

    excluded = inexpressible()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("operator", "kind", "result", "reason"))
    for result in _measured(results):
        writer.writerow((result.full_name, result.kind, _verdict(result, excluded), _reason(result, excluded)))
    for overload in sorted(map(str, translated_overloads())):
        writer.writerow((overload, "overload", "translated", ""))
    return out.getvalue()


def _measured(results: list[OpResult]) -> list[OpResult]:
    return [result for kind in KINDS for result in results if result.kind == kind and result.samples]


def _verdict(result: OpResult, excluded: dict[str, str]) -> str:
    return "inexpressible" if result.full_name in excluded and result.outcome != "right" else result.outcome


def _reason(result: OpResult, excluded: dict[str, str]) -> str:
    if result.outcome == "right":
        return ""
    detail = next((sample.detail for sample in result.samples if sample.outcome == result.outcome), "")
    return excluded.get(result.full_name, detail).replace("|", "\\|")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="regular expression on operator names")
    parser.add_argument("--samples", type=int, default=3, help="samples per operator")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--json", type=Path, help="write one JSON line per operator")
    parser.add_argument("--markdown", type=Path, help="write docs/measurements/operators.md, and a CSV file beside it")
    parser.add_argument("--show-failures", action="store_true", help="list every operator that is not right")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 when an operator that tract can express is not right"
    )
    options = parser.parse_args()
    positions = [i for i, info in enumerate(operators()) if re.search(options.ops, info.name)]
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=60) as pool:
        tasks = [(position, options.samples) for position in positions]
        results = []
        for result in pool.imap_unordered(_measure, tasks):
            results.append(result)
            if sys.stderr.isatty():
                print(f"\r{len(results)}/{len(tasks)} {result.full_name:<50}", end="", file=sys.stderr)
    results.sort(key=lambda result: result.full_name)
    if options.json:
        lines = (json.dumps(asdict(result) | {"outcome": result.outcome}) for result in results)
        options.json.write_text("\n".join(lines) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results))
        options.markdown.with_suffix(".csv").write_text(table(results))
    if options.show_failures:
        for result in results:
            if result.outcome not in ("right", "untested"):
                detail = next(sample.detail for sample in result.samples if sample.outcome == result.outcome)
                print(f"{result.kind:<8.8} {result.full_name:<40} {result.outcome:<15} {detail}")
    print(summary(results))
    print(f"{time.monotonic() - started:.0f} s, torch {torch.__version__}, {len(results)} entries")
    excluded = inexpressible()
    failed = [each for each in results if each.outcome not in ("right", "untested") and each.full_name not in excluded]
    return int(options.strict and (bool(failed) or not results))


if __name__ == "__main__":
    print_source()
    sys.exit(main())
