#!/usr/bin/env python3
"""Speech to tokens with an RNN transducer: encoder, decoder and joint network as three archives, by one plan.

usage: examples/rnnt_transcription.py [FOLDER]

Builds a small recogniser with random weights, writes its archives to FOLDER (default: a temporary one) with the boundaries that
rnnt_transcription.yaml says, transcribes noise of several lengths in tract, and compares every token with PyTorch's.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.remodel import Subgraph, export_remodelled, load_plan

PLAN = Path(__file__).with_suffix(".yaml")
FEATURES, ENCODED, HIDDEN, BLANK = 16, 32, 24, 12
MOST_TOKENS_PER_FRAME = 3


# --- the model, with batches, lengths and states as its authors would have it ---------------------------


class Encoder(nn.Module):
    """Convolutions that keep every fourth frame, then a bidirectional GRU; frames beyond the length are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.subsampling = nn.Sequential(
            nn.Conv1d(FEATURES, ENCODED, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(ENCODED, ENCODED, 3, stride=2, padding=1),
        )
        self.norm = nn.LayerNorm(ENCODED)
        self.recurrent = nn.GRU(ENCODED, ENCODED // 2, batch_first=True, bidirectional=True)

    def forward(self, audio: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, 16, T] and their lengths [B] to frames [B, (T+3)//4, 32] and their counts [B]."""
        frames = self.norm(self.subsampling(audio).transpose(1, 2))
        count = (length + 3) // 4
        frames = frames * (torch.arange(frames.shape[1])[None] < count[:, None])[..., None]
        return self.recurrent(frames)[0], count


class Decoder(nn.Module):
    """The prediction network: an LSTM over the tokens said so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BLANK + 1, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(
        self, tokens: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Tokens [B, U] and states 2 x [1, B, 24] to predictions [B, U, 24] and new states."""
        return self.lstm(self.embedding(tokens), states)


class Joint(nn.Module):
    """Scores of every token and of blank, for each frame and each prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.of_frame = nn.Linear(ENCODED, HIDDEN)
        self.of_prediction = nn.Linear(HIDDEN, HIDDEN)
        self.scores = nn.Linear(HIDDEN, BLANK + 1)

    def forward(self, encoded: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Frames [B, T, 32] and predictions [B, U, 24] to logits [B, T, U, 13]."""
        return self.scores(torch.tanh(self.of_frame(encoded)[:, :, None] + self.of_prediction(predicted)[:, None]))


def build() -> list[Subgraph]:
    """Return the three modules with random weights and example inputs; `t2n-llm remodel` calls this too."""
    torch.manual_seed(5)
    states = (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN))
    joint = Joint()
    with torch.no_grad():
        for layer in (joint.of_frame, joint.of_prediction, joint.scores):
            layer.weight.mul_(5)  # answers that differ from frame to frame, as those of a trained model do
    return [
        Subgraph("encoder", Encoder().eval(), (torch.randn(2, FEATURES, 40), torch.tensor([40, 31]))),
        Subgraph("decoder", Decoder().eval(), (torch.randint(0, BLANK, (2, 3)), states)),
        Subgraph("joint", joint.eval(), (torch.randn(2, 5, ENCODED), torch.randn(2, 3, HIDDEN))),
    ]


# --- greedy transcription, twice -------------------------------------------------------------------------


def transcribe_in_torch(modules: dict[str, nn.Module], features: torch.Tensor) -> list[int]:
    """Transcribe features [16, T] with the modules as they are."""
    states = (torch.zeros(1, 1, HIDDEN), torch.zeros(1, 1, HIDDEN))
    tokens: list[int] = []
    with torch.no_grad():
        encoded, _ = modules["encoder"](features[None], torch.tensor([features.shape[1]]))
        predicted, states = modules["decoder"](torch.tensor([[BLANK]]), states)
        for frame in encoded[0]:
            for _ in range(MOST_TOKENS_PER_FRAME):
                token = int(modules["joint"](frame[None, None], predicted).argmax())
                if token == BLANK:
                    break
                tokens.append(token)
                predicted, states = modules["decoder"](torch.tensor([[token]]), states)
    return tokens


def transcribe_in_tract(models: dict[str, WheelModel], features: np.ndarray) -> list[int]:
    """Transcribe features [16, T] with the archives, whose boundaries are what this loop wants."""
    states = [np.zeros((1, HIDDEN), np.float32)] * 2
    tokens: list[int] = []
    (encoded,) = models["encoder"].run([features])
    predicted, *states = models["decoder"].run([np.array([BLANK]), *states])
    for frame in encoded:
        for _ in range(MOST_TOKENS_PER_FRAME):
            (logits,) = models["joint"].run([frame[None], predicted])
            token = int(logits.argmax())
            if token == BLANK:
                break
            tokens.append(token)
            predicted, *states = models["decoder"].run([np.array([token]), *states])
    return tokens


def main(folder: Path) -> None:
    """Export, transcribe, compare."""
    subgraphs = build()
    archives = export_remodelled(subgraphs, load_plan(PLAN), folder)
    modules = {subgraph.name: subgraph.module for subgraph in subgraphs}
    engine = TractWheel()
    with ExitStack() as stack:
        models = {name: stack.enter_context(engine.load(path)) for name, path in archives.items()}
        for frames in (8, 57, 200):
            features = torch.randn(FEATURES, frames)
            said = transcribe_in_tract(models, features.numpy())
            if said != transcribe_in_torch(modules, features):
                raise SystemExit(f"{frames} frames: tract and PyTorch disagree")
            print(f"{frames} frames, {len(said)} tokens, as PyTorch: {' '.join(map(str, said[:16]))}")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
