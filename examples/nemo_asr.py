#!/usr/bin/env python3
"""NeMo's speech recognition in tract: CTC, RNN-T and TDT over one FastConformer, and a cache-aware one chunk by chunk.

usage: examples/nemo_asr.py [FOLDER]

Needs `pip install 't2n-llm[nemo]'`. Builds tiny models of NeMo's own modules with random weights, writes front end, encoder,
decoders and joints to FOLDER (default: a temporary one) with the boundaries that nemo_asr.yaml says, recognises noise of several
lengths in tract, and compares every label with what NeMo's own greedy decoding says; then every chunk with NeMo's own step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.remodel import Subgraph, export_remodelled, load_plan
from t2n_llm.zoo.suites.nemo import (
    CASES,
    CHUNK_FRAMES,
    ByKeyword,
    Joint,
    PredictionStep,
    encoder,
    joint_network,
    prediction_network,
)

PLAN = Path(__file__).with_suffix(".yaml")
FEATURES, ENCODED, HIDDEN, BLANK = 16, 32, 24, 12
DURATIONS = (0, 1, 2, 3, 4)  # frames that a TDT goes on by
MOST_LABELS_PER_FRAME = 3
JOINT_SCALE, JOINT_BLANK = 20, 0.7
NEW_FRAMES = 16  # of a chunk; the nine before it are given again

Array = np.ndarray[Any, Any]


# --- the parts, as NeMo has them -------------------------------------------------------------------------


def build() -> tuple[list[Subgraph], Mapping[str, Any]]:
    """Return the parts with example inputs, and NeMo's own modules by name."""
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor, ConvASRDecoder

    torch.manual_seed(26)
    letters = [chr(ord("a") + index) for index in range(BLANK)]
    parts = {
        "preprocessor": AudioToMelSpectrogramPreprocessor(features=FEATURES, dither=0.0, pad_to=0),
        "encoder": encoder(subsampling="dw_striding", subsampling_factor=8, subsampling_conv_channels=16),
        "ctc": ConvASRDecoder(feat_in=ENCODED, num_classes=BLANK, vocabulary=letters),
        "decoder": prediction_network(),
        "joint": joint_network(),
        "joint_tdt": joint_network(len(DURATIONS)),
    }
    for part in parts.values():
        part.eval()
    with torch.no_grad():  # answers that differ from frame to frame, as those of a trained model do
        encoded, _ = parts["encoder"](audio_signal=torch.randn(1, FEATURES, 400), length=torch.tensor([400]))
        middle = encoded[0].mean(-1)
        parts["ctc"].decoder_layers[0].bias.copy_(-parts["ctc"].decoder_layers[0].weight[..., 0] @ middle)
        for joint in (parts["joint"], parts["joint_tdt"]):
            joint.enc.weight.mul_(JOINT_SCALE)
            joint.enc.bias.copy_(-joint.enc.weight @ middle)
            joint.joint_net[-1].bias[BLANK] += JOINT_BLANK
    states = [torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN)]
    pair = (torch.randn(2, 5, ENCODED), torch.randn(2, 3, HIDDEN))
    given: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "preprocessor": (
            ByKeyword(parts["preprocessor"], "input_signal", "length"),
            (torch.randn(2, 8000), torch.tensor([8000, 6000])),
        ),
        "encoder": (
            ByKeyword(parts["encoder"], "audio_signal", "length"),
            (torch.randn(2, FEATURES, 80), torch.tensor([80, 64])),
        ),
        "ctc": (ByKeyword(parts["ctc"], "encoder_output"), (torch.randn(2, ENCODED, 10),)),
        "decoder": (PredictionStep(parts["decoder"]), (torch.randint(0, BLANK, (2, 1)), *states)),
        "joint": (Joint(parts["joint"]), pair),
        "joint_tdt": (Joint(parts["joint_tdt"]), pair),
    }
    names = {
        "preprocessor": ("input_signal", "length"),
        "encoder": ("audio_signal", "length"),
        "ctc": ("encoder_output",),
        "decoder": ("label", "hidden", "cell"),
        "joint": ("encoded", "predicted"),
        "joint_tdt": ("encoded", "predicted"),
    }
    subgraphs = [
        Subgraph(name, module.eval(), inputs, input_names=names[name]) for name, (module, inputs) in given.items()
    ]
    return subgraphs, parts


# --- greedy decoding by NeMo -----------------------------------------------------------------------------


def decoded_by_nemo(parts: Mapping[str, Any], audio: torch.Tensor) -> dict[str, list[int]]:
    """Return the labels of audio [T] by CTC, RNN-T and TDT, as NeMo's own decoders find them."""
    from nemo.collections.asr.parts.submodules.ctc_greedy_decoding import GreedyCTCInfer
    from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import GreedyRNNTInfer, GreedyTDTInfer
    from nemo.core.classes.common import typecheck

    limits: dict[str, Any] = {"blank_index": BLANK, "max_symbols_per_step": MOST_LABELS_PER_FRAME}
    rnnt = GreedyRNNTInfer(parts["decoder"], parts["joint"], **limits)
    tdt = GreedyTDTInfer(parts["decoder"], parts["joint_tdt"], durations=list(DURATIONS), **limits)
    with torch.no_grad(), typecheck.disable_checks():  # of neural types, which tensors put in by hand do not have
        features, lengths = parts["preprocessor"](input_signal=audio[None], length=torch.tensor([audio.shape[0]]))
        encoded, counts = parts["encoder"](audio_signal=features, length=lengths)
        scores = parts["ctc"](encoder_output=encoded)
        (by_ctc,) = GreedyCTCInfer(blank_id=BLANK)(decoder_output=scores, decoder_lengths=counts)[0]
        (by_rnnt,) = rnnt(encoder_output=encoded, encoded_lengths=counts)[0]
        (by_tdt,) = tdt(encoder_output=encoded, encoded_lengths=counts)[0]
    best = [int(label) for label in by_ctc.y_sequence]
    return {
        "ctc": without_repeats(best),
        "rnnt": [int(label) for label in by_rnnt.y_sequence],
        "tdt": [int(label) for label in by_tdt.y_sequence],
    }


def without_repeats(best: Sequence[int]) -> list[int]:
    """Return what a row of best labels says: repeats are one, blanks are nothing."""
    pairs = zip(best, [BLANK, *best], strict=False)
    return [label for label, before in pairs if label not in (before, BLANK)]


# --- greedy decoding in tract ----------------------------------------------------------------------------


def encoded_in_tract(models: Mapping[str, WheelModel], audio: Array) -> Array:
    """Return the encoded frames [D, S] of audio [T]; the front end makes one frame more than it counts, which is left out."""
    (features,) = models["preprocessor"].run([audio])
    (encoded,) = models["encoder"].run([features[:, : audio.shape[0] // 160]])
    return encoded


def by_ctc(models: Mapping[str, WheelModel], encoded: Array) -> list[int]:
    """Return the labels that CTC's best path says."""
    (scores,) = models["ctc"].run([encoded])
    return without_repeats([int(label) for label in scores.argmax(-1)])


def by_transducer(models: Mapping[str, WheelModel], joint: str, encoded: Array) -> list[int]:
    """Return the labels of an RNN-T, or of a TDT, whose joint also says how many frames to go on."""
    states: list[Array] = [np.zeros((1, HIDDEN), np.float32)] * 2
    # NeMo's prediction network takes the blank's embedding, which is zero, for the beginning.
    predicted, *after = models["decoder"].run([np.array([BLANK]), *states])
    labels: list[int] = []
    frame, said = 0, 0
    while frame < encoded.shape[1]:
        (scores,) = models[joint].run([encoded[None, :, frame], predicted])
        row = scores.reshape(-1)
        label = int(row[: BLANK + 1].argmax())
        further = DURATIONS[int(row[BLANK + 1 :].argmax())] if joint == "joint_tdt" else int(label == BLANK)
        if label != BLANK:
            labels.append(label)
            predicted, *after = models["decoder"].run([np.array([label]), *after])
        said += 1
        if further == 0 and said < MOST_LABELS_PER_FRAME and (label != BLANK or joint == "joint_tdt"):
            continue
        frame, said = frame + max(further, int(further == 0) or int(said == MOST_LABELS_PER_FRAME)), 0
    return labels


# --- chunk by chunk --------------------------------------------------------------------------------------


def in_chunks(engine: TractWheel, folder: Path) -> None:
    """Export the step of a cache-aware encoder, and run it over a recording beside NeMo's own; its caches go from step to step."""
    case = CASES["FastConformer, cache-aware, a chunk"]
    torch.manual_seed(6)
    step = case.build().eval()
    names = list(case.inputs)
    target = TractNNEF(dynamic_axes=case.dynamic_axes, check_io=False)
    outputs = ["encoded", "encoded_length", *(f"next_{name}" for name in names[2:])]
    archive = export_model_to_nnef(step, case.drawn(case.sizes, 0), folder / "chunk.nnef.tgz", target, names, outputs)
    recording = torch.randn(1, FEATURES, CHUNK_FRAMES + 7 * NEW_FRAMES)
    caches = [torch.zeros(2, 1, 8, ENCODED), torch.zeros(2, 1, ENCODED, 8), torch.zeros(1, dtype=torch.int64)]
    theirs, ours = caches, [cache.numpy() for cache in caches]
    with engine.load(archive) as model, torch.no_grad():
        for start in range(0, recording.shape[2] - CHUNK_FRAMES + 1, NEW_FRAMES):
            chunk, length = recording[..., start : start + CHUNK_FRAMES], torch.tensor([CHUNK_FRAMES])
            expected, _, *theirs = step(chunk, length, *theirs)
            encoded, _, *ours = model.run([chunk.numpy(), length.numpy(), *ours])
            if not np.allclose(encoded, expected.numpy(), atol=1e-4):
                raise SystemExit(f"the chunk at frame {start}: tract and PyTorch disagree")
    print(f"{recording.shape[2]} frames in chunks of {NEW_FRAMES}, as PyTorch")


def main(folder: Path) -> None:
    """Export, recognise, compare."""
    subgraphs, parts = build()
    archives = export_remodelled(subgraphs, load_plan(PLAN), folder)
    engine = TractWheel()
    with ExitStack() as stack:
        models = {name: stack.enter_context(engine.load(path)) for name, path in archives.items()}
        for samples in (4000, 16000, 40000):
            audio = torch.randn(samples)
            encoded = encoded_in_tract(models, audio.numpy())
            said = {
                "ctc": by_ctc(models, encoded),
                "rnnt": by_transducer(models, "joint", encoded),
                "tdt": by_transducer(models, "joint_tdt", encoded),
            }
            expected = decoded_by_nemo(parts, audio)
            for name, labels in said.items():
                if labels != expected[name]:
                    raise SystemExit(f"{samples} samples, {name}: tract says {labels}, NeMo {expected[name]}")
            print(f"{samples} samples, as NeMo: " + ", ".join(f"{name} {len(labels)}" for name, labels in said.items()))
    in_chunks(engine, folder)


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
