"""A decode program of `transformers.exporters` asked like a language model of ours: new tokens in, logits out.

Its inputs are those of the model's forward: tokens, positions, perhaps a mask, and the tensors of a cache, which the engine's
process keeps between turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from generic_export.errors import EngineLoadError
from generic_export.inference_target.tract.engines.engine import Array, IoFact
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel, WheelSession

CACHES = ("cache_", "past_key_values_")
_IDS, _POSITIONS, _MASK = "input_ids", "position_ids", "attention_mask"


def is_cache(name: str) -> bool:
    """Say whether an input is a tensor of a cache."""
    return name.startswith(CACHES)


class DecodeProgram:
    """One program, loaded; a context manager."""

    def __init__(self, archive: Path, engine: TractWheel | None = None) -> None:
        """Load a program.

        Raises:
            EngineLoadError: tract does not load it, or it cannot begin with an empty cache.
        """
        self._model = (engine or TractWheel()).load(archive)
        try:
            _check_inputs(archive, self._model.inputs)
        except EngineLoadError:
            self._model.close()
            raise

    def open_session(self) -> DecodeSession:
        """Return a session with an empty cache."""
        return DecodeSession(self._model)

    def __enter__(self) -> DecodeProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.close()


class DecodeSession:
    """Turns of tokens, each after the ones before; the cache stays in the engine's process."""

    def __init__(self, model: WheelModel) -> None:
        self._inputs = [fact for fact in model.inputs if not is_cache(fact.name)]
        self._session: WheelSession = model.spawn_state()
        self._session.feed_back([_empty(fact) for fact in model.inputs if is_cache(fact.name)])
        self._past = 0

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run new tokens, int64 [1, S]; returns logits [1, S, vocab]."""
        (ids,) = inputs
        end = self._past + ids.shape[1]
        known = {
            _IDS: ids,
            _POSITIONS: np.arange(self._past, end, dtype=np.int64)[None],
            _MASK: np.ones((1, end), np.int64),
        }
        self._past = end
        return self._session.run([known[fact.name] for fact in self._inputs])[:1]

    def close(self) -> None:
        """Free the state. Closing twice is harmless."""
        self._session.close()


def _check_inputs(archive: Path, facts: Sequence[IoFact]) -> None:
    """Refuse a program that is called in another way.

    Raises:
        EngineLoadError: says what it would need.
    """
    caches = [fact for fact in facts if is_cache(fact.name)]
    others = [fact for fact in facts if not is_cache(fact.name)]
    unknown = [fact for fact in others if fact.name not in (_IDS, _POSITIONS, _MASK)]
    ranks = [fact for fact in others if len(fact.shape) != 2]
    fixed = [fact for fact in caches if len(fact.shape) != 4 or fact.shape[2].isdecimal()]
    hint = "Export it with export_for_generation, TractConfig(dynamic=True) and multi_token_decode=True."
    if not caches or list(facts[-len(caches) :]) != caches:
        raise EngineLoadError(f"{archive}: the last inputs of the program are not a cache.", hint)
    for fact in (*unknown, *ranks, *fixed):
        raise EngineLoadError(f"{archive}: generation cannot provide an input of the program: {fact}.", hint)


def _empty(fact: IoFact) -> Array:
    shape = tuple(int(size) if size.isdecimal() else 1 for size in fact.shape)
    return np.zeros((*shape[:2], 0, shape[3]), np.float16 if fact.datum_type == "f16" else np.float32)


__all__ = ["CACHES", "DecodeProgram", "DecodeSession", "is_cache"]
