"""The tasks that the zoo has columns for: which architectures they have, and how transformers runs one.

In: the name of a task. Out: a `ZooTask`, and the model types that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from generic_export.errors import OptionError
from t2n_llm.source.empty_model import MULTIMODAL_MODEL
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.models import classes_of
from t2n_llm.tasks.names import (
    AUDIO_TEXT_TO_TEXT,
    IMAGE_TEXT_TO_TEXT,
    SEQUENCE_CLASSIFICATION,
    TEXT_GENERATION,
    TEXT_TO_AUDIO,
)

ALL = "all"


class Way(Enum):
    """How transformers is asked to run a tiny model before it is exported."""

    GENERATE = "generate"
    """Greedily, with its own cache."""
    FORWARD = "forward"
    """One pass."""
    PROMPTS = "prompts"
    """On the prompts of the check, with images or sound."""
    SPEAK = "speak"
    """Not at all: the check of the export runs it."""


@dataclass(frozen=True)
class ZooTask:
    """One task; `t2n_llm.tasks.models` says which models it has.

    Attributes:
        name: as `t2n-llm export --task` knows it.
        auto_class: of transformers, that makes a model of a config.
        way: how transformers runs it.
    """

    name: str
    auto_class: str
    way: Way


_ROWS = (
    ZooTask(TEXT_GENERATION, "AutoModelForCausalLM", Way.GENERATE),
    ZooTask("text2text-generation", "AutoModelForSeq2SeqLM", Way.GENERATE),
    ZooTask("automatic-speech-recognition", "AutoModelForSpeechSeq2Seq", Way.GENERATE),
    ZooTask("image-to-text", "AutoModelForImageTextToText", Way.GENERATE),
    ZooTask(IMAGE_TEXT_TO_TEXT, MULTIMODAL_MODEL.auto_class, Way.PROMPTS),
    ZooTask(AUDIO_TEXT_TO_TEXT, MULTIMODAL_MODEL.auto_class, Way.PROMPTS),
    ZooTask(TEXT_TO_AUDIO, "AutoModelForTextToWaveform", Way.SPEAK),
    *(
        ZooTask(head.name, head.kind.auto_class, Way.FORWARD)
        for head in HEADS.values()
        if head.name != SEQUENCE_CLASSIFICATION  # another name of text-classification
    ),
)
ZOO_TASKS: Mapping[str, ZooTask] = {row.name: row for row in _ROWS}


def zoo_task(name: str) -> ZooTask:
    """Return the task of a name.

    Raises:
        OptionError: the zoo has no such task.
    """
    if name not in ZOO_TASKS:
        raise OptionError(f"the zoo does not include the task {name!r}.", f"Use {', '.join(ZOO_TASKS)}, or {ALL}.")
    return ZOO_TASKS[name]


def chosen_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks that a user names, each once; none is text generation.

    Raises:
        OptionError: the zoo has no such task.
    """
    if ALL in names:
        return tuple(ZOO_TASKS)
    return tuple(dict.fromkeys(zoo_task(name).name for name in names)) or (TEXT_GENERATION,)


def architectures(task: str = TEXT_GENERATION) -> dict[str, str]:
    """Return the class name of each architecture that the installed transformers has for a task, by model type, in its order.

    Raises:
        OptionError: the zoo has no such task.
    """
    return {kind: classes[0] for kind, classes in classes_of(zoo_task(task).name).items()}


__all__ = ["ALL", "ZOO_TASKS", "Way", "ZooTask", "architectures", "chosen_tasks", "zoo_task"]
