#!/usr/bin/env python3
"""Measure what exporting each module of a suite costs, beside torch.export alone: the median, and the ten slowest.

usage: scripts/bench_modules.py [--suite timm,torchvision,torchaudio,encoders] [--only PATTERN,...] [--limit N] [--timeout S]
                                [--results FILE]

Every case runs in a process of its own (a fork that has imported everything and has exported once): `export_model_to_nnef` to a
folder, without a check, then `torch.export.export` with the same dynamic axes, which finds PyTorch's caches warm. Seconds are the
processor's. The bar is three times torch.export, or ten seconds. Where torch.export refuses the axes, there is no ratio. Prints
Markdown; --results gets a line of JSON a case.

encoders are transformers' models without a decoder, one tiny model of each architecture in one of its tasks, exported by
`export_llm` from a checkpoint; beside it stands what of that was torch.export itself, in the last of its calls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from t2n_llm import export_llm
from t2n_llm.zoo.suites.case import Given, ModuleCase
from t2n_llm.zoo.suites.registry import ENCODERS, LIBRARIES, cases_of, encoder_tasks
from t2n_llm.zoo.tasks import architectures
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model

TIMES = 3.0
SECONDS = 10.0
SLOWEST = 10
DYNAMIC = torch.export.Dim.DYNAMIC
SMALL = ModuleCase(lambda: nn.Linear(4, 4), {"input": Given(("B", 4))}, {"B": 2}, {"B": 3})


@dataclass(frozen=True)
class Cost:
    """What a case took.

    Attributes:
        case: `suite:name`.
        alone: seconds of torch.export; None where it refuses.
        whole: of the export; None where it ended otherwise.
        said: why there is no `whole`.
    """

    case: str
    alone: float | None = None
    whole: float | None = None
    said: str = ""

    @property
    def within(self) -> bool:
        """Whether it is within the bar."""
        return self.whole is not None and self.whole <= max(SECONDS, TIMES * (self.alone or 0))


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default=",".join((*LIBRARIES, ENCODERS)))
    parser.add_argument("--only", default="*", help="names of cases, with commas; shell patterns")
    parser.add_argument("--limit", type=int, help="cases of each suite")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a case may take")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    chosen = [
        (suite, name)
        for suite in options.suite.split(",")
        for name in [
            name for name in _names(suite) if any(fnmatchcase(name, each) for each in options.only.split(","))
        ][: options.limit]
    ]
    cost_of("warm-up", SMALL)
    costs = []
    for cost in measured(chosen, options.timeout):
        costs.append(cost)
        print(
            f"{cost.case}: {_seconds(cost.whole)} s, torch.export {_seconds(cost.alone)} {cost.said}", file=sys.stderr
        )
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cost)) + "\n")
    print(table(costs))


def measured(chosen: Sequence[tuple[str, str]], timeout: float) -> Iterator[Cost]:
    """Yield the cost of each case, from a process of its own."""
    context = multiprocessing.get_context("fork")
    for suite, name in chosen:
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=_tell, args=(suite, name, sending))
        child.start()
        sending.close()
        said = f"no answer in {timeout:g} s"
        cost = None
        if receiving.poll(timeout):
            try:
                cost = receiving.recv()
            except EOFError:
                said = "its process died"
        child.kill()
        child.join()
        yield cost or Cost(f"{suite}:{name}", said=said)


def _tell(suite: str, name: str, sending: Connection) -> None:
    try:
        label = f"{suite}:{name}"
        cost = cost_of_encoder(label, name) if suite == ENCODERS else cost_of(label, cases_of(suite)[name])
    except Exception as error:  # whatever the module's own code raises
        cost = Cost(f"{suite}:{name}", said=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    sending.send(cost)


def _names(suite: str) -> Iterable[str]:
    if suite != ENCODERS:
        return cases_of(suite)
    first: dict[str, str] = {}
    for task in encoder_tasks():
        for architecture in architectures(task):
            first.setdefault(architecture, f"{task}:{architecture}")
    return first.values()


def cost_of_encoder(label: str, name: str) -> Cost:
    """Build a tiny model of `task:architecture`, and export its checkpoint.

    Raises:
        Exception: what building it raises.
    """
    task, _, architecture = name.partition(":")
    model = build_tiny_model(architecture, task=task)
    with tempfile.TemporaryDirectory() as folder, _torch_export_timed() as calls:
        save_tiny_model(model, Path(folder) / "model", task, architecture)
        start = time.process_time()
        try:
            export_llm(f"{folder}/model", f"{folder}/out", task=task, check=False, require_tokenizer=False)
        except Exception as error:  # whatever the model's own code raises
            return Cost(label, said=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
        whole = time.process_time() - start
    return Cost(label, calls[-1] if calls else None, whole)


@contextmanager
def _torch_export_timed() -> Iterator[list[float]]:
    """Give the seconds of each call of torch.export in the block."""
    calls: list[float] = []
    export = torch.export.export

    def timed(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return export(*args, **options)
        finally:
            calls.append(time.process_time() - start)

    with mock.patch("torch.export.export", timed):
        yield calls


def cost_of(label: str, case: ModuleCase) -> Cost:
    """Build a case, and capture it both ways.

    Raises:
        Exception: what building it raises.
    """
    torch.manual_seed(0)
    module = case.build().eval()
    args = case.drawn(case.sizes, 0)
    target = TractNNEF(check_io=False, dynamic_axes=case.dynamic_axes)
    said = ""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            export_model_to_nnef(
                module, args, Path(folder) / "m", target, tuple(case.inputs), compression_level=None, log_level=None
            )
        except Exception as error:  # whatever the module's own code raises
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    whole = None if said else time.process_time() - start
    return Cost(label, _alone(module, args, case), whole, said)


def _alone(module: nn.Module, args: tuple[torch.Tensor, ...], case: ModuleCase) -> float | None:
    shapes = tuple(dict.fromkeys(case.dynamic_axes.get(name, {}), DYNAMIC) or None for name in case.inputs)
    start = time.process_time()
    try:
        with torch.no_grad():
            torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    except Exception:  # many unrelated classes, none of them documented
        return None
    return time.process_time() - start


def table(costs: Sequence[Cost]) -> str:
    """Return the medians and the slowest in Markdown."""
    made = [cost for cost in costs if cost.whole is not None]
    lines = [f"{len(made)} of {len(costs)} exported, {sum(cost.within for cost in made)} within the bar."]
    if made:
        ratios = [cost.whole / cost.alone for cost in made if cost.alone and cost.whole]
        whole = median(cost.whole for cost in made if cost.whole is not None)
        lines.append(f"Median {whole:.1f} s" + (f", {median(ratios):.2f} x torch.export." if ratios else "."))
    lines += ["", "| module | export, s | torch.export, s | ratio |", "|---|---|---|---|"]
    for cost in sorted(made, key=lambda cost: cost.whole or 0, reverse=True)[:SLOWEST]:
        ratio = f"{(cost.whole or 0) / cost.alone:.2f} x" if cost.alone else "refused"
        lines.append(f"| {cost.case} | {_seconds(cost.whole)} | {_seconds(cost.alone)} | {ratio} |")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()
