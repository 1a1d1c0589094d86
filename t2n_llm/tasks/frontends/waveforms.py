"""What all front ends of sound share: waveforms in a batch, their lengths, and recordings to check with.

In: transformers' feature extractor. Out: the inputs `waveform` and `lengths`, and their description.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from generic_export.torch_graph.request import DynamicAxes
from t2n_llm.tasks.frontends.kind import FrontEnd, FrontEndCase

WAVEFORM, LENGTHS = "waveform", "lengths"
"""f32 [B, T], one channel, full scale 1; and how many samples of each row are its recording, int64 [B]."""

_HINT_BATCH, _HINT_SAMPLES = 3, 6_007


@dataclass(frozen=True)
class SoundFrontEnd(FrontEnd):
    """Waveforms of any length.

    Attributes:
        extractor: of transformers.
        mask_name: of the output that says where a recording ends, which then `lengths` decide; None where nobody asks.
    """

    extractor: Any
    mask_name: str | None = None

    @property
    def sampling_rate(self) -> int:
        """Samples a second."""
        return int(self.extractor.sampling_rate)

    @property
    def takes_lengths(self) -> bool:
        """Whether the end of each recording is an input."""
        return self.mask_name is not None

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """See `FrontEnd`."""
        return {WAVEFORM: {0: "B", 1: "T"}} | ({LENGTHS: {0: "B"}} if self.takes_lengths else {})

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `FrontEnd`."""
        waveform = torch.zeros(_HINT_BATCH, _HINT_SAMPLES, device="meta")
        lengths = torch.zeros(_HINT_BATCH, dtype=torch.int64, device="meta")
        return {WAVEFORM: waveform} | ({LENGTHS: lengths} if self.takes_lengths else {})

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        inputs = {WAVEFORM: "f32 [B, T]: one channel, samples from -1 to 1, zeros after the end of a recording"}
        if self.takes_lengths:
            inputs[LENGTHS] = "int64 [B]: number of samples of each recording"
        return {"inputs": inputs, "sampling_rate": self.sampling_rate}

    def cases(self, generator: np.random.Generator) -> tuple[FrontEndCase, ...]:
        """See `FrontEnd`: recordings alone, shorter and longer than what the model hears at once, and some together."""
        seconds = self.seconds_to_check()
        alone = [chirp(generator, int(each * self.sampling_rate) + 7, self.sampling_rate) for each in seconds]
        cases = [self._case(f"{len(each)} samples", [each]) for each in alone]
        return (*cases, self._case("several lengths", [alone[-1], alone[0], alone[0][::-1].copy()]))

    def seconds_to_check(self) -> Sequence[float]:
        """Return lengths of recordings."""
        return 0.6, 2.3

    @abstractmethod
    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return what transformers' extractor makes of recordings that are given together, as the graph's outputs."""

    def _case(self, name: str, recordings: Sequence[np.ndarray]) -> FrontEndCase:
        lengths = np.array([len(each) for each in recordings], np.int64)
        waveform = np.zeros((len(recordings), lengths.max()), np.float32)
        for row, recording in zip(waveform, recordings, strict=True):
            row[: len(recording)] = recording
        inputs = (waveform, lengths) if self.takes_lengths else (waveform,)
        return FrontEndCase(f"{self.kind} of {name}", inputs, self.reference(recordings))


def chirp(generator: np.random.Generator, samples: int, sampling_rate: int) -> np.ndarray:
    """Return f32 [samples]: a rising tone that comes and goes, over noise, as a voice stands over a room."""
    seconds = np.arange(samples) / sampling_rate
    swell = 0.3 * np.sin(2 * np.pi * 1.7 * seconds) ** 2
    rising = np.sin(2 * np.pi * (120 + 400 * seconds) * seconds)
    return (swell * rising + 0.01 * generator.standard_normal(samples)).astype(np.float32)


__all__ = ["LENGTHS", "WAVEFORM", "SoundFrontEnd", "chirp"]
