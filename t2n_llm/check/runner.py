"""An exported archive asked in the terms of a language model: turns of tokens in, logits out, on either engine."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from generic_export.errors import EngineLoadError
from generic_export.inference_target.tract.engines.cli import CommandOptions, TractCli, write_bundle
from generic_export.inference_target.tract.engines.engine import EngineSession, IoFact
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel, WheelSession
from kvcache.states.tensors import StateTensor, is_window_symbol
from t2n_llm.check.engines import chosen_engine
from t2n_llm.check.options import EngineOptions
from t2n_llm.reporter import Steps, no_steps

# `--llm` of the command line and tract's own causal_llm example apply this transform
# (docs/contributing/engine-facts.md#installing-and-options, docs/contributing/engine-facts.md#the-causal_llm-example).
STATEFUL_TRANSFORM = "transformers_detect_all"
BIND_BATCH = '{"name":"set_symbols","values":{"B":1}}'
_NUMPY_DTYPES = {"f16": np.float16, "f32": np.float32, "i64": np.int64, "bool": np.bool_}

Turn = Sequence[int]
"""The new tokens of one call."""


class Runner(Protocol):
    """One archive in one engine."""

    @property
    def engine_name(self) -> str: ...

    @property
    def engine_version(self) -> str: ...

    def run_turns(self, turns: Sequence[Turn], *, stateful: bool) -> list[np.ndarray]:
        """Run turns one after another, each seeing the ones before.

        Args:
            turns: new tokens of each call.
            stateful: False feeds the state outputs back as inputs; True lets the engine keep keys and values as its own
                state, and feeds back states of fixed size and windows only.

        Returns:
            Per turn, the kept logits [kept, vocab].
        """


class WheelRunner:
    """The pip-installed engine in a worker process; a context manager."""

    def __init__(self, archive: Path, engine: TractWheel | None = None, tell: Steps = no_steps) -> None:
        self._archive, self._tell = archive, tell
        self._engine = engine or TractWheel()
        self._models: dict[bool, WheelModel] = {}
        self._told: Mapping[str, np.ndarray] = {}

    @property
    def inputs(self) -> tuple[IoFact, ...]:
        """The inputs where the engine keeps what grows: `input_ids`, what is told, states of fixed size."""
        return self._loaded(stateful=True).inputs

    def about(self, told: Mapping[str, np.ndarray]) -> WheelRunner:
        """Return a runner of the same loaded archive whose turns are all told the same of some inputs.

        Args:
            told: by name; f32 for an input that is f16 is converted.
        """
        other = copy.copy(self)
        other._told = told
        return other

    @property
    def engine_name(self) -> str:
        """Name of the engine."""
        return self._engine.name

    @property
    def engine_version(self) -> str:
        """Version of the engine."""
        return self._engine.version

    def __enter__(self) -> WheelRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for model in self._models.values():
            model.close()
        self._models.clear()

    def run_turns(self, turns: Sequence[Turn], *, stateful: bool) -> list[np.ndarray]:
        """See `Runner.run_turns`."""
        if stateful:
            return self._answers(self.open_session(), turns)
        model = self._loaded(stateful=False)
        # A session, since an archive may have the engine keep its caches without any transform.
        session = self._fed(model)
        rows = self._answers(session, turns)
        session.close()
        return rows

    def _answers(self, session: EngineSession, turns: Sequence[Turn]) -> list[np.ndarray]:
        rows = []
        for done, turn in enumerate(turns):
            self._tell(done, len(turns))
            rows.append(session.run([_ids(turn)])[0][0])
        return rows

    def open_session(self) -> EngineSession:
        """Return a fresh session: `input_ids` in, logits out; keys and values are the engine's, fixed states are fed back.

        Raises:
            EngineLoadError: after the engine's own detection the archive still has inputs that grow.
        """
        model = self._loaded(stateful=True)
        left = [fact.name for fact in self._states_of(model) if grows(fact)]
        if left:
            raise EngineLoadError(
                f"{self._archive}: after {STATEFUL_TRANSFORM} the archive still has inputs {', '.join(left[:3])}.",
                "Its caches are not in the form that tract recognises (docs/contributing/engine-facts.md#cache-detection).",
            )
        return self._fed(model)

    def open_explicit(self) -> tuple[EngineSession, list[np.ndarray]]:
        """Return a session whose turns are given the states after `input_ids`, and give them back after the logits; and the
        states before any token. Whoever follows several texts at a time keeps the states of each.

        Raises:
            EngineLoadError: the archive has the engine keep its cache.
        """
        model = self._loaded(stateful=False)
        session = model.spawn_state()
        if self._told:
            session.hold(self._known(model))
        states = [empty_input(fact) for fact in self._states_of(model)]
        if not states:
            raise EngineLoadError(
                f"{self._archive}: the engine keeps the cache of this archive, for one text.",
                "Export without --stateful.",
            )
        return session, states

    def open_rewindable(self) -> RewindableSession:
        """Return a session that can forget the last tokens again: `input_ids` in, logits out, the caches stay in the worker.

        Raises:
            EngineLoadError: the archive has the engine keep its cache, or states that do not grow with the tokens.
        """
        model = self._loaded(stateful=False)
        states = self._states_of(model)
        if not states:
            raise EngineLoadError(
                f"{self._archive}: the engine keeps the cache of this archive, and forgets none of it.",
                "Export without --stateful and --kv-cache.",
            )
        fixed = [fact for fact in states if not grows(fact)]
        if fixed:
            raise EngineLoadError(
                f"{self._archive}: state {fixed[0]} has no place for each token, so that no token can be taken back.",
                "Use a model without recurrent layers, exported without --window-cache.",
            )
        session = model.spawn_state()
        session.feed_back([empty_input(fact) for fact in states])
        return RewindableSession(session, [_growing_axis(fact) for fact in states])

    def _known(self, model: WheelModel) -> dict[str, np.ndarray]:
        return {fact.name: as_fact(fact, self._told[fact.name]) for fact in model.inputs if fact.name in self._told}

    def _states_of(self, model: WheelModel) -> list[IoFact]:
        return [fact for fact in model.inputs[1:] if fact.name not in self._told]

    def _fed(self, model: WheelModel) -> EngineSession:
        session = model.spawn_state()
        if self._told:
            session.hold(self._known(model))
        states = [empty_input(fact) for fact in self._states_of(model)]
        return _FeedingSession(session, states) if states else session

    def _loaded(self, *, stateful: bool) -> WheelModel:
        known = self._models.get(stateful)
        if known is None or not known.alive:  # who asks again after a crash gets a new engine
            transforms = [STATEFUL_TRANSFORM] if stateful else []
            model = self._engine.load(self._archive, transforms=transforms)
            if stateful and any("B" in fact.shape for fact in model.inputs):
                # docs/contributing/engine-facts.md#setting-symbols-of-stateful-caches: the batch must be bound
                # before the caches become state.
                model.close()
                model = self._engine.load(self._archive, transforms=[BIND_BATCH, *transforms])
            self._models[stateful] = model
        return self._models[stateful]


class _FeedingSession:
    """A session that hands the states that no transform makes the engine's own (fixed sizes, windows) to the next turn itself."""

    def __init__(self, session: EngineSession, states: list[np.ndarray]) -> None:
        self._session = session
        self._states = states

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `EngineSession.run`: `input_ids` in, logits out."""
        logits, *self._states = self._session.run([*inputs, *self._states])
        return [logits]

    def close(self) -> None:
        """See `EngineSession.close`."""
        self._session.close()


class RewindableSession:
    """A session whose caches lie in the worker as tensors, and are cut where tokens are taken back."""

    def __init__(self, session: WheelSession, axes: Sequence[int]) -> None:
        self._session, self._axes = session, axes

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `EngineSession.run`: `input_ids` in, logits out."""
        return self._session.run(inputs)

    def keep(self, tokens: int) -> None:
        """Forget all tokens but the first ones, so many."""
        self._session.cut(self._axes, tokens)

    def close(self) -> None:
        """See `EngineSession.close`."""
        self._session.close()


class CliRunner:
    """The `tract` command; each `run_turns` is one run of it on a bundle of turns, or a run a turn.

    The command feeds keys and values from turn to turn, but no states of fixed size and no windows; its `--llm` refuses archives
    that have any.
    """

    def __init__(self, archive: Path, states: Sequence[StateTensor], dtype: str, cli: TractCli) -> None:
        """Describe the archive.

        Args:
            archive: folder or file.
            states: of its graph.
            dtype: `f16` archives need float casts, since npz files hold no f16.
            cli: the command.
        """
        self._archive = archive
        self._states = states
        self._casts = dtype == "f16"
        self._cli = cli

    @property
    def engine_name(self) -> str:
        """Name of the engine."""
        return self._cli.name

    @property
    def engine_version(self) -> str:
        """Version of the engine."""
        return self._cli.version

    def run_turns(self, turns: Sequence[Turn], *, stateful: bool) -> list[np.ndarray]:
        """See `Runner.run_turns`."""
        empty = {state.input_name: state.at_start(1) for state in self._states}
        if all(state.grows for state in self._states):
            return self._run([{"input_ids": _ids(turn)} for turn in turns], {} if stateful else empty)[0]
        rows, states = [], empty
        for turn in turns:
            (logits,), outputs = self._run([{"input_ids": _ids(turn)}], states, llm=False)
            rows.append(logits)
            states = {state.input_name: outputs[state.output_name] for state in self._states}
        return rows

    def _run(
        self, entries: list[dict[str, Any]], states: dict[str, np.ndarray], *, llm: bool = True
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run turns in one go, and return each one's logits and all outputs."""
        entries[0] |= states
        with tempfile.TemporaryDirectory(prefix="t2n-llm-turns-") as folder:
            bundle = Path(folder) / "turns.npz"
            write_bundle(bundle, entries, {})
            outputs = self._cli.run_bundle(
                self._archive,
                bundle,
                CommandOptions(llm=llm, unfold_kv_cache=llm and bool(states), allow_float_casts=self._casts),
            )
        prefixes = [f"turn_{index}/" if len(entries) > 1 else "" for index in range(len(entries))]
        return [outputs[f"{prefix}outputs"][0] for prefix in prefixes], outputs


@contextmanager
def open_runner(
    archive: Path,
    states: Sequence[StateTensor],
    dtype: str,
    engine: EngineOptions | None = None,
    *,
    tell: Steps = no_steps,
) -> Iterator[Runner]:
    """Yield a runner of an archive, and stop its engine after the block.

    Args:
        archive: folder or file.
        states: the graph's.
        dtype: `f32` or `f16`, of the archive.
        engine: which one; None takes the pip-installed one, in a worker process.
        tell: receives how many turns of a check are done; the command runs them in one go.

    Raises:
        EngineMissingError: it is not installed.
    """
    chosen = chosen_engine(engine)
    if isinstance(chosen, TractCli):
        yield CliRunner(archive, states, dtype, chosen)
        return
    with WheelRunner(archive, chosen, tell) as runner:
        yield runner


def _ids(turn: Turn) -> np.ndarray:
    return np.array([list(turn)], np.int64)


def empty_input(fact: IoFact) -> np.ndarray:
    """Return a state with no past, zeros of the input's shape and element type."""
    return np.zeros(empty_shape(fact.shape), _NUMPY_DTYPES[fact.datum_type])


def as_fact(fact: IoFact, array: np.ndarray) -> np.ndarray:
    """Return floats in the element type that an input has; nothing else is ever converted."""
    return array.astype(_NUMPY_DTYPES[fact.datum_type]) if array.dtype == np.float32 else array


def grows(fact: IoFact) -> bool:
    """Say whether a state is longer after a turn: it has a size that is neither fixed, nor the batch, nor a window."""
    return any(not dim.isdigit() and dim != "B" and not is_window_symbol(dim) for dim in fact.shape)


def _growing_axis(fact: IoFact) -> int:
    return next(axis for axis, dim in enumerate(fact.shape) if not dim.isdigit() and dim != "B")


def empty_shape(shape: Sequence[str]) -> tuple[int, ...]:
    """Return the shape of a cache with no past: one sequence for `B`, nothing along any other symbol."""
    return tuple(int(dim) if dim.isdigit() else {"B": 1}.get(dim, 0) for dim in shape)


__all__ = [
    "CliRunner",
    "RewindableSession",
    "Runner",
    "Turn",
    "WheelRunner",
    "empty_input",
    "empty_shape",
    "grows",
    "open_runner",
]
