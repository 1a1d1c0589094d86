#!/usr/bin/env python3
"""Networks that listen: exported once, checked in tract piece by piece, then fed as audio comes in.

usage: examples/streaming.py [FOLDER]

Writes archives to FOLDER (default: a temporary one) and prints, for each, how late its output is and how far it is from PyTorch's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from generic_export import Streaming, TractNNEF, export_model_to_nnef, open_stream
from generic_export.inference_target.tract.engines.wheel import TractWheel

RATE, WINDOW, HOP, MELS = 16_000, 400, 160, 20


class CausalConvolutions(nn.Module):
    """Two convolutions that look back only: the padding is on the left, nothing has to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3)
        self.second = nn.Conv1d(8, 5, 3, dilation=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 4, T] -> [1, 5, T]"""
        x = torch.relu(self.first(nn.functional.pad(x, (2, 0))))
        return self.second(nn.functional.pad(x, (8, 0)))


class CentredConvolutions(nn.Module):
    """The same with padding on both sides: an output step needs steps after its own, so it comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.second = nn.Conv1d(8, 5, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 4, T] -> [1, 5, T]"""
        return self.second(torch.relu(self.first(x)))


class Recurrent(nn.Module):
    """Two layers of GRU: what they remember stays in the engine from piece to piece."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, 4] -> [1, T, 3]"""
        return self.head(self.gru(x)[0])


def mel_filters() -> torch.Tensor:
    """Triangles that are equally wide on the mel scale, [mels, bins]."""
    top = 2595.0 * np.log10(1.0 + RATE / 2 / 700.0)
    edges = torch.tensor(700.0 * (10.0 ** (np.linspace(0.0, top, MELS + 2) / 2595.0) - 1.0), dtype=torch.float32)
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


class LogMel(nn.Module):
    """A spectrogram on the mel scale. `center=False`: a centred one mirrors the waveform at its ends, which a stream lacks."""

    window: torch.Tensor
    filters: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.register_buffer("filters", mel_filters())

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, MELS, frames]"""
        spectrum = torch.stft(waveform, WINDOW, HOP, window=self.window, center=False, return_complex=True)
        return torch.log(self.filters @ torch.view_as_real(spectrum).square().sum(-1) + 1e-6)


class Detector(nn.Module):
    """Waveform to a probability per frame: all of the above in one archive."""

    def __init__(self) -> None:
        super().__init__()
        self.front_end = LogMel()
        self.convolution = nn.Conv1d(MELS, 16, 5, stride=2)
        self.gru = nn.GRU(16, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, frames]"""
        x = torch.relu(self.convolution(self.front_end(waveform)))
        return torch.sigmoid(self.head(self.gru(x.mT)[0])).squeeze(-1)


class ExplicitState(nn.Module):
    """What is remembered as an input and an output: runs in any release of any engine, and the caller may keep many streams."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, 4], [1, 1, 6] -> [1, T, 6], [1, 1, 6]"""
        y, state = self.gru(x, state)
        return y, state


CASES: dict[str, tuple[nn.Module, torch.Tensor, int, int]] = {  # model, example, its time axis, steps in a piece
    "causal": (CausalConvolutions(), torch.randn(1, 4, 32), 2, 4),
    "centred": (CentredConvolutions(), torch.randn(1, 4, 32), 2, 4),
    "recurrent": (Recurrent(), torch.randn(1, 16, 4), 1, 4),
    "log_mel": (LogMel(), torch.randn(1, 12 * HOP) * 0.1, 1, HOP),
    "detector": (Detector(), torch.randn(1, 24 * HOP) * 0.1, 1, 2 * HOP),
}


def in_pulses(name: str, folder: Path) -> tuple[int, float]:
    """Export a case, feed it piece by piece, and return its delay in frames and its largest distance from PyTorch."""
    model, example, axis, pulse = CASES[name]
    streaming = Streaming("T", pulse)
    # The export is checked twice: on the whole example, and on its pieces.
    target = TractNNEF(dynamic_axes={"x": {axis: "T"}}, streaming=streaming)
    archive = export_model_to_nnef(model, (example,), folder / name, target, input_names=["x"])

    frames = []
    with open_stream(archive, streaming) as stream:
        session = stream.spawn_state()
        for piece in example.split(pulse, dim=axis):
            frames.append(session.run([np.ascontiguousarray(piece.numpy())])[0])
        (delay,), (out_axis,) = stream.delays, stream.output_axes
    heard = np.concatenate(frames, out_axis)
    heard = np.take(heard, range(delay, heard.shape[out_axis]), out_axis)  # the first `delay` frames mean nothing

    with torch.no_grad():
        whole = model.eval()(example).numpy()
    known = np.take(whole, range(heard.shape[out_axis]), out_axis)  # the last ones need steps that have not come yet
    return delay, float(np.abs(heard - known).max())


def with_explicit_state(folder: Path) -> float:
    """Feed a GRU piece by piece, of any length, and carry its state; return the largest distance from PyTorch."""
    model, example, state = ExplicitState(), torch.randn(1, 13, 4), torch.zeros(1, 1, 6)
    target = TractNNEF(dynamic_axes={"x": {1: "T"}})
    archive = export_model_to_nnef(model, (example, state), folder / "explicit", target)
    frames, carried = [], state.numpy()
    with TractWheel().load(archive) as engine:
        for piece in example.split([4, 1, 8], dim=1):
            heard, carried = engine.run([np.ascontiguousarray(piece.numpy()), carried])
            frames.append(heard)
    with torch.no_grad():
        whole, last = model.eval()(example, state)
    return float(max(np.abs(np.concatenate(frames, 1) - whole.numpy()).max(), np.abs(carried - last.numpy()).max()))


def main(folder: Path) -> None:
    """Run every case."""
    torch.manual_seed(0)
    for name in CASES:
        delay, distance = in_pulses(name, folder)
        print(f"{name}: {delay} frames late, {distance:.1e} from PyTorch")
    print(f"explicit state: never late, {with_explicit_state(folder):.1e} from PyTorch")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
