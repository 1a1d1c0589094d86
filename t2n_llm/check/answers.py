"""An archive that keeps no state, asked in either engine: arrays in, arrays out.

In: an archive and the engine's name. Out: an `Answerer`, whose floats are f32 whatever the archive computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from generic_export.inference_target.tract.engines.asking import ask_cli
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import LoadedModel
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.engines import chosen_engine
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import as_fact


class Answerer(Protocol):
    """One archive in one engine."""

    @property
    def engine_name(self) -> str: ...

    @property
    def engine_version(self) -> str: ...

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs, in the graph's order.

        Args:
            inputs: in the graph's order; f32 for an input that is f16 in the graph is converted.
        """


class WheelAnswerer:
    """The pip-installed engine, the archive loaded once."""

    def __init__(self, engine: TractWheel, model: LoadedModel) -> None:
        self.engine_name, self.engine_version = engine.name, engine.version
        self._model = model

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `Answerer.answer`."""
        given = [as_fact(fact, array) for fact, array in zip(self._model.inputs, inputs, strict=True)]
        return [_widened(array) for array in self._model.run(given)]


class CliAnswerer:
    """The `tract` command, one run a question."""

    def __init__(self, engine: TractCli, archive: Path) -> None:
        self.engine_name, self.engine_version = engine.name, engine.version
        self._engine, self._archive = engine, archive

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `Answerer.answer`."""
        return [
            _widened(array) for array in ask_cli(self._engine, self._archive, inputs, registries=DEFAULT_REGISTRIES)
        ]


@contextmanager
def open_answerer(archive: Path, engine: EngineOptions | None = None) -> Iterator[Answerer]:
    """Yield an archive ready to be asked, and stop its engine after the block.

    Args:
        archive: folder or file.
        engine: which one; None takes the pip-installed one.

    Raises:
        EngineMissingError: the engine is not installed.
        EngineLoadError: it refuses the archive.
    """
    chosen = chosen_engine(engine)
    if isinstance(chosen, TractCli):
        yield CliAnswerer(chosen, archive)
        return
    with chosen.load(archive) as model:
        yield WheelAnswerer(chosen, model)


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


__all__ = ["Answerer", "open_answerer"]
