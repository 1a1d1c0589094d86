"""How the archives of a speech model connect, as data: what `export.json` records of them, and what a caller has to draw.

In: a transformers config, or the record. Out: a `SpeechPlan`. Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

TEXT, STEP, SPECTROGRAM, WAVEFORM = "text", "step", "spectrogram", "waveform"
"""Roles of the archives, in the order in which they run."""

IDS, ROWS, DURATIONS, FRAMES = "input_ids", "rows", "durations", "frames"
"""Tensors between them: ids i64 [1, S], rows [1, S, D] of the text with a duration [1, S] each, frames [1, F, D]."""

FRAME, STOP = "frame", "stop"
"""Of a step: the last frame [1, 1, D] before it, zeros at first, and the probability [1] that its frames are the last."""

TOKENS, LENGTH = "S", "F"
"""Symbols: tokens of the text, and frames."""

NORMAL, KEPT = "normal", "kept"
_UP = "up"


class Draws:
    """Random numbers, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, sizes: tuple[int, ...]) -> np.ndarray:
        """Return f32 values of a standard normal distribution."""
        return self._generator.standard_normal(sizes).astype(np.float32)

    def kept(self, sizes: tuple[int, ...], share: float) -> np.ndarray:
        """Return f32 values, 1 with the probability `share`, else 0."""
        return (self._generator.random(sizes) < share).astype(np.float32)


@dataclass(frozen=True)
class Noise:
    """A random input of an archive.

    Attributes:
        shape: sizes and symbols.
        scale: the values are multiplied with.
        distribution: `normal` (standard), or `kept` (1 with the probability `share`, else 0).
        share: see `distribution`.
    """

    shape: list[int | str]
    scale: float
    distribution: str = NORMAL
    share: float = 1.0

    def drawn(self, draws: Draws, sizes: Mapping[str, int]) -> np.ndarray:
        """Return values f32.

        Args:
            draws: where they come from.
            sizes: of the symbols.
        """
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)
        values = draws.normal(shape) if self.distribution == NORMAL else draws.kept(shape, self.share)
        return values * np.float32(self.scale)


@dataclass(frozen=True)
class Speaker:
    """The input that says whose voice it is.

    Attributes:
        input: its name.
        count: how many speakers there are, where they are numbers, i64 [1]; else None.
        width: of a vector f32 [1, width]; None for numbers.
    """

    input: str
    count: int | None = None
    width: int | None = None

    def typical(self, draws: Draws) -> np.ndarray:
        """Return a speaker for a check: the last one, or a vector of random numbers."""
        return np.array([(self.count or 1) - 1], np.int64) if self.width is None else draws.normal((1, self.width))


@dataclass(frozen=True)
class Durations:
    """How durations become whole numbers of frames.

    Attributes:
        rounding: `up`, after the multiplication; or `nearest`, before it and after it, halves to even.
        scale: they are multiplied with.
    """

    rounding: str
    scale: float = 1.0

    def whole(self, durations: np.ndarray) -> np.ndarray:
        """Return frames of each token, i64 [S].

        Args:
            durations: f32 [S], as the text's archive gives them.
        """
        scale = np.float32(self.scale)
        if self.rounding == _UP:
            frames = np.ceil(durations * scale)
        else:
            frames = np.round(np.maximum(np.round(durations), 0.0) * scale)
        counts: np.ndarray = frames.astype(np.int64)
        return counts if counts.any() else np.ones_like(counts)


@dataclass(frozen=True)
class Steps:
    """How frames are made one step after another.

    Attributes:
        width: of a frame.
        threshold: the least probability that ends the loop.
        most_per_token: steps of a text, at most, for each of its tokens.
        most_steps: of any text.
    """

    width: int
    threshold: float
    most_per_token: float
    most_steps: int

    def most(self, tokens: int) -> int:
        """Return the most steps of a text."""
        return max(1, min(int(tokens * self.most_per_token), self.most_steps))


@dataclass(frozen=True)
class SpeechPlan:
    """How the archives connect.

    Attributes:
        sampling_rate: samples a second.
        noise: random inputs, by name.
        speaker: None where there is one voice.
        durations: how rows are repeated; None where frames are made step by step.
        steps: how; None where rows are repeated.
        most_tokens: that a text may have; None for any number.
        most_frames: the same of frames.
    """

    sampling_rate: int
    noise: dict[str, Noise] = field(default_factory=dict)
    speaker: Speaker | None = None
    durations: Durations | None = None
    steps: Steps | None = None
    most_tokens: int | None = None
    most_frames: int | None = None

    def recorded(self) -> dict[str, Any]:
        """Return the entry of `export.json`."""
        return asdict(self)

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> SpeechPlan:
        """Read the entry of an `export.json`, whose form was checked."""
        speaker, durations, steps = (record.get(name) for name in ("speaker", "durations", "steps"))
        return SpeechPlan(
            sampling_rate=record["sampling_rate"],
            noise={name: Noise(**each) for name, each in record.get("noise", {}).items()},
            speaker=Speaker(**speaker) if speaker is not None else None,
            durations=Durations(**durations) if durations is not None else None,
            steps=Steps(**steps) if steps is not None else None,
            most_tokens=record.get("most_tokens"),
            most_frames=record.get("most_frames"),
        )


def repeated(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return frames [1, F, D]: each of the rows [1, S, D] as often as its count i64 [S] says."""
    return np.repeat(rows, counts, axis=1)


def given_to(
    names: Sequence[str],
    plan: SpeechPlan,
    known: Mapping[str, np.ndarray],
    speaker: np.ndarray | None,
    draws: Draws,
    sizes: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Return the inputs of a part by name: what is known, the speaker, and noise, which is drawn in the order of the inputs.

    Args:
        names: of the inputs.
        plan: says which of them are noise, and which is the speaker.
        known, speaker: what is there.
        draws, sizes: of the noise, and of its symbols.
    """
    voice = {plan.speaker.input: speaker} if plan.speaker is not None and speaker is not None else {}
    noise = {name: plan.noise[name].drawn(draws, sizes) for name in names if name in plan.noise}
    return {**known, **voice, **noise}
