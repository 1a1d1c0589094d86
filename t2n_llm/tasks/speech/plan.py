"""How the archives of a speech model connect, as data: what `export.json` records of them, and what a caller has to draw.

In: the record, or what a family says. Out: a `SpeechPlan`. `arrays` makes the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TEXT, STEP, CODE, SPECTROGRAM, WAVEFORM = "text", "step", "code", "spectrogram", "waveform"
"""Roles of the archives, in the order in which they run."""

VOICE, RECORDING = "voice", "recording"
"""The archive that makes vectors of a voice, and what it takes: f32 [1, V, frame]."""

IDS, ROWS, DURATIONS, FRAMES = "input_ids", "rows", "durations", "frames"
"""Tensors between them: ids i64 [1, S], rows [1, S, D] of the text with a duration [1, S] each, frames [1, F, D]."""

FRAME, STOP = "frame", "stop"
"""Of a step: the last frame [1, 1, D] before it (at first what the text's archive says, or zeros), and how sure it is [1] that its
frames are the last: a probability, or a logit."""

CODES, LOGITS = "codes", "logits"
"""Frames of codes i64 [1, F, K], and what one of them is chosen of [1, V]; `CODE` is also the code i64 [1, 1] that is read."""

STATE = "in_cache_"
"""How the names of a step's inputs begin that are states."""

TOKENS, LENGTH, VOICE_LENGTH = "S", "F", "V"
"""Symbols: tokens of the text, frames, and vectors of a voice."""

NORMAL, KEPT = "normal", "kept"
"""Distributions of noise."""

UP, NEAREST = "up", "nearest"
"""How durations are rounded."""


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


@dataclass(frozen=True)
class Speaker:
    """The input that says whose voice it is.

    Attributes:
        input: its name.
        count: how many speakers there are, where they are numbers, i64 [1]; else None.
        width: of a vector f32 [1, width]; None for numbers.
        rows: whether a voice is any number of such vectors, f32 [1, V, width].
        frame: samples of a recording that become one of them; None where no archive makes them.
    """

    input: str
    count: int | None = None
    width: int | None = None
    rows: bool = False
    frame: int | None = None


@dataclass(frozen=True)
class Durations:
    """How durations become whole numbers of frames.

    Attributes:
        rounding: `up`, after the multiplication; or `nearest`, before it and after it, halves to even.
        scale: they are multiplied with.
    """

    rounding: str
    scale: float = 1.0


@dataclass(frozen=True)
class Steps:
    """How frames are made one step after another.

    Attributes:
        width: of a frame.
        threshold: the least `stop` that ends the loop.
        most_per_token: steps of a text, at most, for each of its tokens.
        most_steps: of any text.
        most_beyond: steps that a text may have beside those of its tokens.
        least: first steps whose `stop` ends nothing.
        after: steps that follow the one that ends the loop.
        after_short: the same for texts of at most `short_words` words.
        short_words: see `after_short`.
    """

    width: int
    threshold: float
    most_per_token: float
    most_steps: int
    most_beyond: int = 0
    least: int = 0
    after: int = 0
    after_short: int = 0
    short_words: int = 0

    def most(self, tokens: int) -> int:
        """Return the most steps of a text."""
        return max(1, min(int(tokens * self.most_per_token) + self.most_beyond, self.most_steps))

    def count(self, stops: Sequence[float], tokens: int, words: int | None = None) -> int:
        """Return how many steps a text has, as far as its steps say: the most there may be where none has ended it.

        Args:
            stops: `stop` of the steps so far.
            tokens: of the text.
            words: of the text; None for many.
        """
        ends = (step for step, stop in enumerate(stops) if step >= self.least and stop >= self.threshold)
        most = self.most(tokens)
        return min(next(ends, most) + 1 + self.frames_after(words), most)

    def frames_after(self, words: int | None = None) -> int:
        """Return how many steps follow the one that ends the loop, for a text of so many words; None for many."""
        return self.after_short if words is not None and words <= self.short_words else self.after


@dataclass(frozen=True)
class Codes:
    """How frames of codes are made: the first code of each after the frame before, the others one after another.

    Attributes:
        count: codes of a frame.
        end: the code that all but the last of a frame are which ends the speech.
        most_steps: frames of a text, at most.
        first: how the first code is chosen, by transformers' names (`do_sample`, `temperature`, `top_k`, ...).
        others: how the others are.
    """

    count: int
    end: int
    most_steps: int
    first: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """How a text is written before it becomes tokens: as a message of the tokenizer's chat template.

    Attributes:
        role: of the message.
        numbered: whether the role is the number of a speaker.
        left_out: tokens of the template that are no text.
    """

    role: str
    numbered: bool = False
    left_out: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SpeechPlan:
    """How the archives connect.

    Attributes:
        sampling_rate: samples a second.
        noise: random inputs, by name.
        speaker: None where there is one voice.
        durations: how rows are repeated; None where frames or codes are made step by step.
        steps: how; None where rows are repeated, or frames are codes.
        most_tokens: that a text may have; None for any number.
        most_frames: the same of frames.
        template: how a text is written; None where its tokens are all there is.
        codes: how frames of codes are made; None where frames are no codes.
    """

    sampling_rate: int
    noise: dict[str, Noise] = field(default_factory=dict)
    speaker: Speaker | None = None
    durations: Durations | None = None
    steps: Steps | None = None
    most_tokens: int | None = None
    most_frames: int | None = None
    template: Template | None = None
    codes: Codes | None = None

    def recorded(self) -> dict[str, Any]:
        """Return the entry of `export.json`."""
        return asdict(self)

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> SpeechPlan:
        """Read the entry of an `export.json`, whose form was checked."""
        speaker, durations, steps = (record.get(name) for name in ("speaker", "durations", "steps"))
        template, codes = record.get("template"), record.get("codes")
        return SpeechPlan(
            sampling_rate=record["sampling_rate"],
            noise={name: Noise(**each) for name, each in record.get("noise", {}).items()},
            speaker=Speaker(**speaker) if speaker is not None else None,
            durations=Durations(**durations) if durations is not None else None,
            steps=Steps(**steps) if steps is not None else None,
            most_tokens=record.get("most_tokens"),
            most_frames=record.get("most_frames"),
            template=Template(**template) if template is not None else None,
            codes=Codes(**codes) if codes is not None else None,
        )
