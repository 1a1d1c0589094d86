"""One file that hands a failing case to somebody else.

In: an archive whose check failed, and what it was made from. Out: a `.tgz` with the model, the data, where it first differs,
and two ways to see it again (`reproduce.py`, `reproduce.sh`). It says nothing of the machine it was written on.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import nn

from generic_export.capture import Prepared
from generic_export.compare.comparison import Comparison
from generic_export.debug.archive.bisect import Divergence, Failure, Provenance, first_divergence, first_failure
from generic_export.debug.archive.through_onnx import SecondOpinion, opinion_through_onnx
from generic_export.debug.privacy import SeededTensor, redacted, reseed, without_identity
from generic_export.debug.reproduction import archive_script
from generic_export.errors import (
    ArchiveError,
    EngineError,
    EngineMissingError,
    EngineTimeoutError,
    MismatchError,
    T2NError,
)
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.engines.asking import assert_io_cmd_str
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle
from generic_export.nnef.graph import NnefGraph
from generic_export.read.reading import read_graph_text, signature_of, unpack
from generic_export.torch_graph.capture.replay import replay
from generic_export.torch_graph.printing import graph_listing
from generic_export.write.archive import GRAPH_FILE

log = logging.getLogger(__name__)

_PACKAGES = ("t2n-llm", "torch", "numpy", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True)
class FailingCase:
    """A check that failed, with everything that a bundle is made of.

    Attributes:
        archive: the archive.
        error: what the check said.
        example: inputs, and PyTorch's outputs.
        translation: what the archive was made from.
        target: the target, which knows the engine and the tolerance.
        model, args, kwargs: the module and its arguments, for the second opinion.
    """

    archive: Path
    error: T2NError
    example: ExampleRun
    translation: Provenance
    target: EngineTarget
    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BundleOptions:
    """What goes into a bundle.

    Attributes:
        weight_seed: leave the parameters out; the case is then shown with random ones that come from this seed.
        second_opinion: also run the module through ONNX, when `onnx` and `onnxscript` are installed.
    """

    weight_seed: int | None = None
    second_opinion: bool = True


@dataclass(frozen=True)
class _Findings:
    """What was found out about a case."""

    answers: list[np.ndarray] | None
    comparisons: tuple[Comparison, ...]
    divergence: Divergence | None
    failure: Failure | None
    weights: tuple[SeededTensor, ...]
    opinion: SecondOpinion | None
    capture_differs: tuple[str, ...]
    note: str


def write_debug_bundle(path: Path, case: FailingCase, options: BundleOptions | None = None) -> Path:
    """Write the bundle of a failing case.

    Args:
        path: the `.tgz` to write; one that is there is replaced when the new one is whole.
        case: the case.
        options: weights and second opinion.

    Raises:
        ArchiveError: the bundle cannot be written.
    """
    options = options or BundleOptions()
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix="debug-bundle-") as folder:
        content = Path(folder) / _stem(path)
        content.mkdir()
        unpack(case.archive, content / "model")
        case, weights, note = _with_random_weights(case, content / "model", options.weight_seed)
        findings = _findings(case, content, weights, note, second_opinion=options.second_opinion)
        _write_content(content, case, findings)
        try:
            _pack(content, path)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


@contextmanager
def bundled_failure(write: Callable[[T2NError], Path] | None) -> Iterator[None]:
    """Write a debug bundle when the check in the block fails, and say where it is; None writes none."""
    try:
        yield
    except EngineMissingError:
        raise
    except (MismatchError, EngineError) as error:
        if write is None:
            raise
        hint = f"{error.hint or ''} The case is in {write(error)}.".strip()
        raise type(error)(error.message, hint) from error


def write_failing_case(
    path: Path,
    archive: Path,
    example: ExampleRun,
    prepared: Prepared,
    document: NnefGraph,
    target: EngineTarget,
    error: T2NError,
    options: BundleOptions | None = None,
) -> Path:
    """Write the debug bundle of a check that failed; see `write_debug_bundle`."""
    translation = Provenance(prepared.graph, document, prepared.stored)
    case = FailingCase(archive, error, example, translation, target, prepared.model, prepared.args, prepared.kwargs)
    return write_debug_bundle(path, case, options)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".tgz").removesuffix(".tar.gz") or "debug_bundle"


# --- finding out ------------------------------------------------------------------------------------


def _with_random_weights(
    case: FailingCase, folder: Path, seed: int | None
) -> tuple[FailingCase, tuple[SeededTensor, ...], str]:
    """Return the case as it is with random weights, if they are to be left out."""
    if seed is None:
        return replace(case, archive=folder), (), ""
    names = {name for name, _ in case.model.named_parameters(remove_duplicate=False)}
    weights = reseed(folder, names, seed)
    random = {weight.label: torch.from_numpy(weight.array()) for weight in weights}
    original = case.translation.stored

    def stored(name: str) -> torch.Tensor | None:
        tensor = original(name)
        seeded = random.get(name)
        return tensor if seeded is None or tensor is None else seeded.to(tensor.dtype).reshape(tensor.shape)

    captured = case.translation.captured
    inputs = case.example.input_tensors([variable.dtype for variable in captured.inputs])
    names_of_outputs = [variable.name for variable in captured.outputs]
    values = replay(captured, inputs, stored, set(names_of_outputs))
    if any(name not in values for name in names_of_outputs):
        note = "PyTorch cannot run the captured operators one by one with random weights: outputs are those of the real ones."
        return replace(case, archive=folder), tuple(weights), note
    outputs = [values[name] for name in names_of_outputs]
    example = ExampleRun.from_tensors(inputs, outputs, case.example.output_names)
    translation = replace(case.translation, stored=stored)
    return replace(case, archive=folder, example=example, translation=translation), tuple(weights), ""


def _findings(
    case: FailingCase, content: Path, weights: tuple[SeededTensor, ...], note: str, *, second_opinion: bool
) -> _Findings:
    answers: list[np.ndarray] | None = None
    comparisons: tuple[Comparison, ...] = ()
    divergence, failure = None, None
    notes = [note] if note else []
    try:
        answers = case.target.ask(case.archive, case.example.inputs)
        comparisons = tuple(case.target.compared(case.example, answers))
        if all(comparison.passed for comparison in comparisons):
            notes.append("With the weights of this bundle tract agrees with PyTorch: the fault is in the weights left out."
                         if weights else "Asked again, tract agrees with PyTorch.")  # fmt: skip
        else:
            divergence = first_divergence(
                case.archive, case.translation, case.example, case.target.ask, case.target.check_io_tolerance
            )
            if divergence is None:
                notes.append("Nothing differs once intermediate tensors are outputs too: tract's optimiser is suspect.")
    except EngineError as error:
        notes.append(f"The engine gives no outputs: {error.message}")
        if not isinstance(error, EngineTimeoutError):  # each question would take as long again
            failure = first_failure(case.archive, case.translation, case.example, case.target.ask)
    except T2NError as error:
        notes.append(f"The first differing tensor was not looked for: {error.message}")
    opinion = None
    if second_opinion:
        folder = content / "onnx" if not weights else content.parent / "onnx"  # ONNX holds the weights
        opinion = opinion_through_onnx(case.model, case.args, folder, kwargs=case.kwargs, inference_target=case.target)
    unfaithful = _unfaithful_outputs(case)
    return _Findings(answers, comparisons, divergence, failure, weights, opinion, unfaithful, " ".join(notes))


def _unfaithful_outputs(case: FailingCase) -> tuple[str, ...]:
    """Name the outputs that the captured operators, run one by one, already give otherwise than the module."""
    captured = case.translation.captured
    inputs = case.example.input_tensors([variable.dtype for variable in captured.inputs])
    values = replay(captured, inputs, case.translation.stored, {variable.name for variable in captured.outputs})
    known = [index for index, variable in enumerate(captured.outputs) if variable.name in values]
    example = ExampleRun.from_tensors(
        inputs,
        [values[captured.outputs[index].name] for index in known],
        [captured.output_names[index] for index in known],
    )
    try:
        comparisons = case.target.compared(example, [case.example.outputs[index] for index in known])
    except T2NError:
        return ()
    return tuple(comparison.name for comparison in comparisons if not comparison.passed)


# --- writing ----------------------------------------------------------------------------------------


def _write_content(content: Path, case: FailingCase, findings: _Findings) -> None:
    text = without_identity(read_graph_text(content / "model"))
    (content / "model" / GRAPH_FILE).write_text(text, encoding="utf-8")
    signature = signature_of(text)
    inputs = dict(zip(signature.inputs, case.example.inputs, strict=True))
    outputs = dict(zip(signature.outputs, case.example.outputs, strict=True))
    _save_arrays(content / "inputs.npz", inputs)
    _save_arrays(content / "outputs.npz", outputs)
    if findings.answers is not None:
        _save_arrays(content / "tract_outputs.npz", dict(zip(signature.outputs, findings.answers, strict=True)))
    if findings.divergence is not None:
        engine, torch_side = findings.divergence.values
        _save_arrays(content / "first_divergence.npz", {"tract": engine, "pytorch": torch_side})
    _write_text(content / "captured_graph.txt", graph_listing(case.translation.captured))
    _write_weights(content, findings.weights)
    shutil.copyfile(archive_script.__file__, content / "reproduce.py")
    _write_shell_line(content, case, inputs, outputs)
    report = _report(case, findings, signature.outputs)
    _write_text(content / "report.json", json.dumps(report, indent=2, default=str) + "\n")
    _write_text(content / "README.md", _readme(case, findings))


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz; `np.savez` takes names as keywords, and has some of its own."""
    with ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)


def _write_weights(content: Path, weights: Sequence[SeededTensor]) -> None:
    if weights:
        records = [weight.asdict() for weight in weights]
        (content / "weights.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for weight in weights:
        (content / "model" / f"{weight.label}.dat").unlink()


def _write_shell_line(
    content: Path, case: FailingCase, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    """Write what the `tract` command needs to repeat the check; npz has no f16, complex or string for it."""
    half = any(array.dtype == np.float16 for array in (*inputs.values(), *outputs.values()))
    write_bundle(content / "io.npz", [inputs], outputs)
    line = assert_io_cmd_str(
        "model", "io.npz", tolerance=case.target.check_io_tolerance, registries=case.target.registries, half=half
    )
    weights_first = "[ ! -f weights.json ] || python3 reproduce.py || true  # makes the weights\n"
    (content / "reproduce.sh").write_text(
        f'#!/bin/sh\ncd "$(dirname "$0")" || exit 2\n{weights_first}{line}\n', newline="\n"
    )
    (content / "reproduce.sh").chmod(0o755)


def _report(case: FailingCase, findings: _Findings, output_names: Sequence[str]) -> dict[str, Any]:
    tolerance = case.target.check_io_tolerance
    divergence = findings.divergence
    limits = {
        name: {"absolute": found.absolute, "relative": found.relative, "outliers": found.outliers}
        for name, output in zip(output_names, case.example.outputs, strict=True)
        for found in [tolerance.limits(output.dtype)]
    }
    return {
        "error": str(case.error),
        "tolerance": str(tolerance),
        "limits": limits,
        "registries": list(case.target.registries),
        "comparisons": [comparison.asdict() for comparison in findings.comparisons],
        "first_divergence": None if divergence is None else _divergence_record(divergence),
        "first_failure": None if findings.failure is None else asdict(findings.failure),
        "capture_differs_from_module": list(findings.capture_differs),
        "weights_left_out": len(findings.weights),
        "second_opinion": None if findings.opinion is None else findings.opinion.asdict(),
        "note": findings.note,
        "versions": _versions(case),
    }


def _divergence_record(divergence: Divergence) -> dict[str, Any]:
    place = {
        name: value for name, value in vars(divergence).items() if name not in ("comparison", "agreeing", "values")
    }
    return place | {"agreeing_inputs": list(divergence.agreeing), "comparison": divergence.comparison.asdict()}


def _versions(case: FailingCase) -> dict[str, str]:
    found = {"tract": str(case.target.release), "python": platform.python_version()}
    found["machine"] = f"{platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _readme(case: FailingCase, findings: _Findings) -> str:
    lines = [
        f"# A model that tract {case.target.release} and PyTorch do not agree on",
        "",
        str(case.error),
        "",
        *_located(findings),
        *([findings.note, ""] if findings.note else []),
        *([f"Second opinion: {findings.opinion}.", ""] if findings.opinion is not None else []),
        "* `python reproduce.py` (needs numpy and the tract wheel) or `./reproduce.sh` (needs the tract command)",
        "* `model/`: the archive; `captured_graph.txt`: what PyTorch captured; `report.json`: everything that was found",
        "* `inputs.npz`, `outputs.npz` (PyTorch), and where there are any `tract_outputs.npz`, `first_divergence.npz`",
    ]
    return "\n".join(lines) + "\n"


def _located(findings: _Findings) -> list[str]:
    """Say in words where the fault shows first."""
    if findings.divergence is not None:
        return [f"First tensor that differs: {findings.divergence}", "", f"    {findings.divergence.comparison}", ""]
    if findings.failure is not None:
        return [f"First tensor that tract cannot compute: {findings.failure}", ""]
    return []


def _write_text(path: Path, text: str) -> None:
    path.write_text(redacted(text), encoding="utf-8")


def _pack(content: Path, path: Path) -> None:
    """Write a folder as a gzipped tar whose entries have no owner and no time; in place only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as tar:
            tar.add(content, arcname=content.name, filter=_anonymous)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


__all__ = ["BundleOptions", "FailingCase", "bundled_failure", "write_debug_bundle", "write_failing_case"]
