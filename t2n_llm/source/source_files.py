"""The files of a source that are not weights: opened when the model is, and read from there until its export is in place.

In: a folder. Out: `PinnedFile`s: config, tokenizer, card, what lies beside the archive later, and code that may run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generic_export.errors import SourceError
from generic_export.weights.pinned_file import PinnedFile
from t2n_llm.source.source_card import CARD_NAME

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spm_char.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",  # Mistral's own
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_MODELS = frozenset(
    {"tokenizer.json", "tokenizer.model", "spm_char.model", "vocab.json", "vocab.txt", "tekken.json"}
)
"""Those that make a tokenizer, one of them."""
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",  # processors of images and videos cannot be loaded without it
)
MODELOPT_FILE = "hf_quant_config.json"
COMPANIONS = (*CONFIG_FILES, *TOKENIZER_FILES)
"""What a runtime needs beside an archive: configs, tokenizer, chat template, how images become pixels."""


def hold_files(folder: Path, trust_remote_code: bool = False) -> tuple[PinnedFile, ...]:
    """Open what an export reads of a folder beside its weights.

    Args:
        folder: with `config.json`.
        trust_remote_code: Python files too, which may run.

    Raises:
        SourceError: one of them cannot be read.
    """
    code = sorted(folder.glob("*.py")) if trust_remote_code else []
    paths = [
        path for path in (*(folder / name for name in (*COMPANIONS, MODELOPT_FILE, CARD_NAME)), *code) if path.is_file()
    ]
    held = tuple(map(_held, paths))
    for file in held:
        if file.path.name == "generation_config.json":
            _refuse_other_than_table(file)
    return held


def copied_files(held: Sequence[PinnedFile], card: str) -> dict[str, PinnedFile]:
    """Return the files that an export copies, by their names there.

    Args:
        held: the files of the source.
        card: name of the copy of the source's card.
    """
    names = {**{name: name for name in COMPANIONS}, CARD_NAME: card}
    return {names[file.path.name]: file for file in held if file.path.name in names}


def _refuse_other_than_table(file: PinnedFile) -> None:
    """Refuse JSON of another form; what is no JSON at all transformers leaves alone."""
    try:
        content = json.loads(file.read())
    except (ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        raise SourceError(
            f"{file.path}: contains a {type(content).__name__} instead of a JSON object.",
            "Correct that file, or delete it.",
        )


def hold_gguf(*paths: Path) -> tuple[PinnedFile, ...]:
    """Open the parts of a GGUF model.

    Raises:
        SourceError: one of them cannot be read.
    """
    return tuple(map(_held, paths))


def _held(path: Path) -> PinnedFile:
    try:
        return PinnedFile(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.", "Use the folder as it was saved.") from error


def recorded_files(files: Sequence[PinnedFile]) -> dict[str, Any]:
    """Return what `export.json` records of the files that a model was read from: by name, without where they lay."""
    return {file.path.name: file.identity.asdict() for file in files}


__all__ = [
    "COMPANIONS",
    "CONFIG_FILES",
    "MODELOPT_FILE",
    "TOKENIZER_FILES",
    "TOKENIZER_MODELS",
    "copied_files",
    "hold_files",
    "hold_gguf",
    "recorded_files",
]
