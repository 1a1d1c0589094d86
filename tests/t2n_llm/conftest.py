"""Models, exports and captured graphs that several tests read and none changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2n_llm.graph.capture import translate_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.hub import ModelSource
from tests.families import save_tiny_model
from tests.shared_folders import SharedExport, SharedFolders
from tests.trained_model import REAL_MODEL, save_first_layers


@pytest.fixture(scope="session")
def tiny_llama(shared_folders: SharedFolders) -> Path:
    """A random Llama with tied weights, in f32, without tokenizer."""
    return shared_folders("tiny-llama", lambda folder: save_tiny_model("llama", folder))


@pytest.fixture(scope="session")
def first_layers(shared_folders: SharedFolders) -> Callable[[int], Path]:
    """Returns the trained model cut short: the first so many of its six layers."""
    return lambda count: shared_folders(f"first-{count}-layers", lambda folder: save_first_layers(folder, count))


@pytest.fixture(scope="session")
def short_model(first_layers: Callable[[int], Path]) -> Path:
    """The first two layers of the trained model: tensors and statistics of every kind that it has."""
    return first_layers(2)


@pytest.fixture(scope="session")
def captures() -> dict[Any, Any]:
    """The graphs that this process captured so far."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def captured_once(captures: dict[Any, Any]) -> Iterator[None]:
    """Capture a model once per config and options. Tests of the capture call the functions below themselves."""
    with pytest.MonkeyPatch.context() as patched:
        for module, function in _CAPTURES:
            captured = getattr(import_module(module), function)
            patched.setattr(f"{module}.{function}", partial(_remembered, captures, captured))
        patched.setattr("t2n_llm.export.graphs.translate_model", partial(_translated, captures))
        yield


_MOST_CAPTURES = 80  # a few megabytes each

# Where each task captures: functions of a config and of values that can be compared.
_CAPTURES = (
    ("t2n_llm.tasks.text_generation", "build_graph"),
    ("t2n_llm.tasks.seq2seq.task", "build_seq2seq"),
    ("t2n_llm.tasks.multimodal.task", "build_multimodal"),
    ("t2n_llm.tasks.heads.task", "build_head_graph"),
    ("t2n_llm.tasks.seq2seq.task", "frontend_graphs"),
    ("t2n_llm.tasks.multimodal.task", "frontend_graphs"),
    ("t2n_llm.tasks.heads.task", "frontend_graphs"),
)


def _remembered(captures: dict[Any, Any], capture: Any, *options: Any, **more: Any) -> Any:
    """Return what `capture` returns, computed once."""
    if more.get("trust_remote_code"):
        return capture(*options, **more)
    frontends = capture.__name__ == "frontend_graphs"
    options = tuple(
        _without_later_choices(option) if isinstance(option, GraphOptions) and not frontends else option
        for option in options
    )
    key = capture.__qualname__, *map(_comparable, options), *((name, _comparable(more[name])) for name in sorted(more))
    if key not in captures:
        _make_room(captures)
        captures[key] = capture(*options, **more)
    return captures[key]


def _make_room(captures: dict[Any, Any]) -> None:
    if len(captures) >= _MOST_CAPTURES:
        del captures[next(iter(captures))]


def _translated(captures: dict[Any, Any], graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Return what `translate_model` returns; for a graph whose ranges were not measured, it is computed once."""
    if graph.ranges is not None:
        return translate_model(graph, options)
    key = id(graph.captured), _without_later_choices(options)
    if key not in captures:
        _make_room(captures)
        captures[key] = translate_model(graph, options)  # which keeps what was captured alive, and its id
    return replace(graph, nnef=captures[key].nnef)


def _without_later_choices(options: GraphOptions) -> GraphOptions:
    """Return options with the defaults of those that tasks and exports read after the capture."""
    return replace(options, fragments=False, prefill_chunk=None, frontend=True, towers=False)


def _comparable(value: Any) -> Any:
    """Return a key of an argument of a capture: configs by what they contain, without the folders they were read from,
    and sources by the files that they have now.
    """
    if isinstance(value, ModelSource):
        files = [(file.stat(), file) for file in sorted(value.folder.iterdir())]
        return *((file, status.st_mtime_ns, status.st_size) for status, file in files), _comparable(value.config)
    if hasattr(value, "to_dict"):
        return json.dumps(_without_folders(value.to_dict()), default=str)
    if is_dataclass(value):
        return type(value), *(_comparable(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return tuple((name, _comparable(part)) for name, part in value.items())
    return value


def _without_folders(config: Any) -> Any:
    if isinstance(config, dict):
        return {name: _without_folders(value) for name, value in config.items() if name != "_name_or_path"}
    return config


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
def tiny_export(tiny_llama: Path, shared_export: SharedExport) -> Path:
    """The random Llama exported in f32, checked."""
    return shared_export(tiny_llama, dtype="f32", require_tokenizer=False)


@pytest.fixture(scope="session")
def real_export(shared_export: SharedExport) -> Path:
    """The trained model with its tokenizer and chat template, exported in f16."""
    return shared_export(REAL_MODEL, check=False)


@pytest.fixture(scope="session")
def half_export(shared_export: SharedExport) -> Path:
    """The trained model as tract can write it again: it has no words for products of two element types."""
    return shared_export(REAL_MODEL, check=False, activations="f16", attention="sdpa")


@pytest.fixture(scope="session")
def endless_export(real_export: Path, shared_folders: SharedFolders) -> Path:
    """The trained model, which never generates an end token."""

    def make(folder: Path) -> None:
        shutil.copytree(real_export, folder)
        settings = {"eos_token_id": [2, 6], "suppress_tokens": [2, 6]}
        (folder / "generation_config.json").write_text(json.dumps(settings))

    return shared_folders("endless", make)
