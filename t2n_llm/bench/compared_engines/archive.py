"""An archive in tract, as a contender beside its rivals. In: an archive and an engine. Out: a contender."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from generic_export.devices import CPU
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from t2n_llm.bench.benchmark import ArchiveDescription, check_interface, describe_archive, fresh_session
from t2n_llm.bench.compared_engines.protocol import Turns
from t2n_llm.export.located import LocatedArchive


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


__all__ = ["ArchiveContender", "RunningArchive"]
