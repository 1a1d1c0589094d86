"""What an export makes of a model, by the hub's names for tasks; `export.json` records which.

In: a task's name, or a manifest. Out: an error where a command has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError

TEXT_GENERATION = "text-generation"
FEATURE_EXTRACTION = "feature-extraction"
SEQUENCE_CLASSIFICATION = "sequence-classification"
IMAGE_TEXT_TO_TEXT = "image-text-to-text"
AUDIO_TEXT_TO_TEXT = "audio-text-to-text"
TEXT_TO_TEXT = "text2text-generation"
SPEECH_RECOGNITION = "automatic-speech-recognition"
IMAGE_TO_TEXT = "image-to-text"

TASKS: Mapping[str, str] = {
    TEXT_GENERATION: "",
    FEATURE_EXTRACTION: "last hidden states",
    SEQUENCE_CLASSIFICATION: "logits",
    IMAGE_TEXT_TO_TEXT: "embeddings, encoder and decoder",
    AUDIO_TEXT_TO_TEXT: "the same for sound",
    TEXT_TO_TEXT: "encoder and decoder (translation, summarization)",
    SPEECH_RECOGNITION: "the same for sound",
    IMAGE_TO_TEXT: "the same for images",
}
"""What each makes, in words for `--help`; `tasks.registry` says where each is."""

KEEPING_CACHES = frozenset({TEXT_GENERATION, TEXT_TO_TEXT, SPEECH_RECOGNITION, IMAGE_TO_TEXT})
"""Tasks whose decoder the engine can keep the cache of."""


def recorded_task(manifest: Mapping[str, Any]) -> str:
    """Return the task of an export; those that say none are language models."""
    return str(manifest.get("task", TEXT_GENERATION))


def require_language_model(folder: Path, manifest: Mapping[str, Any], command: str) -> None:
    """Refuse an export of another task.

    Args:
        folder, manifest: of the export.
        command: what was asked of it, for the message.

    Raises:
        OptionError: the folder holds something else than a language model.
    """
    task = recorded_task(manifest)
    if task != TEXT_GENERATION:
        raise OptionError(
            f"{folder} was exported for {task}: `t2n-llm {command}` has no meaning for it.",
            f"Export the model with --task {TEXT_GENERATION}.",
        )
