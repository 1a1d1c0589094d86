"""An archive in tract, as a contender: what is known of it, and the time of its turns. In: an archive. Out: a contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.devices import CPU
from generic_export.errors import EngineLoadError
from generic_export.inference_target.tract.engines.engine import Array
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel, WheelSession
from generic_export.read.contents import read_contents
from generic_export.read.outline import read_outline
from t2n_llm.bench.compared_engines.protocol import Turns
from t2n_llm.check.runner import empty_input, grows
from t2n_llm.export.archive_lookup import LocatedArchive
from t2n_llm.inspect.inspection import stateful_transforms

_TOLD = 3  # inputs of an archive that is refused


@dataclass(frozen=True)
class ArchiveDescription:
    """What is known of an archive before it runs.

    Attributes:
        stored_bytes: its size on the disk.
        bits_per_weight: of its tensors, as stored.
        transforms: what the engine needs to keep the caches itself.
    """

    stored_bytes: int
    bits_per_weight: float
    transforms: tuple[str, ...]


def describe_archive(archive: LocatedArchive) -> ArchiveDescription:
    """Read what is known of an archive before it runs.

    Raises:
        ArchiveError: it is damaged.
    """
    contents = read_contents(archive.path)
    outline = read_outline(contents.graph_text)
    values = sum(tensor.elements for tensor in contents.tensors)
    bits = sum(tensor.data_bytes for tensor in contents.tensors) * 8 / values if values else 0.0
    return ArchiveDescription(contents.stored_bytes, bits, tuple(stateful_transforms(outline)))


def check_interface(archive: LocatedArchive, model: WheelModel) -> None:
    """Check that the inputs of an archive are token ids and states that can be fed back.

    Raises:
        EngineLoadError: it has other inputs.
    """
    (first, *others) = model.inputs or (None,)
    fed_back = len(others) == len(model.outputs) - 1 and not any(grows(fact) for fact in others)
    if first is None or not fed_back or first.datum_type != "i64" or len(first.shape) != 2:
        inputs = "; ".join(map(str, model.inputs[:_TOLD])) or "none"
        more = f" and {len(model.inputs) - _TOLD} more" if len(model.inputs) > _TOLD else ""
        raise EngineLoadError(
            f"{archive.path}: bench needs a language model with token ids as input; the inputs are {inputs}{more}.",
            "Use an export of t2n-llm or an archive of the same form (docs/how-to/inspect-and-benchmark.md).",
        )


def fresh_session(model: WheelModel) -> WheelSession:
    """Return a session without a past: token ids go in, states that are not the engine's own are fed back in its process."""
    session = model.spawn_state()
    states = [empty_input(fact) for fact in model.inputs[1:]]
    if states:
        session.feed_back(states)
    return session


def timed_turns(model: WheelModel, turns: Sequence[Sequence[Array]]) -> list[float]:
    """Return the seconds of turns on a state of their own."""
    session = fresh_session(model)
    try:
        return session.time_turns(turns)
    finally:
        session.close()


class ArchiveContender:
    """An archive that takes token ids and keeps its caches in the engine.

    Args:
        archive: where it is.
        name: what it is called beside the others.
        timeout_seconds: for one load, or one request.
        device: what tract computes on.
    """

    def __init__(self, archive: LocatedArchive, name: str, timeout_seconds: float, device: str = CPU) -> None:
        self.archive, self.name, self.prefill = archive, name, archive.prefill
        self._timeout_seconds, self._device = timeout_seconds, device

    @cached_property
    def description(self) -> ArchiveDescription:
        """What is known of it before it runs."""
        return describe_archive(self.archive)

    def asdict(self) -> dict[str, Any]:
        """Return what is known of it before it runs as plain data."""
        return {
            "archive": str(self.archive.path),
            "archive_bytes": self.description.stored_bytes,
            "bits_per_weight": self.description.bits_per_weight,
        }

    def check(self) -> None:
        """See `Contender.check`; a damaged archive is an `ArchiveError`."""
        _ = self.description, TractWheel().version

    def prepare(self, scratch: Path) -> None:
        """Nothing is written: the archive is there."""

    def start(self, threads: int, positions: int) -> RunningArchive:
        """See `Contender.start`; its caches grow, whatever the positions are."""
        engine = TractWheel(timeout_seconds=self._timeout_seconds, device=self._device, threads=threads)
        model = engine.load(self.archive.path, transforms=self.description.transforms)
        try:
            check_interface(self.archive, model)
        except BaseException:
            model.close()
            raise
        where = "" if self._device == CPU else f" on {self._device}"
        return RunningArchive(model, f"tract {engine.version}{where}")


class RunningArchive:
    """An archive that is loaded; see `Running`."""

    def __init__(self, model: WheelModel, version: str) -> None:
        self._model = model
        self._session = fresh_session(model)
        self.version = version

    @cached_property
    def load_seconds(self) -> float:
        """Seconds to read, transform and optimise it."""
        times = self._model.load_times()
        return times.load + times.transform + times.optimise

    def time_turns(self, turns: Turns, *, fresh: bool) -> list[float]:
        """Feed token ids; see `Running.time_turns`."""
        if fresh:
            self._session.close()
            self._session = fresh_session(self._model)
        return self._session.time_turns([[np.asarray([turn], dtype=np.int64)] for turn in turns])

    def peak_rss_bytes(self) -> int:
        """Largest resident size of the engine's process so far, in bytes."""
        return self._model.peak_rss_bytes()

    def close(self) -> None:
        """End the engine's process."""
        self._model.close()


__all__ = ["ArchiveContender", "RunningArchive", "fresh_session", "timed_turns"]
