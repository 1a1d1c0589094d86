"""A random model that is talked to in words, exported with its cache given and with its cache kept by the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.families import FAMILIES, save_tiny_model
from tests.shared_folders import SharedExport, SharedFolders
from tests.word_tokenizers import save_word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w3', 'assistant': 'w4', 'system': 'w5'}[m['role']] }} {{ m['content'] }} w6 "
    "{% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)


def save_talking_model(family: str, folder: Path, configs: Mapping[str, Callable[[], Any]] = FAMILIES) -> Path:
    """Write a random model with a tokenizer of words and a chat template; it ends at two tokens, and never says two others."""
    save_tiny_model(family, folder, seed=3, configs=configs)
    save_word_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = {"eos_token_id": [6, 2], "suppress_tokens": [0, 1], "begin_suppress_tokens": [2, 6]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def talking_model(shared_folders: SharedFolders) -> Path:
    """A random Llama that is talked to."""
    return shared_folders("talking", lambda folder: save_talking_model("llama", folder))


@pytest.fixture(scope="session", params=["explicit caches", "stateful"])
def talking_export(request: pytest.FixtureRequest, talking_model: Path, shared_export: SharedExport) -> Path:
    """It, exported."""
    return shared_export(talking_model, dtype="f32", check=False, stateful=request.param == "stateful")
