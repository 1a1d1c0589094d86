"""An archive asked in either engine: arrays in, arrays out; once, or in turns that feed states back.

In: an archive and the engine's name. Out: an `ArchiveSession`, or what begins turns; floats are f32 in every archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from generic_export.inference_target.tract.engines.asking import ask_cli
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import IoFact, LoadedModel
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.read.outline import read_outline
from generic_export.read.reading import read_graph_text, signature_of
from t2n_llm.check.engines import chosen_engine
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import as_fact


class ArchiveSession(Protocol):
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


@dataclass(frozen=True)
class NamedArchive:
    """One archive in an engine, asked by the names of its inputs.

    Attributes:
        asked: the archive.
        inputs, outputs: of its graph, in order.
    """

    asked: ArchiveSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name.

        Args:
            known: its inputs by name, and others.
        """
        return dict(zip(self.outputs, self.asked.answer([known[name] for name in self.inputs]), strict=True))


class WheelArchiveSession:
    """The pip-installed engine, the archive loaded once."""

    def __init__(self, engine: TractWheel, model: LoadedModel) -> None:
        self.engine_name, self.engine_version = engine.name, engine.version
        self._model = model

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `ArchiveSession.answer`."""
        given = [as_fact(fact, array) for fact, array in zip(self._model.inputs, inputs, strict=True)]
        return [_widened(array) for array in self._model.run(given)]


class CliArchiveSession:
    """The `tract` command, one run a question."""

    def __init__(self, engine: TractCli, archive: Path) -> None:
        self.engine_name, self.engine_version = engine.name, engine.version
        self._engine, self._archive = engine, archive
        externals = read_outline(read_graph_text(archive)).externals
        self._inputs = [IoFact(each.name, each.datum_type, each.shape) for each in externals]

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `ArchiveSession.answer`."""
        given = [as_fact(fact, array) for fact, array in zip(self._inputs, inputs, strict=True)]
        return [_widened(array) for array in ask_cli(self._engine, self._archive, given, registries=DEFAULT_REGISTRIES)]


@contextmanager
def open_archive_session(archive: Path, engine: EngineOptions | None = None) -> Iterator[ArchiveSession]:
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
        yield CliArchiveSession(chosen, archive)
        return
    with chosen.load(archive) as model:
        yield WheelArchiveSession(chosen, model)


NextTurn = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Takes the inputs that are neither held nor fed back, in the graph's order; returns the outputs that are not fed back."""

OpenTurns = Callable[[Mapping[str, np.ndarray], Sequence[np.ndarray]], NextTurn]
"""Begins turns: inputs by name that all of them have, and the graph's last inputs in the first turn. The last outputs of a turn, as
many, become those of the next."""


@contextmanager
def open_turns(archive: Path, engine: EngineOptions | None = None) -> Iterator[OpenTurns]:
    """Yield what begins turns of an archive, and stop its engine after the block; see `open_archive_session`."""
    chosen = chosen_engine(engine)
    if isinstance(chosen, TractCli):
        yield partial(_turns_of_command, archive, chosen)
        return
    with chosen.load(archive) as model:
        yield partial(_turns_of_wheel, model)


def _turns_of_wheel(model: WheelModel, held: Mapping[str, np.ndarray], states: Sequence[np.ndarray]) -> NextTurn:
    """Begin turns whose states stay in the engine's process."""
    count = len(model.inputs) - len(states)
    session = model.spawn_state()
    session.hold({fact.name: as_fact(fact, held[fact.name]) for fact in model.inputs if fact.name in held})
    session.feed_back([as_fact(fact, state) for fact, state in zip(model.inputs[count:], states, strict=True)])
    given = [fact for fact in model.inputs[:count] if fact.name not in held]

    def turn(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        answers = session.run([as_fact(fact, array) for fact, array in zip(given, inputs, strict=True)])
        return [_widened(array) for array in answers]

    return turn


def _turns_of_command(
    archive: Path, engine: TractCli, held: Mapping[str, np.ndarray], states: Sequence[np.ndarray]
) -> NextTurn:
    """Start a series of turns. Each turn runs the command once."""
    answerer, names = CliArchiveSession(engine, archive), signature_of(read_graph_text(archive)).inputs
    count, kept = len(names) - len(states), list(states)
    given = [name for name in names[:count] if name not in held]

    def turn(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        nonlocal kept
        known = {**held, **dict(zip(given, inputs, strict=True)), **dict(zip(names[count:], kept, strict=True))}
        answers = answerer.answer([known[name] for name in names])
        kept = answers[len(answers) - len(kept) :]
        return answers[: len(answers) - len(kept)]

    return turn


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


__all__ = ["ArchiveSession", "NamedArchive", "NextTurn", "OpenTurns", "open_archive_session", "open_turns"]
