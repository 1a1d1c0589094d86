"""The values that a speech plan asks for: noise of a seed, frames of durations, the inputs of an archive.

In: a `SpeechPlan` and arrays. Out: arrays; the check and `t2n-llm generate` make the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from t2n_llm.tasks.speech.plan import NORMAL, UP, Durations, Noise, SpeechPlan

_ROWS, _LOUDNESS = 5, 4.0  # of a voice, in checks


class Draws:
    """Random numbers, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = np.random.default_rng(seed)

    def normal(self, sizes: tuple[int, ...]) -> np.ndarray:
        """Return f32 values of a standard normal distribution."""
        return self._generator.standard_normal(sizes).astype(np.float32)

    def kept(self, sizes: tuple[int, ...], share: float) -> np.ndarray:
        """Return f32 values, 1 with the probability `share`, else 0."""
        return (self._generator.random(sizes) < share).astype(np.float32)


def drawn(noise: Noise, draws: Draws, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the values f32 of a random input.

    Args:
        noise: the input.
        draws: where they come from.
        sizes: of the symbols.
    """
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in noise.shape)
    values = draws.normal(shape) if noise.distribution == NORMAL else draws.kept(shape, noise.share)
    return values * np.float32(noise.scale)


def typical_speaker(plan: SpeechPlan) -> np.ndarray | None:
    """Return the speaker of a check: the last one, or a vector of random numbers; None where there is one voice."""
    speaker = plan.speaker
    if speaker is None:
        return None
    if speaker.width is None:
        return np.array([(speaker.count or 1) - 1], np.int64)
    return Draws(0).normal((1, *((_ROWS,) if speaker.rows else ()), speaker.width))


def typical_recording(plan: SpeechPlan, seed: int) -> np.ndarray | None:
    """Return the recording of a check, f32 [1, V, frame]; None where no archive takes one."""
    frame = plan.speaker.frame if plan.speaker is not None else None
    return None if frame is None else Draws(seed).normal((1, _ROWS + seed, frame)) / np.float32(_LOUDNESS)


def frames_of_tokens(rule: Durations, durations: np.ndarray) -> np.ndarray:
    """Return the frames of each token, i64 [S]; of a text without any, one for each.

    Args:
        rule: how they are rounded.
        durations: f32 [S], as the text's archive gives them.
    """
    scale = np.float32(rule.scale)
    if rule.rounding == UP:
        frames = np.ceil(durations * scale)
    else:
        frames = np.round(np.maximum(np.round(durations), 0.0) * scale)
    counts: np.ndarray = frames.astype(np.int64)
    return counts if counts.any() else np.ones_like(counts)


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
    noise = {name: drawn(plan.noise[name], draws, sizes) for name in names if name in plan.noise}
    return {**known, **voice, **noise}
