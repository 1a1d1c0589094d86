#!/usr/bin/env python3
"""usage: scripts/bench_seq2seq.py [--model DIR] [--tokens N] [--onnx] [--json]

What a token of an encoder-decoder costs in tract, by the length of its source, and Whisper beside PyTorch.

1. The decoder of a random BART (4 layers, width 384) is told of 50 and of 1,500 positions of a source: milliseconds a token, in the
   engine. The archive holds no projection of the source: what grows is attention over it.
2. Whisper (--model, by default the folder that scripts/fetch_whisper.py makes; without it random weights of that shape): thirty
   seconds of features to N tokens (default 64, greedy, the end of the text is ignored), as seconds a second of sound (real-time
   factor), in tract and in PyTorch's eager model with its own cache, one thread each, in turn, the median of three. With --onnx
   in ONNX Runtime too (packages onnx, onnxscript and onnxruntime): the encoder with the keys and values of the source, and the
   decoder with its cache, exported by torch.onnx in f32.

Needs the project's environment (scripts/test makes it): .venv/bin/python scripts/bench_seq2seq.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.compat import cache_keyword, cache_of
from t2n_llm import export_llm
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.output import ExportResult
from t2n_llm.tasks.names import SPEECH_RECOGNITION, TEXT_TO_TEXT
from t2n_llm.tasks.seq2seq.running import open_encoder

_FETCHED = Path.home() / ".cache" / "t2n-llm" / "models" / "whisper-tiny.en"
_SECONDS = 30
_LENGTHS = (50, 1500)
_ROUNDS = 3
_PROMPT = [50257, 50362]


def main() -> int:
    """Measure, and print."""
    arguments = _arguments()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="t2n-seq2seq-") as work:
        source = arguments.model or (_FETCHED if _FETCHED.is_dir() else _random(Path(work) / "model"))
        text = _exported(_random_bart(Path(work) / "bart"), Path(work) / "text", TEXT_TO_TEXT)
        made = _exported(Path(source), Path(work) / "speech", SPEECH_RECOGNITION)
        costs = _by_length(text.archives["decoder"], arguments.tokens)
        factors = _real_time(Path(source), made.archives, arguments.tokens, Path(work) if arguments.onnx else None)
    if arguments.json:
        print(json.dumps({"ms_a_token": costs, "real_time_factor": factors}, indent=1))
        return 0
    print(
        "positions of the source, ms a token: " + ", ".join(f"{length}: {cost:.2f}" for length, cost in costs.items())
    )
    print(", ".join(f"{name} {factor:.3f}" for name, factor in factors.items()) + " seconds a second of sound")
    for name in [name for name in factors if name != "tract"]:
        print(f"{name} takes {factors[name] / factors['tract']:.2f} times as long as tract")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").partition("\n")[0].removeprefix("usage: "))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _exported(source: Path, folder: Path, task: str) -> ExportResult:
    return export_llm(str(source), folder, task=task, require_tokenizer=False, check=False, frontend=False)


def _random_bart(folder: Path) -> Path:
    """Save a BART with random weights whose decoder has Whisper tiny's shape."""
    from transformers import BartConfig, BartForConditionalGeneration

    shape = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in shape.items()}
    config = BartConfig(d_model=384, vocab_size=51_864, max_position_embeddings=2048, **sizes)
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


def _random(folder: Path) -> Path:
    """Save a model of Whisper tiny's shape with random weights."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    WhisperForConditionalGeneration(WhisperConfig()).save_pretrained(folder)
    return folder


def _by_length(decoder: Path, tokens: int) -> dict[int, float]:
    """Return milliseconds a token by the length of the source, the lengths in turn."""
    costs: dict[int, list[float]] = {length: [] for length in _LENGTHS}
    generator = np.random.default_rng(0)
    turns = [[np.array([[7]], np.int64)] for _ in range(tokens)]
    with WheelRunner(decoder) as runner:
        facts = [fact for fact in runner.inputs if fact.name.startswith("cross_")]
        for _ in range(_ROUNDS):
            for length in _LENGTHS:
                told = {
                    fact.name: generator.standard_normal((1, int(fact.shape[1]), length, int(fact.shape[3]))).astype(
                        np.float32
                    )
                    for fact in facts
                }
                session: Any = runner.about(told).open_session()
                session.run([np.array([_PROMPT], np.int64)])
                costs[length].append(1e3 * statistics.median(session.time_turns(turns)))
                session.close()
    return {length: statistics.median(each) for length, each in costs.items()}


def _real_time(source: Path, archives: Any, tokens: int, onnx: Path | None) -> dict[str, float]:
    """Return the seconds that a second of sound takes, encoder and decoder, without loading; `onnx` is where such files may lie."""
    import torch
    from transformers import WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    model = WhisperForConditionalGeneration.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = model.config
    features = np.random.default_rng(1).standard_normal((1, config.num_mel_bins, 2 * config.max_source_positions))
    features = features.astype(np.float32)
    prompt = [token % config.vocab_size for token in _PROMPT]
    with open_encoder(archives["encoder"]) as encoder, WheelRunner(archives["decoder"]) as decoder:

        def in_tract() -> None:
            session = decoder.about(encoder.read({"input_features": features})).open_session()
            pending = prompt
            for _ in range(tokens):
                pending = [int(session.run([np.array([pending], np.int64)])[0][0, -1].argmax())]

        def in_pytorch() -> None:
            with torch.no_grad():
                given: dict[str, Any] = {"input_features": torch.from_numpy(features)}
                cache, pending, keyword = None, torch.tensor([prompt]), cache_keyword(model.forward)
                for _ in range(tokens):
                    result = model(**given, decoder_input_ids=pending, use_cache=True, **{keyword: cache})
                    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)}
                    cache, pending = cache_of(result), result.logits[:, -1:].argmax(-1)

        ways: dict[str, Callable[[], None]] = {"tract": in_tract, "PyTorch": in_pytorch}
        if onnx is not None:
            from whisper_in_onnx import in_onnx_runtime

            ways["ONNX Runtime"] = in_onnx_runtime(model, features, prompt, tokens, onnx)
        for way in ways.values():
            way()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_ROUNDS):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) / _SECONDS for name, each in taken.items()}


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())
