"""The tasks that the zoo has columns for: which of transformers' mappings lists their architectures, and how transformers runs one.

In: the name of a task. Out: a `ZooTask`, and the model types that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from generic_export.errors import OptionError
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.names import SEQUENCE_CLASSIFICATION, TEXT_GENERATION

ALL = "all"


class Way(Enum):
    """How transformers is asked to run a tiny model before it is exported."""

    GENERATE = "generate"
    """Greedily, with its own cache."""
    FORWARD = "forward"
    """One pass."""


@dataclass(frozen=True)
class ZooTask:
    """One task.

    Attributes:
        name: as `t2n-llm export --task` knows it.
        mapping: in `transformers.models.auto.modeling_auto`, the middle of `MODEL_FOR_..._MAPPING_NAMES`; several are one list.
        auto_class: of transformers, that makes a model of a config.
        way: how transformers runs it.
        only: of the mapping; empty for all.
        without: of the mapping, what is another task's.
    """

    name: str
    mapping: tuple[str, ...]
    auto_class: str
    way: Way
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


# Language models that hear: audio-text-to-text, though transformers lists them as speech recognition too.
_HEARING = frozenset(
    {
        *("audioflamingo3", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus", "kyutai_speech_to_text"),
        *("moss_transcribe_diarize", "musicflamingo", "nemo_speechlm", "qwen2_audio", "qwen3_asr", "vibevoice"),
        *("vibevoice_asr", "voxtral", "voxtral_realtime"),
    }
)
# Encoder-decoders of images; the rest of the mapping is image-text-to-text.
_CAPTIONING = frozenset({"blip", "florence2", "git", "pix2struct", "pp_formulanet", "udop", "vision-encoder-decoder"})

_ROWS = (
    ZooTask(TEXT_GENERATION, ("CAUSAL_LM",), "AutoModelForCausalLM", Way.GENERATE),
    ZooTask("text2text-generation", ("SEQ_TO_SEQ_CAUSAL_LM",), "AutoModelForSeq2SeqLM", Way.GENERATE, without=_HEARING),
    ZooTask(
        "automatic-speech-recognition",
        ("SPEECH_SEQ_2_SEQ",),
        "AutoModelForSpeechSeq2Seq",
        Way.GENERATE,
        without=_HEARING,
    ),
    ZooTask("image-to-text", ("IMAGE_TEXT_TO_TEXT",), "AutoModelForImageTextToText", Way.GENERATE, only=_CAPTIONING),
    *(
        ZooTask(head.name, head.mapping, head.kind.auto_class, Way.FORWARD)
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
        raise OptionError(f"the zoo has no task {name!r}.", f"Use {', '.join(ZOO_TASKS)}, or {ALL}.")
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
    from transformers.models.auto import modeling_auto

    row = zoo_task(task)
    found: dict[str, str] = {}
    for middle in row.mapping:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{middle}_MAPPING_NAMES", {})  # another release may have no such
        found = {kind: _class_name(entry) for kind, entry in mapping.items()} | found
    return {
        kind: name for kind, name in found.items() if kind not in row.without and (not row.only or kind in row.only)
    }


def _class_name(entry: str | Iterable[str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def rows_of_all() -> set[str]:
    """Return what every architecture of every task is called, as `t2n_llm.zoo.verdict.row_of` does."""
    from t2n_llm.zoo.verdict import row_of

    return {row_of(task, kind) for task in ZOO_TASKS for kind in architectures(task)}


__all__ = ["ALL", "ZOO_TASKS", "Way", "ZooTask", "architectures", "chosen_tasks", "rows_of_all", "zoo_task"]
