#!/usr/bin/env python3
"""Export tiny transformers models through `transformers.exporters` with tract and with Dynamo, and count what is right.

usage: scripts/exporters_table.py [--tasks TASK,...] [--only TYPE,...] [--per-task N] [--limit N] [--timeout S] [--static-only]
                                  [--against dynamo|onnx|none] [--results FILE]

Each model, static and dynamic, runs in a process of its own: exported, saved, loaded with `ExportedModel`, called
and compared with the model at 1e-4. A dynamic export is also called at other sizes, where it takes them. Models that read
images are exported for generation, and each part is compared. Prints Markdown; --results gets a line of JSON a case, and
exports that are in it are not run again. `--against onnx` puts ONNX beside it (the packages onnx, onnxscript and onnxruntime).
The medians are of the exports alone; that of tract runs each program in tract and compares it. Exit code 1: tract was wrong
somewhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from t2n_llm.exporters.compat import capture_patches
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import reading_of
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.multimodal.check import model_inputs, plan_prompts
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.tasks import ZOO_TASKS, Way, architectures
from t2n_llm.zoo.tiny_inputs import source_inputs, tiny_image_size
from t2n_llm.zoo.tiny_model import build_tiny_model

TOLERANCE = 1e-4
RIGHT, WRONG, FAILED = "right", "wrong", "failed"
NOT_TAKEN = "not taken"

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of one export.

    Attributes:
        task, kind: of the model; `model_class` is transformers' class.
        backend: tract, dynamo or onnx.
        dynamic: every axis was `Dim.AUTO`.
        verdict: right, wrong or failed, at the example's sizes.
        elsewhere: the same at other sizes, or "not taken"; "" for a static export.
        seconds: of the export.
        said: the error.
    """

    task: str
    kind: str
    model_class: str
    backend: str
    dynamic: bool
    verdict: str
    elsewhere: str = ""
    seconds: float = 0.0
    said: str = ""


# --- cases -------------------------------------------------------------------------------------------


def cases(tasks: Sequence[str], only: Sequence[str], per_task: int | None) -> Iterator[tuple[str, str]]:
    """Yield task and model type of each case; a class that several tasks share is one case."""
    seen: set[str] = set()
    for task in tasks:
        chosen = [(kind, name) for kind, name in architectures(task).items() if not only or kind in only]
        fresh = [(kind, name) for kind, name in chosen if name not in seen][:per_task]
        seen.update(name for _, name in fresh)
        yield from ((task, kind) for kind, _ in fresh)


def inputs_of(model: Any, task: str) -> list[Inputs]:
    """Return what a model is given: the example's, then inputs of other sizes."""
    if task == TEXT_GENERATION:
        return [_texts(model, *size) for size in ((2, 12), (3, 9))]
    if ZOO_TASKS[task].way is Way.PROMPTS:
        family = family_of(model.config, tiny_image_size(model.config))
        return [model_inputs(family, plan_prompts(family)[0])]
    if ZOO_TASKS[task].way is Way.GENERATE:
        given = {name: value for name, value in source_inputs(model).items() if isinstance(value, torch.Tensor)}
        start = {"decoder_input_ids": torch.arange(3, 8)[None]} if model.config.is_encoder_decoder else {}
        return [{**given, **start}]
    reading = reading_of(HEADS[task], model, image_size_of(model.config, None))
    sizes = (reading.traced, *reading.others)
    return [{name: torch.from_numpy(each) for name, each in reading.random(size).items()} for size in sizes]


def _texts(model: Any, batch: int, steps: int) -> Inputs:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3, 3 + batch * steps).remainder(vocabulary).reshape(batch, steps)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# --- one export --------------------------------------------------------------------------------------


def backend_of(name: str) -> tuple[Any, Callable[..., Any]]:
    """Return an exporter and the class of its config."""
    if name == "tract":
        from t2n_llm.exporters import TractConfig, TractExporter

        return TractExporter(), TractConfig
    from transformers import exporters

    return (
        (exporters.DynamoExporter(), exporters.DynamoConfig)
        if name == "dynamo"
        else (exporters.OnnxExporter(), exporters.OnnxConfig)
    )


def outcome(model: Any, case: Mapping[str, str], inputs: Sequence[Inputs], backend: str, dynamic: bool) -> Outcome:
    """Export one model and compare what was saved and loaded."""
    from transformers.exporters import ExportedModel

    example, *others = inputs
    record: dict[str, Any] = {**case, "backend": backend, "dynamic": dynamic}
    begun = time.perf_counter()
    try:
        exporter, config = backend_of(backend)
        in_parts = ZOO_TASKS[case["task"]].way is Way.PROMPTS
        export = exporter.export_for_generation if in_parts else exporter.export
        exported = export(model, copy.deepcopy(example), config(dynamic=dynamic))
        seconds = time.perf_counter() - begun
        with tempfile.TemporaryDirectory() as folder:
            exported.save_pretrained(folder)
            loaded = ExportedModel.from_pretrained(folder, trust_remote_code=True)
            verdict, said = compared_parts(loaded, model, example) if in_parts else compared(loaded, model, example)
            elsewhere = [compared(loaded, model, other) for other in others] if dynamic else []
    except Exception as error:  # whatever a backend raises
        reason = f"{type(error).__name__}: {error}"
        return Outcome(**record, verdict=FAILED, seconds=time.perf_counter() - begun, said=reason[:600])
    found = [each for each, _ in elsewhere]
    other = next((each for each in (WRONG, RIGHT) if each in found), NOT_TAKEN if found else "")
    said = said or "; ".join(why for each, why in elsewhere if each == WRONG)
    return Outcome(**record, verdict=verdict, elsewhere=other, seconds=seconds, said=said)


def compared_parts(loaded: Any, model: Any, inputs: Inputs) -> tuple[str, str]:
    """Return whether every part of an export for generation answers as its part of the model does, and what is wrong."""
    from transformers.exporters.utils import decompose_for_generation

    for name, (part, given) in decompose_for_generation(model, copy.deepcopy(inputs)).items():
        verdict, said = compared(partial(_answer_of, loaded.runners[name]), part, given)
        if verdict != RIGHT:
            return verdict, f"{name}: {said}"
    return RIGHT, ""


def _answer_of(runner: Any, **inputs: Any) -> Any:
    """Run a part with those of the inputs that it was exported with."""
    return runner(**{name: value for name, value in inputs.items() if name in runner.metadata.kwargs})


def compared(loaded: Any, model: Any, inputs: Inputs) -> tuple[str, str]:
    """Return whether a loaded export answers as the model does, and what is wrong."""
    with torch.no_grad(), capture_patches(model):  # caches of windows keep every position in an export
        wanted = tensors_of(model(**copy.deepcopy(inputs)))
    try:
        answer = loaded(**copy.deepcopy(inputs))
    except Exception as error:  # whatever a runtime raises
        return NOT_TAKEN, f"{type(error).__name__}: {error}"[:300]
    found = tensors_of(answer)
    for name, tensor in wanted.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            return WRONG, f"{name}: {None if other is None else tuple(other.shape)}, not {tuple(tensor.shape)}"
        scale = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        if not torch.allclose(
            other.to(tensor), tensor, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, scale), equal_nan=True
        ):
            return WRONG, f"{name}: off by {float((other.to(tensor) - tensor).abs().max()):.2g}"
    return RIGHT, ""


def tensors_of(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a result, by their path."""
    from transformers.exporters.utils import get_leaf_tensors

    return dict(get_leaf_tensors(result))


# --- a process for each ------------------------------------------------------------------------------


def _answer(pipe: Connection, task: str, kind: str, exports: Sequence[tuple[str, bool]]) -> None:
    warnings.simplefilter("ignore")
    try:
        model = build_tiny_model(kind, task=task)
        inputs = inputs_of(model, task)
        with torch.no_grad():
            model(**copy.deepcopy(inputs[0]))
    except Exception as error:  # no tiny model, or one that transformers cannot run
        pipe.send({"skipped": f"{type(error).__name__}: {error}"[:300]})
        return
    case = {"task": task, "kind": kind, "model_class": type(model).__name__}
    for backend, dynamic in exports:
        pipe.send(asdict(outcome(model, case, inputs, backend, dynamic)))


def in_process(task: str, kind: str, exports: Sequence[tuple[str, bool]], timeout: float) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each export of a model, in a fork; where it dies or takes too long, the others were not tried."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(there, task, kind, exports))
    process.start()
    there.close()
    try:
        for backend, dynamic in exports:
            said = f"no answer in {timeout:.0f} s"
            try:
                record = dict(here.recv()) if here.poll(timeout) else None
            except EOFError:
                record, said = None, "the process died"
            yield record or asdict(Outcome(task, kind, "?", backend, dynamic, FAILED, said=said))
            if record is None or "skipped" in record:
                return
    finally:
        process.kill()
        process.join()


# --- tables ------------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts as Markdown, and a line for each export of tract that is not right."""
    backends = list(dict.fromkeys(record["backend"] for record in records))
    lines = ["| export | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    for dynamic in (False, True):
        cells = [
            _counted([r for r in records if r["backend"] == name and r["dynamic"] is dynamic]) for name in backends
        ]
        lines.append(f"| {'dynamic' if dynamic else 'static'} | {' | '.join(cells)} |")
    classes = {record["model_class"] for record in records}
    lines += ["", f"{len(classes)} classes.", ""]
    lines += [
        f"* {r['model_class']} ({'dynamic' if r['dynamic'] else 'static'}): {r['verdict']}, {r['elsewhere']}: {r['said']}"
        for r in records
        if r["backend"] == "tract" and (r["verdict"] != RIGHT or r["elsewhere"] == WRONG)
    ]
    return "\n".join(lines)


def _counted(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return "-"
    right = sum(r["verdict"] == RIGHT for r in records)
    wrong = sum(WRONG in (r["verdict"], r["elsewhere"]) for r in records)
    others = [r["elsewhere"] for r in records if r["elsewhere"]]
    moved = f", {others.count(RIGHT)} of {len(others)} at other sizes" if others else ""
    seconds = median(r["seconds"] for r in records if r["verdict"] == RIGHT) if right else 0.0
    return f"{right} of {len(records)} right, {wrong} wrong{moved}, median {seconds:.1f} s"


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(ZOO_TASKS))
    parser.add_argument("--only", default="", help="model types")
    parser.add_argument("--per-task", type=int, help="classes of each task, at most")
    parser.add_argument("--limit", type=int, help="cases, at most")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for an export")
    parser.add_argument("--static-only", action="store_true")
    parser.add_argument("--against", default="dynamo", choices=("dynamo", "onnx", "none"))
    parser.add_argument("--results", type=Path, help="a file of JSON lines, which a second run goes on with")
    options = parser.parse_args()
    backends = ("tract",) if options.against == "none" else ("tract", options.against)
    records = (
        [json.loads(line) for line in options.results.open()] if options.results and options.results.exists() else []
    )
    known = {(r["task"], r["kind"], r["backend"], r["dynamic"]) for r in records}
    only = [kind for kind in options.only.split(",") if kind]
    for task, kind in list(cases(options.tasks.split(","), only, options.per_task))[: options.limit]:
        wanted = [
            (backend, dynamic)
            for dynamic in ((False,) if options.static_only else (False, True))
            for backend in backends
        ]
        exports = [each for each in wanted if (task, kind, *each) not in known]
        for record in in_process(task, kind, exports, options.timeout) if exports else ():
            if "skipped" in record:
                print(f"{task} {kind}: skipped, {record['skipped']}", flush=True)
                continue
            records.append(record)
            way = "dynamic" if record["dynamic"] else "static"
            print(f"{task} {kind} {record['backend']} {way}: {record['verdict']} {record['elsewhere']}", flush=True)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(table(records))
    if any(WRONG in (r["verdict"], r["elsewhere"]) for r in records if r["backend"] == "tract"):
        sys.exit(1)


if __name__ == "__main__":
    main()
