"""A voice activity detector that exists as TorchScript only: 60 s of speech, chunk by chunk, as PyTorch hears it.

The model is PyPI's silero-vad 6.2.3 (MIT): `scripts/fetch_test_models.py silero-vad` puts it in the user's cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.load_script import load_script

SECONDS = 60
# What the model's own forward takes at each rate: samples of a chunk, samples of the chunk before that it puts in front.
CHUNKS = {16000: (512, 64), 8000: (256, 32)}


@pytest.fixture(scope="module")
def script_file() -> Path:
    fetcher = load_script("fetch_test_models")
    file = fetcher.default_output() / fetcher.SILERO_NAME / fetcher.SILERO_FILE
    if not file.is_file() and os.environ.get("T2N_FETCH_MODELS") == "1":
        fetcher.fetch_silero_vad(fetcher.default_output())
    if not file.is_file():
        pytest.skip(f"no {file}: run scripts/fetch_test_models.py silero-vad (PyPI, 11 MB), or set T2N_FETCH_MODELS=1")
    return Path(file)


class ExplicitState(nn.Module):
    """The model's own forward with what it remembers as inputs and outputs: the LSTM's state and the last samples."""

    def __init__(self, detector: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: torch.Tensor, state: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([context, x], 1)
        probability, state = self.detector(joined, state)
        return probability, state, joined[:, -context.shape[1] :]


def resonance(signal: np.ndarray, frequency: float, bandwidth: float, rate: int) -> np.ndarray:
    """Return a signal through a second-order resonator, as a formant of the vocal tract is (Klatt 1980)."""
    times = np.arange(int(0.05 * rate)) / rate
    response = np.exp(-np.pi * bandwidth * times) * np.sin(2 * np.pi * frequency * times)
    return np.convolve(signal, response)[: len(signal)] * (2 * np.pi * frequency / rate)


def syllable(rng: np.random.Generator, rate: int) -> np.ndarray:
    """Return a burst of noise, then a vowel: pulses of a gliding pitch through three formants."""
    vowels = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
    length = int(rng.uniform(0.12, 0.28) * rate)
    pitch = np.linspace(rng.uniform(110, 160), rng.uniform(90, 140), length)
    phase = np.cumsum(pitch / rate)
    pulses = np.diff(np.floor(phase), prepend=0.0)
    voiced = pulses + 0.01 * rng.normal(size=length)
    vowel = sum(
        resonance(voiced, formant, width, rate) * gain
        for formant, width, gain in zip(vowels[rng.integers(5)], (80, 100, 140), (1.0, 0.6, 0.3), strict=True)
    )
    envelope = np.sin(np.pi * np.linspace(0, 1, length)) ** 0.5
    consonant = np.diff(rng.normal(size=int(rng.uniform(0.02, 0.08) * rate)), prepend=0.0) * 0.02
    return np.concatenate([consonant, vowel * envelope / max(np.abs(vowel).max(), 1e-6) * 0.5])


def speech(rate: int) -> np.ndarray:
    """Return 60 s of phrases of syllables with pauses between them, over a little noise: f32, in [-1, 1]."""
    rng = np.random.default_rng(7)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < SECONDS * rate:
        pieces += [syllable(rng, rate) for _ in range(rng.integers(4, 14))]
        pieces.append(np.zeros(int(rng.uniform(0.5, 2.0) * rate)))
    signal = np.concatenate(pieces)[: SECONDS * rate] + 0.001 * rng.normal(size=SECONDS * rate)
    return np.clip(signal, -1, 1).astype(np.float32)


def detector_of(model: torch.jit.ScriptModule, rate: int) -> torch.jit.ScriptModule:
    detector: torch.jit.ScriptModule = model._model if rate == 16000 else model._model_8k
    return detector


@pytest.mark.parametrize("rate", CHUNKS)
def test_a_minute_of_speech_chunk_by_chunk(script_file: Path, tmp_path: Path, rate: int) -> None:
    model = torch.jit.load(script_file).eval()
    samples, before = CHUNKS[rate]
    archive = export_model_to_nnef(
        ExplicitState(detector_of(model, rate)),
        (torch.randn(1, samples), torch.zeros(2, 1, 128), torch.zeros(1, before)),
        tmp_path / "vad",
        TractNNEF(),
        output_names=["probability", "new_state", "new_context"],
        compression_level=None,
    )
    chunks = speech(rate)[: SECONDS * rate // samples * samples].reshape(-1, 1, samples)
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, before), np.float32)
    heard, worst, worst_state, largest_state = [], 0.0, 0.0, 0.0
    model.reset_states()
    with TractWheel(timeout_seconds=120).load(archive) as engine, torch.no_grad():
        for chunk in chunks:
            probability, state, context = engine.run([chunk, state, context])
            expected = model(torch.from_numpy(chunk), rate).numpy()
            heard.append(float(expected[0, 0]))
            worst = max(worst, float(np.abs(probability - expected).max()))
            worst_state = max(worst_state, float(np.abs(state - model._state.numpy()).max()))
            largest_state = max(largest_state, float(np.abs(state).max()))
    print(f"{rate} Hz: {len(chunks)} chunks, probability {worst:.2e}, state {worst_state:.2e} of {largest_state:.1f}")
    assert worst <= 1e-4
    assert worst_state <= 1e-4 * max(1.0, largest_state)  # the LSTM's cells count up, to 100 and more
    assert min(heard) < 0.1 and max(heard) > 0.9, "the waveform holds both what the model takes for speech and pauses"


def test_the_script_itself_at_any_batch(script_file: Path, tmp_path: Path) -> None:
    detector = detector_of(torch.jit.load(script_file).eval(), 16000)
    axes = {"x": {0: "B"}, "state": {1: "B"}}
    archive = export_model_to_nnef(
        detector,
        (torch.randn(2, 576), torch.randn(2, 2, 128)),
        tmp_path / "vad",
        TractNNEF(dynamic_axes=axes),
        compression_level=None,
    )
    text = (archive / "graph.nnef").read_text()
    assert 'label="encoder.0.reparam_conv.weight"' in text and "# decoder.rnn: LSTMCell" in text
    with TractWheel(timeout_seconds=60).load(archive) as engine, torch.no_grad():
        for batch in (1, 5):
            args = torch.randn(batch, 576), torch.randn(2, batch, 128)
            for answer, expected in zip(engine.run([a.numpy() for a in args]), detector(*args), strict=True):
                np.testing.assert_allclose(answer, expected.numpy(), atol=1e-5)


def test_a_state_that_the_script_hides_is_told(script_file: Path, tmp_path: Path) -> None:
    model = torch.jit.load(script_file).eval()
    with pytest.warns(UserWarning, match="writes into _context, .*_state, which the archive does not keep"):
        export_model_to_nnef(model, (torch.randn(1, 512), 16000), tmp_path / "vad", TractNNEF())
