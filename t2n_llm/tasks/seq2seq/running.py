"""The two archives of an encoder-decoder in an engine: a source read once, and a decoder that knows what it says.

In: archives. Out: arrays by name of what the encoder says, and a `Runner` whose turns are all told the same of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.read.reading import read_graph_text, signature_of
from kvcache.states.tensors import StateTensor
from t2n_llm.check.archive_sessions import ArchiveSession, CliArchiveSession, NamedArchive, open_archive_session
from t2n_llm.check.engines import chosen_engine
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import Runner, Turn, WheelRunner
from t2n_llm.tasks.seq2seq.model import DECODER_MASK
from t2n_llm.tasks.seq2seq.sources import ENCODER_MASK


@dataclass(frozen=True)
class EncoderArchive(NamedArchive):
    """The encoder in an engine."""

    @staticmethod
    def of(archive: Path, answerer: ArchiveSession) -> EncoderArchive:
        """Return an encoder with the names of its inputs and outputs.

        Args:
            archive: names them; the engine names outputs after its nodes, which may stand in a fragment.
            answerer: the archive in its engine.
        """
        names = signature_of(read_graph_text(archive))
        return EncoderArchive(answerer, tuple(names.inputs), tuple(names.outputs))

    def read(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what the decoder is told of a source, by name: keys and values, and the mask where its graph has one.

        Args:
            given: the encoder's inputs by name; without a mask nothing is padding.
        """
        first = next(iter(given.values()))
        masked = ENCODER_MASK in self.inputs
        whole = {ENCODER_MASK: np.ones(first.shape[:2], np.int64), **given} if masked else given
        return self.run(whole) | ({DECODER_MASK: whole[ENCODER_MASK]} if masked else {})


@contextmanager
def open_encoder(archive: Path, engine: EngineOptions | None = None) -> Iterator[EncoderArchive]:
    """Yield an encoder ready to be asked, and stop its engine after the block; see `open_archive_session`."""
    names = signature_of(read_graph_text(archive))
    with open_archive_session(archive, engine) as answerer:
        yield EncoderArchive(answerer, tuple(names.inputs), tuple(names.outputs))


class SourceRunner(Protocol):
    """A decoder in an engine, which can be told what a source says."""

    def about(self, told: Mapping[str, np.ndarray]) -> Runner:
        """Return a runner whose turns all know the same of a source."""


class CliSourceRunner:
    """The decoder in the `tract` command, one run a turn: the states of one are the next one's inputs."""

    def __init__(
        self,
        engine: TractCli,
        archive: Path,
        states: Sequence[StateTensor],
        told: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Describe the archive; `states` are what is fed back."""
        self.engine_name, self.engine_version = engine.name, engine.version
        self._engine, self._archive, self._states, self._told = engine, archive, tuple(states), told or {}

    def about(self, told: Mapping[str, np.ndarray]) -> CliSourceRunner:
        """See `SourceRunner.about`."""
        return CliSourceRunner(self._engine, self._archive, self._states, told)

    def run_turns(self, turns: Sequence[Turn], *, stateful: bool) -> list[np.ndarray]:
        """See `Runner.run_turns`; an archive that keeps its cache itself reads everything again in each turn."""
        del stateful
        asked = CliArchiveSession(self._engine, self._archive)
        states = {state.input_name: state.at_start(1) for state in self._states}
        names = signature_of(read_graph_text(self._archive)).inputs
        rows: list[np.ndarray] = []
        said: list[int] = []
        for turn in turns:
            said = [*(() if self._states else said), *turn]
            given = {"input_ids": np.array([said], np.int64), **self._told, **states}
            logits, *after = asked.answer([given[name] for name in names])
            rows.append(logits[0])
            states = dict(zip(states, after, strict=True))
        return rows


@contextmanager
def open_source_runner(
    archive: Path, states: Sequence[StateTensor], engine: EngineOptions | None = None
) -> Iterator[SourceRunner]:
    """Yield a decoder ready to be asked, and stop its engine after the block.

    Args:
        archive: of the decoder.
        states: that it is fed back.
        engine: which one; None takes the pip-installed one.
    """
    chosen = chosen_engine(engine)
    if isinstance(chosen, TractCli):
        yield CliSourceRunner(chosen, archive, states)
        return
    with WheelRunner(archive, chosen) as runner:
        yield runner


__all__ = ["EncoderArchive", "SourceRunner", "open_encoder", "open_source_runner"]
