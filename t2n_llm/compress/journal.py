"""Progress of a calibration on disk: one that was killed continues after the last layer that was recorded.

In: the folder in which blocks are written. Out: a safetensors file beside them, replaced as a whole: the results of the finished
layers, and what the next layer reads, in the quantised model and in the original one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from generic_export.files import partial_beside, sync
from generic_export.weights.source import FileTensor
from quant.protocol import InputStatistics
from t2n_llm.compress.result import CalibrationResult, TensorError

JOURNAL_NAME = "journal.safetensors"
_FORMAT = "t2n-kept-1"
_INTERVAL = (
    30.0  # seconds of work that may be lost; a journal that is written for every quick layer costs more than it saves
)
_HIDDEN, _ORIGINAL, _STATISTICS = "hidden", "original", "statistics."


@dataclass(frozen=True)
class CalibrationStage:
    """A calibration between two layers.

    Attributes:
        layers: that are done.
        made: what was made of them.
        hidden: float32 [1, L, H] for each text, what the next layer reads.
        original: the same in the original model, where an algorithm looks at that.
    """

    layers: int
    made: CalibrationResult
    hidden: list[torch.Tensor]
    original: list[torch.Tensor] | None


@dataclass
class CalibrationJournal:
    """The journal of one calibration.

    Attributes:
        folder: where blocks are written.
        identity: text that two calibrations share when nothing that decides their result differs.
    """

    folder: Path
    identity: str
    _written: float = field(init=False, default_factory=time.monotonic)

    @property
    def _path(self) -> Path:
        return self.folder / JOURNAL_NAME

    def recalled(self) -> CalibrationStage | None:
        """Return the last recorded stage of the same identity; remove a journal of another one, or a damaged one."""
        try:
            found = self._read()
            stage = self._stage(*found) if found is not None else None
        except (ValueError, KeyError, TypeError, OSError):
            stage = None
        if stage is None:
            self._path.unlink(missing_ok=True)
        return stage

    def keep(self, stage: CalibrationStage) -> None:
        """Record a stage, unless one was recorded within the last half a minute.

        Raises:
            OSError: the file cannot be written; the one before stays.
        """
        from safetensors.torch import save_file

        if time.monotonic() - self._written < _INTERVAL:
            return
        made = stage.made
        for source in (*made.packed.values(), *made.changed.values()):
            sync(source.path)
        tensors = {_HIDDEN: torch.cat(stage.hidden)}
        if stage.original is not None:
            tensors[_ORIGINAL] = torch.cat(stage.original)
        tensors |= {_STATISTICS + name: seen.mean_square.clone() for name, seen in made.statistics.items()}
        metadata = {"format": _FORMAT, "identity": self.identity, "described": json.dumps(_described(stage))}
        partial = partial_beside(self._path)
        try:
            save_file(tensors, partial, metadata)
            sync(partial)
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)
        self._written = time.monotonic()

    def _read(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """Return what `keep` wrote for this identity; None where there is nothing of the kind."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") == _FORMAT and metadata.get("identity") == self.identity:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    return json.loads(metadata["described"]), tensors
        except SafetensorError:
            pass  # cut short, or of another version
        return None

    def _stage(self, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> CalibrationStage:
        """Raises: KeyError, TypeError, ValueError, OSError: it is not what `keep` writes, or a file of it is gone."""
        made = CalibrationResult(
            self._sources(described["packed"]),
            self._sources(described["changed"]),
            {name: TensorError(**error) for name, error in described["errors"].items()},
            dict(described["left"]),
            list(described["unfolded"]),
            {name: InputStatistics(tensors[_STATISTICS + name], count) for name, count in described["tokens"].items()},
        )
        original = list(tensors[_ORIGINAL].split(1)) if _ORIGINAL in tensors else None
        return CalibrationStage(int(described["layers"]), made, list(tensors[_HIDDEN].split(1)), original)

    def _sources(self, described: Mapping[str, Any]) -> dict[str, FileTensor]:
        sources = {}
        for name, (file, shape, dtype) in described.items():
            source = FileTensor(name, self.folder / file, 0, tuple(shape), getattr(torch, dtype))
            if source.path.stat().st_size != source.nbytes:
                raise ValueError(f"{file}: the file is truncated.")
            sources[name] = source
        return sources


def _described(stage: CalibrationStage) -> dict[str, Any]:
    made = stage.made
    return {
        "layers": stage.layers,
        "packed": _files(made.packed.values()),
        "changed": _files(made.changed.values()),
        "errors": {name: asdict(error) for name, error in made.errors.items()},
        "left": made.left,
        "unfolded": made.unfolded,
        "tokens": {name: seen.tokens for name, seen in made.statistics.items()},
    }


def _files(sources: Iterable[FileTensor]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {each.name: (each.path.name, each.shape, str(each.dtype).removeprefix("torch.")) for each in sources}


__all__ = ["JOURNAL_NAME", "CalibrationJournal", "CalibrationStage"]
