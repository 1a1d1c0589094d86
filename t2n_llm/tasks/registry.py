"""Where each task is; nothing of it is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module

from t2n_llm.tasks.names import (
    AUDIO_TEXT_TO_TEXT,
    IMAGE_TEXT_TO_TEXT,
    IMAGE_TO_TEXT,
    SPEECH_RECOGNITION,
    TEXT_GENERATION,
    TEXT_TO_AUDIO,
    TEXT_TO_TEXT,
)
from t2n_llm.tasks.protocol import Task

_TASKS = {
    TEXT_GENERATION: "t2n_llm.tasks.text_generation:TextGeneration",
    IMAGE_TEXT_TO_TEXT: "t2n_llm.tasks.multimodal.task:ImageTextToText",
    AUDIO_TEXT_TO_TEXT: "t2n_llm.tasks.multimodal.task:AudioTextToText",
    TEXT_TO_TEXT: "t2n_llm.tasks.seq2seq.task:TextToText",
    SPEECH_RECOGNITION: "t2n_llm.tasks.seq2seq.task:SpeechRecognition",
    IMAGE_TO_TEXT: "t2n_llm.tasks.seq2seq.task:ImageToText",
    TEXT_TO_AUDIO: "t2n_llm.tasks.speech.task:TextToAudio",
}


def task_of(name: str) -> Task:
    """Return the task of a name in `tasks.names.TASKS`; those that are not named above are rows of one table."""
    if name not in _TASKS:
        from t2n_llm.tasks.heads.table import HEADS
        from t2n_llm.tasks.heads.task import HeadTask

        return HeadTask(HEADS[name])
    module, _, attribute = _TASKS[name].partition(":")
    task: Task = getattr(import_module(module), attribute)()
    return task
