"""What `check_device.py` runs on a device: one dynamic archive for each operator and element type, and language models.

In: PyTorch's operator database, checkpoints, a folder. Out: in it, `NAME/model.nnef.tgz`, `NAME/data.npz` (samples, and
what tract on the CPU answers at each size) and `index.json`. Needs the whole environment, and no GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_inputs import SIZES, inputs_at
from opinfo_report import SampleModule, kind_of, operators
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.families

DTYPES = {"f32": torch.float32, "f16": torch.float16}
SYMBOL = "N"
OPERATOR_SECONDS = 40
LARGEST_OPERATOR = 120_000
"""Bytes of the answers that are kept of an operator; the largest sizes are left out where it takes more."""

_KINDS = ("core", "other", "linalg, special, fft")
_RANDOM = re.compile(r"rand|bernoulli|dropout|normal|multinomial|uniform|exponential|cauchy|geometric|empty|rrelu")


@dataclass(frozen=True)
class Entry:
    """One archive of the folder.

    Attributes:
        name: of its folder.
        kind: "operator" or "language model".
        dtype: of what it computes in.
        axes: operators: for each input the axis that has the size, or None for a fixed one.
        sizes: operators: what it is run at.
        turns: language models: for each prompt, how many tokens each turn feeds.
    """

    name: str
    kind: str
    dtype: str
    axes: tuple[int | None, ...] = ()
    sizes: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()


def prepare(folder: Path, count: int, models: Sequence[Path], jobs: int, pattern: str = "") -> None:
    """Fill a folder.

    Args:
        folder: made by this function, or empty.
        count: operators, each in f32 and, where it supports that, in f16.
        models: checkpoints of causal language models, beside the tiny families.
        jobs: processes.
        pattern: regular expression on names of operators.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = [entry for source in _sources(models) if (entry := _language_model(folder, *source)) is not None]
    chosen = sorted(
        (
            place
            for place, info in enumerate(operators())
            if re.search(pattern, info.name) and not _RANDOM.search(info.name)
        ),
        key=lambda place: _KINDS.index(kind_of(operators()[place])),
    )
    found = 0
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=40) as pool:
        for made in pool.imap(_operator, [(folder, place) for place in chosen]):
            entries += made
            found += bool(made)
            print(f"\r{found} operators", end="", file=sys.stderr)
            if found >= count:
                pool.terminate()
                break
    kept = {entry.name for entry in entries}
    for stray in folder.iterdir():
        if stray.is_dir() and stray.name not in kept:
            shutil.rmtree(stray)
    (folder / "index.json").write_text(json.dumps([asdict(entry) for entry in entries], indent=1))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"\n{found} operators, {len(entries)} archives, {size / 2**20:.1f} MiB in {folder}", file=sys.stderr)


# --- operators ------------------------------------------------------------------------------------


def _operator(task: tuple[Path, int]) -> list[Entry]:
    """Export an operator in both element types; those that cannot be exported with a dynamic axis are left out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, place = task
    info = operators()[place]
    entries = []
    for dtype in DTYPES:
        signal.signal(signal.SIGALRM, _overdue)
        signal.alarm(OPERATOR_SECONDS)
        try:
            entries += [entry for entry in [_exported(folder, info, dtype)] if entry is not None]
        except Exception as error:
            print(f"\n{info.name} {dtype}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
        finally:
            signal.alarm(0)
    return entries


def _overdue(*_: object) -> None:
    raise TimeoutError(f"more than {OPERATOR_SECONDS} s")


def _exported(folder: Path, info: Any, dtype: str) -> Entry | None:
    """Export the first sample that has a size to vary, and record what the CPU answers; None where no sample will do."""
    if DTYPES[dtype] not in info.supported_dtypes("cpu"):
        return None
    torch.manual_seed(0)
    failure: Exception | None = None
    for tried, sample in enumerate(info.sample_inputs("cpu", DTYPES[dtype], requires_grad=False)):
        if tried == 4:
            break
        leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or any(each.layout is not torch.strided or not each.numel() for each in tensors):
            continue
        module = SampleModule(info.op, spec, leaves).eval()
        for axes in _axes(tensors):
            try:
                return _recorded(
                    folder,
                    f"{info.name}{info.variant_test_name and '.'}{info.variant_test_name}",
                    module,
                    tensors,
                    axes,
                    dtype,
                )
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return None


def _axes(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int | None, ...]]:
    """Yield ways to vary a size: the last axis of the first tensor, then its first one, and those of others that are as long."""
    first = tensors[0]
    for axis in dict.fromkeys((first.ndim - 1, 0)) if first.ndim else ():
        size, back = first.shape[axis], axis - first.ndim
        yield tuple(each.ndim + back if each.ndim >= -back and each.shape[back] == size else None for each in tensors)


def _recorded(
    folder: Path,
    name: str,
    module: SampleModule,
    tensors: Sequence[torch.Tensor],
    axes: tuple[int | None, ...],
    dtype: str,
) -> Entry:
    """Export a module for CUDA, run it on the CPU at each size, and write what it answers."""
    from generic_export import TractNNEF, export_model_to_nnef
    from generic_export.inference_target.tract.engines.wheel import TractWheel

    samples = [tensor.numpy() for tensor in tensors]
    names = [f"x{place}" for place in range(len(tensors))]
    dynamic = {each: {axis: SYMBOL} for each, axis in zip(names, axes, strict=True) if axis is not None}
    example = tuple(torch.from_numpy(array) for array in inputs_at(samples, axes, 7))
    target = TractNNEF(check_io=False, dynamic_axes=dynamic, device="cuda")
    entry = re.sub(r"\W", "_", f"{name}_{dtype}")
    with tempfile.TemporaryDirectory(prefix="device-archive-") as scratch:
        archive = export_model_to_nnef(module, example, Path(scratch) / "model.nnef.tgz", target, input_names=names)
        data: dict[str, Any] = {f"input_{place}": array for place, array in enumerate(samples)}
        sizes, left = [], LARGEST_OPERATOR
        with TractWheel(timeout_seconds=OPERATOR_SECONDS).load(archive) as model:
            for size in SIZES:
                answers = model.run(inputs_at(samples, axes, size))
                left -= sum(answer.nbytes for answer in answers)
                if left < 0:
                    break
                data |= {f"output_{size}_{place}": answer for place, answer in enumerate(answers)}
                sizes.append(size)
        place = folder / entry
        place.mkdir(exist_ok=True)
        shutil.copy(archive, place / "model.nnef.tgz")
        np.savez_compressed(place / "data.npz", **data)
    return Entry(entry, "operator", dtype, axes, tuple(sizes))


# --- language models --------------------------------------------------------------------------


def _sources(models: Sequence[Path]) -> Iterator[tuple[str, Path | Any, Mapping[str, Any]]]:
    """Yield names, checkpoints or what builds a config, and options of the export."""
    from tests.families import FAMILIES, config

    for model in models:
        yield model.name, model, {}
    for activations in ("f32", "f16"):  # heads of the size that the kernel has
        yield f"padded_{activations}", config("llama", head_dim=64), {"activations": activations}
    for family, build in FAMILIES.items():
        yield f"family_{family}", build, {}


def _language_model(folder: Path, name: str, source: Any, options: Mapping[str, Any]) -> Entry | None:
    """Export a language model for CUDA, and record PyTorch's logits after each turn of some prompts."""
    from transformers import AutoConfig

    from t2n_llm import export_llm
    from t2n_llm.check.devices import DECODED, DEVICE_TEXT, PROMPTS
    from t2n_llm.check.reference import plan_check, run_reference
    from tests.families import save_tiny_model

    with tempfile.TemporaryDirectory(prefix="device-archive-") as scratch:
        checkpoint = source
        if not isinstance(source, Path):
            checkpoint = save_tiny_model(name, Path(scratch) / "checkpoint", torch.float16, configs={name: source})
        try:
            result = export_llm(
                checkpoint,
                Path(scratch) / "export",
                device=("cuda",),
                check=False,
                archive="tgz",
                require_tokenizer=False,
                **options,
            )
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            return None
        reference = run_reference(
            checkpoint, plan_check(AutoConfig.from_pretrained(checkpoint), None, at_least=DEVICE_TEXT)
        )
        ids = reference.plan.text_ids
        fitting = [(prompt, chunk) for prompt, chunk in PROMPTS if prompt + DECODED <= len(ids)]
        turns = tuple(_turns(prompt, chunk, DECODED) for prompt, chunk in fitting)
        ends = sorted({int(end) for prompt in turns for end in np.cumsum(prompt)})
        place = folder / name
        place.mkdir(exist_ok=True)
        shutil.copy(result.archive, place / "model.nnef.tgz")
        logits = {f"logits_{end}": reference.text_logits[end - 1] for end in ends}
        np.savez_compressed(place / "data.npz", ids=np.array(ids, np.int64), **logits)
    return Entry(name, "language model", str(options.get("activations", "f32")), turns=turns)


def _turns(prompt: int, chunk: int, decoded: int) -> tuple[int, ...]:
    return (*(min(chunk, prompt - start) for start in range(0, prompt, chunk)), *([1] * decoded))


__all__ = ["Entry", "prepare"]
