"""Models and exports that several tests read and none changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.families import save_tiny_model

REAL_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-real"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with tied weights, in f32, without tokenizer."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the random Llama, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "source" / "model"))


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """The folder that exports go to; it is empty."""
    folder = tmp_path / "exports"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1 GB that takes no space: every weight is zero, in a file with a hole."""
    vocab, hidden = 500_000, 256
    folder = tmp_path_factory.mktemp("models") / "large"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer, kv = "model.layers.0", hidden // 2
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "lm_head.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        f"{layer}.input_layernorm.weight": [hidden],
        f"{layer}.post_attention_layernorm.weight": [hidden],
        f"{layer}.self_attn.q_proj.weight": [hidden, hidden],
        f"{layer}.self_attn.k_proj.weight": [kv, hidden],
        f"{layer}.self_attn.v_proj.weight": [kv, hidden],
        f"{layer}.self_attn.o_proj.weight": [hidden, hidden],
        f"{layer}.mlp.gate_proj.weight": [64, hidden],
        f"{layer}.mlp.up_proj.weight": [64, hidden],
        f"{layer}.mlp.down_proj.weight": [hidden, 64],
    }
    header, position = {}, 0
    for name, shape in shapes.items():
        nbytes = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return folder


@pytest.fixture(scope="session")
def tiny_export(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama exported in f32, checked."""
    return _export(tiny_llama, tmp_path_factory, dtype="f32", require_tokenizer=False)


@pytest.fixture(scope="session")
def real_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with its tokenizer and chat template, exported in f16."""
    return _export(REAL_MODEL, tmp_path_factory, check=False)


@pytest.fixture(scope="session")
def half_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model as tract can write it again: it has no words for products of two element types."""
    return _export(REAL_MODEL, tmp_path_factory, check=False, activations="f16", attention="sdpa")


def _export(source: Path, factory: pytest.TempPathFactory, **options: object) -> Path:
    from t2n_llm.export.pipeline import export_llm

    export: Callable = export_llm
    return Path(export(str(source), factory.mktemp("exported") / source.name, **options).output_dir)
