"""How far a calibration has come, kept on disk: one that was killed goes on behind the last layer that was kept.

In: the folder in which blocks are written. Out: a safetensors file beside them, replaced as a whole: what was learnt of the layers
before, and what the next one reads, in the quantised model and in the original one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from generic_export.files import sync
from generic_export.weights.source import FileTensor
from quant.protocol import InputStatistics
from t2n_llm.compress.kept import KeptState
from t2n_llm.compress.result import CalibrationResult, TensorError

JOURNAL_NAME = "journal.safetensors"
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


@dataclass(frozen=True)
class CalibrationJournal:
    """Keeps stages in a folder, and the files that they name.

    Attributes:
        folder: where blocks are written.
        identity: text that two calibrations share when nothing that decides what they make is different.
    """

    folder: Path
    identity: str

    @cached_property
    def _state(self) -> KeptState:
        return KeptState(self.folder / JOURNAL_NAME, self.identity)

    def recalled(self) -> CalibrationStage | None:
        """Return the last stage that was kept here by a calibration of the same identity; forget any other."""
        return self._state.recalled(self._stage)

    def keep(self, stage: CalibrationStage) -> None:
        """Keep a stage, unless one was kept a moment ago."""
        if not self._state.is_due:
            return
        made = stage.made
        for source in (*made.packed.values(), *made.changed.values()):
            sync(source.path)
        tensors = {_HIDDEN: torch.cat(stage.hidden)}
        if stage.original is not None:
            tensors[_ORIGINAL] = torch.cat(stage.original)
        tensors |= {_STATISTICS + name: seen.mean_square.clone() for name, seen in made.statistics.items()}
        self._state.write(_described(stage), tensors)

    def _stage(self, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> CalibrationStage:
        """Raises: KeyError, TypeError, ValueError, OSError: it is not what `keep` writes, or a file of it is gone."""
        made = CalibrationResult(
            self._sources(described["packed"]),
            self._sources(described["changed"]),
            {name: TensorError(**error) for name, error in described["errors"].items()},
            dict(described["left"]),
            list(described["unfolded"]),
            {name: InputStatistics(tensors[_STATISTICS + name], count) for name, count in described["tokens"].items()},
            list(described["notes"]),
        )
        original = list(tensors[_ORIGINAL].split(1)) if _ORIGINAL in tensors else None
        return CalibrationStage(int(described["layers"]), made, list(tensors[_HIDDEN].split(1)), original)

    def _sources(self, described: Mapping[str, Any]) -> dict[str, FileTensor]:
        sources = {}
        for name, (file, shape, dtype) in described.items():
            source = FileTensor(name, self.folder / file, 0, tuple(shape), getattr(torch, dtype))
            if source.path.stat().st_size != source.nbytes:
                raise ValueError(f"{file}: it is cut short.")
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
        "notes": made.notes,
    }


def _files(sources: Iterable[FileTensor]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {each.name: (each.path.name, each.shape, str(each.dtype).removeprefix("torch.")) for each in sources}


__all__ = ["JOURNAL_NAME", "CalibrationJournal", "CalibrationStage"]
