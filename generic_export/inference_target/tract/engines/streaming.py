"""An archive run on an endless input, piece by piece: tract's `pulse` transform in the wheel.

In: an archive with a symbolic axis, and how much of it comes at a time. Out: a model whose sessions take one piece a turn and
remember what they need of the earlier ones; how late each output is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from generic_export.errors import EngineLoadError, OptionError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.engine import Array
from generic_export.inference_target.tract.engines.features import DEFAULT_REGISTRIES
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel, WheelSession

_REFUSED = "tract refused the load: "  # true of a load, but here it is loaded already
FIRST_RELEASE = "0.23.0"
"""The first wheel that has transforms."""


@dataclass(frozen=True)
class Streaming:
    """How a streamed input arrives: `pulse` steps at a time, along the axis with the size `symbol`.

    Attributes:
        symbol: symbol of the streamed axis, one of the dynamic axes.
        pulse: steps per call. It must be a multiple of the model's total stride.

    Raises:
        OptionError: `pulse` is not a positive integer.
    """

    symbol: str
    pulse: int

    def __post_init__(self) -> None:
        if not isinstance(self.pulse, int) or isinstance(self.pulse, bool) or self.pulse < 1:
            raise OptionError(f"pulse is {self.pulse!r}.", "Give the number of steps in a piece, 1 or more.")

    def __str__(self) -> str:
        return f"pulses of {self.pulse} along {self.symbol}"

    @property
    def transform(self) -> str:
        """Name and arguments of tract's pulse transform."""
        return json.dumps({"name": "pulse", "pulse": str(self.pulse), "symbol": self.symbol})


@dataclass(frozen=True)
class Streamed:
    """What became of one output.

    Attributes:
        values: the frames that are known by the end of the last piece, delay taken off.
        axis: of the frames; -1 for an output that has none, which is the last turn's.
        delay: how many frames the output lags behind: so many leading ones mean nothing.
    """

    values: Array
    axis: int
    delay: int


class StreamModel:
    """An archive in pulses; use it in a `with` block, or call `close`.

    Attributes:
        input_axes: for each input, the axis that comes in pieces; -1 for one that is given whole each turn.
        output_axes: for each output, the axis of its frames, or -1.
        delays: for each output, how many frames it lags behind.
    """

    def __init__(self, model: WheelModel, streaming: Streaming) -> None:
        self._model = model
        self._streaming = streaming
        noted = model.properties()
        self.input_axes, self.output_axes, self.delays = (
            tuple(int(number) for number in np.ravel(noted[f"pulse.{name}"]))
            for name in ("input_axes", "output_axes", "delay")
        )

    def spawn_state(self) -> WheelSession:
        """Start a stream: a session of which each `run` takes the next piece of every input."""
        return self._model.spawn_state()

    def run(self, inputs: Sequence[Array]) -> list[Streamed]:
        """Run whole inputs as a stream of their own, piece by piece; a last piece that is not full is left out.

        Raises:
            OptionError: they are too short for one piece, or for an output to begin.
            EngineRunError, EngineCrashError, EngineTimeoutError: as `WheelModel.run`.
        """
        given = list(zip(inputs, self.input_axes, strict=True))
        pulse = self._streaming.pulse
        pieces = min((array.shape[axis] // pulse for array, axis in given if axis >= 0), default=0)
        session = self.spawn_state()
        turns = [
            session.run([_piece(array, axis, index * pulse, pulse) for array, axis in given]) for index in range(pieces)
        ]
        session.close()
        columns = zip(*turns, strict=True) if turns else [()] * len(self.delays)
        streamed = [
            _joined(column, axis, delay)
            for column, axis, delay in zip(columns, self.output_axes, self.delays, strict=True)
        ]
        for output, fact in zip(streamed, self._model.outputs, strict=True):
            if output.values.size == 0:
                raise OptionError(
                    f"the inputs have {pieces} whole {self._streaming}, and output {fact.name!r} begins {output.delay} "
                    "frames late: nothing of it is known by then.",
                    "Give longer inputs.",
                )
        return streamed

    def close(self) -> None:
        """End the engine's process."""
        self._model.close()

    def __enter__(self) -> StreamModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_stream(
    archive: Path | str,
    streaming: Streaming,
    wheel: TractWheel | None = None,
    registries: Sequence[str] = DEFAULT_REGISTRIES,
) -> StreamModel:
    """Load an archive to run it in pulses.

    Args:
        archive: exported with `TractNNEF(streaming=...)`, so that its loops keep their state.
        streaming: the streamed axis and the number of steps per call.
        wheel: the engine; None for the installed wheel.
        registries: see `TractWheel.load`.

    Raises:
        EngineLoadError: an operator cannot run in pulses; tract's message names the node.
        EngineMissingError: the wheel is not installed.
        EngineCrashError: the process died.
        EngineTimeoutError: loading did not finish in time.
    """
    engine = wheel or TractWheel()
    try:
        model = engine.load(Path(archive), transforms=[streaming.transform], registries=registries)
    except EngineLoadError as error:
        reason = f"{archive}: tract cannot run it in {streaming}: {error.message.rpartition(_REFUSED)[2]}"
        raise EngineLoadError(reason, "docs/how-to/streaming.md says what can be streamed.") from error
    return StreamModel(model, streaming)


def known_by_then(example: ExampleRun, streamed: Sequence[Streamed]) -> ExampleRun:
    """Return an example whose outputs end where those of a stream do."""
    outputs = [
        reference if output.axis < 0 else _piece(reference, output.axis, 0, output.values.shape[output.axis])
        for reference, output in zip(example.outputs, streamed, strict=True)
    ]
    return ExampleRun(example.inputs, outputs, example.output_names)


def _piece(array: Array, axis: int, start: int, length: int) -> Array:
    if axis < 0:
        return array
    return np.ascontiguousarray(array[(slice(None),) * axis + (slice(start, start + length),)])


def _joined(turns: Sequence[Array], axis: int, delay: int) -> Streamed:
    if not turns:
        return Streamed(np.zeros(0), axis, delay)
    if axis < 0:
        return Streamed(turns[-1], axis, 0)
    frames = np.concatenate(turns, axis)
    return Streamed(_piece(frames, axis, delay, frames.shape[axis]), axis, delay)


__all__ = ["FIRST_RELEASE", "StreamModel", "Streamed", "Streaming", "known_by_then", "open_stream"]
