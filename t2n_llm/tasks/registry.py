"""Where each task is; nothing of it is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module

from t2n_llm.tasks.names import (
    AUDIO_TEXT_TO_TEXT,
    FEATURE_EXTRACTION,
    IMAGE_TEXT_TO_TEXT,
    SEQUENCE_CLASSIFICATION,
    TEXT_GENERATION,
)
from t2n_llm.tasks.protocol import Task

_TASKS = {
    TEXT_GENERATION: "t2n_llm.tasks.text_generation:TextGeneration",
    FEATURE_EXTRACTION: "t2n_llm.tasks.heads.task:FeatureExtraction",
    SEQUENCE_CLASSIFICATION: "t2n_llm.tasks.heads.task:SequenceClassification",
    IMAGE_TEXT_TO_TEXT: "t2n_llm.tasks.multimodal.task:ImageTextToText",
    AUDIO_TEXT_TO_TEXT: "t2n_llm.tasks.multimodal.task:AudioTextToText",
}


def task_of(name: str) -> Task:
    """Return the task of a name in `tasks.names.TASKS`."""
    module, _, attribute = _TASKS[name].partition(":")
    task: Task = getattr(import_module(module), attribute)()
    return task
