"""An exported archive asked in the terms of a language model: turns of tokens in, logits out, on either engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from generic_export.errors import EngineLoadError, OptionError
from generic_export.inference_target.tract.cli import TractCli, write_bundle
from generic_export.inference_target.tract.engine import Session
from generic_export.inference_target.tract.wheel import TractWheel, WheelModel
from kvcache.cache import CacheTensor

# `--llm` of the command line and of tract's own causal_llm example apply this transform (facts/tract.md §4.4, §4.5).
STATEFUL_TRANSFORM = "transformers_detect_all"
BIND_BATCH = '{"name":"set_symbols","values":{"B":1}}'
_NUMPY_DTYPES = {"f16": np.float16, "f32": np.float32}

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
            stateful: False feeds the cache outputs back as inputs; True lets the engine keep them as its state,
                so that `input_ids` is the only input.

        Returns:
            Per turn, the kept logits [kept, vocab].
        """


class WheelRunner:
    """The pip-installed engine in a worker process; a context manager."""

    def __init__(self, archive: Path, engine: TractWheel | None = None) -> None:
        self._archive = archive
        self._engine = engine or TractWheel()
        self._models: dict[bool, WheelModel] = {}

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
            session = self.open_session()
            return [session.run([_ids(turn)])[0][0] for turn in turns]
        model = self._loaded(stateful=False)
        caches = [np.zeros(empty_shape(fact.shape), _NUMPY_DTYPES[fact.datum_type]) for fact in model.inputs[1:]]
        rows = []
        for turn in turns:
            logits, *caches = model.run([_ids(turn), *caches])
            rows.append(logits[0])
        return rows

    def open_session(self) -> Session:
        """Return a fresh stateful session: `input_ids` in, logits out.

        Raises:
            EngineLoadError: after the engine's own detection the archive still has cache inputs.
        """
        model = self._loaded(stateful=True)
        left = [fact.name for fact in model.inputs[1:]]
        if left:
            raise EngineLoadError(
                f"{self._archive}: after {STATEFUL_TRANSFORM} the archive still has inputs {', '.join(left[:3])}.",
                "Its caches are not in the form that tract recognises (facts/tract.md §4.2).",
            )
        return model.spawn_state()

    def _loaded(self, *, stateful: bool) -> WheelModel:
        if stateful not in self._models:
            transforms = [STATEFUL_TRANSFORM] if stateful else []
            model = self._engine.load(self._archive, transforms=transforms)
            if stateful and any("B" in fact.shape for fact in model.inputs):
                # facts/tract.md §4.6: the batch must be bound before the caches become state.
                model.close()
                model = self._engine.load(self._archive, transforms=[BIND_BATCH, *transforms])
            self._models[stateful] = model
        return self._models[stateful]


class CliRunner:
    """The `tract` command; each `run_turns` is one run of it on a bundle of turns."""

    def __init__(self, archive: Path, caches: Mapping[str, tuple[int, ...]], dtype: str, cli: TractCli) -> None:
        """Describe the archive.

        Args:
            archive: folder or file.
            caches: shape of each empty cache input, by name.
            dtype: `f16` archives need float casts, since npz files hold no f16.
            cli: the command.
        """
        self._archive = archive
        self._caches = caches
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
        empty = {} if stateful else {name: np.zeros(shape, np.float32) for name, shape in self._caches.items()}
        entries: list[dict[str, Any]] = [{"input_ids": _ids(turn)} for turn in turns]
        entries[0] |= empty
        with tempfile.TemporaryDirectory(prefix="t2n-llm-turns-") as folder:
            bundle = Path(folder) / "turns.npz"
            write_bundle(bundle, entries, {})
            outputs = self._cli.run_bundle(
                self._archive, bundle, unfold_kv_cache=not stateful, allow_float_casts=self._casts
            )
        prefixes = [f"turn_{index}/" if len(turns) > 1 else "" for index in range(len(turns))]
        return [outputs[f"{prefix}outputs"][0] for prefix in prefixes]


ENGINES = ("wheel", "cli", "auto")


@contextmanager
def open_runner(
    archive: Path, caches: Sequence[CacheTensor], dtype: str, *, engine: str = "wheel", tract_binary: Path | None = None
) -> Iterator[Runner]:
    """Yield a runner of an archive, and stop its engine after the block.

    Args:
        archive: folder or file.
        caches: the graph's states.
        dtype: `f32` or `f16`, of the archive.
        engine: `wheel` (pip-installed, in a worker process), `cli` (the `tract` command), or `auto`: the first of them that
            is installed.
        tract_binary: the command to use; implies `cli`.

    Raises:
        OptionError: the engine is unknown.
        EngineMissingError: it is not installed.
    """
    if engine not in ENGINES:
        raise OptionError(f"engine {engine!r} is unknown.", f"Use one of {', '.join(ENGINES)}.")
    if engine == "auto":
        engine = "wheel" if find_spec("tract") is not None else "cli"
    if engine == "cli" or tract_binary is not None:
        empty = {cache.input_name: cache.shape(1, 0) for cache in caches}
        yield CliRunner(archive, empty, dtype, TractCli(tract_binary))
        return
    with WheelRunner(archive) as runner:
        yield runner


def _ids(turn: Turn) -> np.ndarray:
    return np.array([list(turn)], np.int64)


def empty_shape(shape: Sequence[str]) -> tuple[int, ...]:
    """Return the shape of a cache with no past: one sequence for `B`, nothing along any other symbol."""
    return tuple(int(dim) if dim.isdigit() else {"B": 1}.get(dim, 0) for dim in shape)


__all__ = ["ENGINES", "CliRunner", "Runner", "Turn", "WheelRunner", "empty_shape", "open_runner"]
