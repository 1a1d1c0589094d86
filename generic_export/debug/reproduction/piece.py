"""A folder per fault that anybody can run: the guilty piece alone, with random weights and inputs of the same shapes.

In: a diagnosis and its cases. Out: `<number>-<Class>/` with `repro.py`, `piece.pt` (structure, no weights), `inputs.npz`,
`weights.json` (seeds), `report.json`, `README.md`. Nothing private leaves: numbers are random unless asked otherwise, texts have no
machine paths, names of checkpoints are taken out of configurations.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.debug.attempt.attempt import AttemptOptions
from generic_export.debug.diagnosis import Culprit, Diagnosis
from generic_export.debug.privacy import SeededTensor, redacted
from generic_export.debug.record.leaves import adapters_in
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recording import RecordedCall
from generic_export.debug.records import plain
from generic_export.errors import ArchiveError

logger = logging.getLogger(__name__)

Context = Callable[[nn.Module], AbstractContextManager[Any]]
"""What a module needs around it to run as it is exported; it can be pickled."""

_MAX_INPUT_BYTES = 4 << 20
_SCRIPT = Path(__file__).with_name("piece_script.py")  # copied, never imported here: it imports this package
_NAMES_OF_CHECKPOINTS = ("_name_or_path", "name_or_path")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def write_reproductions(
    diagnosis: Diagnosis,
    cases: Sequence[Case],
    options: AttemptOptions,
    folder: Path,
    *,
    private: bool = True,
    context: Context | None = None,
) -> Diagnosis:
    """Write a folder for each fault; returns the diagnosis that says where they are.

    Args:
        diagnosis: what was found.
        cases: the pieces it is about.
        options: what they were tried with.
        folder: where the folders go; those of an earlier diagnosis are replaced.
        private: random weights and inputs instead of the real ones.
        context: see `diagnose`.

    Raises:
        ArchiveError: the folder cannot be written.
    """
    by_key = {case.piece.key: case for case in cases}
    paths: dict[str, str] = {}
    try:
        if folder.exists():
            shutil.rmtree(folder)
        for number, culprit in enumerate(diagnosis.culprits(), 1):
            name = re.sub(r"\W+", "_", culprit.piece.class_name)
            place = folder / f"{number:02d}-{name}"
            place.mkdir(parents=True)
            _Writer(diagnosis, culprit, by_key[culprit.piece.key], options, place, private, context).write()
            paths |= {piece.key: str(place) for piece in culprit.pieces}
    except OSError as error:
        raise ArchiveError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return diagnosis.with_repro_paths(paths)


@dataclass(frozen=True)
class _Writer:
    """One folder."""

    diagnosis: Diagnosis
    culprit: Culprit
    case: Case
    options: AttemptOptions
    folder: Path
    private: bool
    context: Context | None

    @cached_property
    def calls(self) -> list[RecordedCall]:
        """The calls that are kept."""
        return _small_enough(self.case.calls)

    def write(self) -> None:
        """Write all files."""
        shutil.copyfile(_SCRIPT, self.folder / "repro.py")
        note = self._write_piece()
        self._write_inputs()
        self._write_weights()
        report = {
            "fault": self.culprit.sentence,
            "verdict": plain(self.culprit.verdict),
            "piece": plain(self.culprit.piece),
            "versions": dict(self.diagnosis.versions),
            "private": self.private,
            "note": note,
        }
        self._write_text("report.json", json.dumps(report, indent=2) + "\n")
        self._write_text("README.md", self._readme(note))

    def _write_text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(redacted(text), encoding="utf-8")

    def _write_piece(self) -> str:
        """Write structure and calls without a number in them; returns why that is impossible, or ""."""
        calls = [_without_numbers(recorded) for recorded in self.calls]
        adapters = {adapter.kind: adapter for recorded in self.calls for adapter in adapters_in(recorded.arguments)}
        content = {
            "module": skeleton(self.case.module),
            "calls": calls,
            "adapters": list(adapters.values()),
            "fusions": list(self.options.fusions),
            "torchscript": self.options.torchscript,
            "context": self.context,
            "target": replace(self.options.target, dynamic_axes={}, specific_tract_binary_path=None),
            "axes": _bare_axes(self.case),
        }
        try:
            torch.save(content, self.folder / "piece.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            (self.folder / "piece.pt").unlink(missing_ok=True)
            note = f"{self.culprit.piece.qualified_name} cannot be pickled ({error}); move it into a file of its own."
            logger.warning("no reproduction: %s", note)
            return redacted(note)
        return ""

    def _write_inputs(self) -> None:
        rng = np.random.default_rng(0)
        arrays: dict[str, np.ndarray] = {}
        for number, recorded in enumerate(self.calls):
            for name, tensor in recorded.inputs().items():
                array = _array(tensor)
                arrays[f"{number}/{name}"] = _random_like(array, rng) if self.private else array
        with (self.folder / "inputs.npz").open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def _write_weights(self) -> None:
        module = self.case.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        persistent = set(module.state_dict(keep_vars=True))
        named = parameters | dict(module.named_buffers(remove_duplicate=False))
        real = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
        # Buffers that a module computes itself (rotary frequencies) say nothing of the weights, and have to be right.
        own = {name for name in real if name not in persistent or not real[name].is_floating_point()}
        kept = {name: _array(tensor) for name, tensor in real.items() if name in own or not self.private}
        with (self.folder / "kept.npz").open("wb") as file:
            np.savez(file, **kept)  # type: ignore[arg-type]
        seeded = [_seeded(name, named[name], number) for number, name in enumerate(named) if name not in kept]
        records = [{k: v for k, v in asdict(record).items() if k != "header"} for record in seeded]
        (self.folder / "weights.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")

    def _readme(self, note: str) -> str:
        verdict = self.culprit.verdict
        numbers = (
            "Weights and inputs are random, of the same shapes."
            if self.private
            else "Weights and inputs are the real ones."
        )
        lines = [
            f"# {self.culprit.sentence}",
            "",
            f"{verdict.error}" if verdict.error else "",
            "",
            *([note, ""] if note else []),
            f"`python repro.py` tries the piece alone; exit code 1 when it fails. {numbers}",
            "",
            ", ".join(f"{name} {version}" for name, version in self.diagnosis.versions.items()),
        ]
        return "\n".join(lines) + "\n"


def skeleton(module: nn.Module) -> nn.Module:
    """Return a copy of a module without a number of its weights: tensors on the meta device, no hooks, no checkpoint names."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor.detach(), device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    made = copy.deepcopy(module, memo)
    for inner in made.modules():
        for name in _HOOKS:
            getattr(inner, name, {}).clear()
        for value in vars(inner).values():
            _forget_checkpoint(value)
    return made.eval()


def _forget_checkpoint(value: Any) -> None:
    for name in _NAMES_OF_CHECKPOINTS:
        if isinstance(getattr(value, "__dict__", {}).get(name), str):
            value.__dict__[name] = ""


def _small_enough(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls whose inputs together stay small; the first one in any case."""
    chosen: list[RecordedCall] = []
    size = 0
    for recorded in sorted(calls, key=lambda recorded: recorded.call.set_index):
        size += sum(held.nbytes for held in recorded.held.values())
        if not chosen or size <= _MAX_INPUT_BYTES:
            chosen.append(recorded)
    return chosen


def _without_numbers(recorded: RecordedCall) -> Any:
    """Return the arguments of a call with tensors on the meta device."""
    return recorded.arguments.rebuilt(lambda name: torch.empty_like(recorded.inputs()[name], device="meta"))


def _bare_axes(case: Case) -> dict[str, dict[int, str]]:
    """Return the symbols of the piece's own input axes, as `diagnose(axes=...)` takes them."""
    found = {
        name: {axis: form.bare for axis, form in enumerate(forms) if form.bare is not None and "*" not in form.bare}
        for name, forms in case.forms.items()
    }
    return {name: axes for name, axes in found.items() if axes}


def _array(tensor: torch.Tensor) -> np.ndarray:
    plain_tensor = tensor.detach().cpu()
    if plain_tensor.dtype is torch.bfloat16:
        return plain_tensor.float().numpy()
    return plain_tensor.contiguous().numpy()


def _random_like(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random numbers of the same shape, type, range and spread."""
    if array.dtype == np.bool_:
        return rng.integers(0, 2, array.shape).astype(np.bool_) if array.size else array
    if array.dtype.kind in "iu":
        return rng.integers(array.min(), int(array.max()) + 1, array.shape, array.dtype) if array.size else array
    if array.dtype.kind == "c" or not array.size:
        return rng.standard_normal(array.shape).astype(array.dtype)
    finite = np.where(np.isfinite(array), array, 0.0).astype(np.float64)
    return (rng.standard_normal(array.shape) * finite.std() + finite.mean()).astype(array.dtype)


def _seeded(name: str, tensor: torch.Tensor, seed: int) -> SeededTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta or not tensor.numel():
        return SeededTensor(name, tuple(tensor.shape), dtype, seed, 0.02, 0.0, "")
    wide = tensor.detach().double()
    return SeededTensor(name, tuple(tensor.shape), dtype, seed, float(wide.std(correction=0)), float(wide.mean()), "")


__all__ = ["skeleton", "write_reproductions"]
