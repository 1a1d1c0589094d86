"""Which of transformers' models a task is for: its mappings from model types to classes, by task.

In: the name of a task. Out: the classes of each model type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from t2n_llm.tasks import names
from t2n_llm.tasks.heads.table import HEADS


@dataclass(frozen=True)
class TaskModels:
    """The models of a task.

    Attributes:
        mappings: in `transformers.models.auto.modeling_auto`, the middle of `MODEL_FOR_..._MAPPING_NAMES`; several are one list.
        only: model types of those; empty for all.
        without: model types of those that are another task's.
    """

    mappings: tuple[str, ...]
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


# Language models that hear: audio-text-to-text, though transformers lists them as speech recognition too.
_HEARING = frozenset(
    {
        *("audioflamingo3", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus", "kyutai_speech_to_text"),
        *("moss_transcribe_diarize", "musicflamingo", "nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr"),
        *("vibevoice", "vibevoice_asr", "voxtral", "voxtral_realtime"),
    }
)
_HEARING_AND_SEEING = frozenset({"gemma3n", "gemma4"})  # audio-text-to-text only if --task says so
# Encoder-decoders of images; the rest of the mapping is image-text-to-text.
_CAPTIONING = frozenset({"blip", "florence2", "git", "pix2struct", "pp_formulanet", "udop", "vision-encoder-decoder"})

TASK_MODELS: Mapping[str, TaskModels] = {
    names.TEXT_GENERATION: TaskModels(("CAUSAL_LM",)),
    "text2text-generation": TaskModels(("SEQ_TO_SEQ_CAUSAL_LM",), without=_HEARING),
    "automatic-speech-recognition": TaskModels(("SPEECH_SEQ_2_SEQ",), without=_HEARING),
    "image-to-text": TaskModels(("IMAGE_TEXT_TO_TEXT",), only=_CAPTIONING),
    names.IMAGE_TEXT_TO_TEXT: TaskModels(("IMAGE_TEXT_TO_TEXT",), without=_CAPTIONING),
    names.AUDIO_TEXT_TO_TEXT: TaskModels(
        ("SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM"), only=_HEARING | _HEARING_AND_SEEING
    ),
    names.TEXT_TO_AUDIO: TaskModels(("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM")),
    **{head.name: TaskModels(head.mapping) for head in HEADS.values()},
}


def classes_of(task: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the classes that the installed transformers has for a task, by model type, in its order."""
    models = TASK_MODELS[task]
    found: dict[str, tuple[str, ...]] = {}
    for middle in models.mappings:
        found = mapping_of(f"FOR_{middle}") | found
    return {
        kind: classes
        for kind, classes in found.items()
        if kind not in models.without and (not models.only or kind in models.only)
    }


def mapping_of(middle: str) -> dict[str, tuple[str, ...]]:
    """Return one of transformers' mappings; another release may not have it, and then it is empty."""
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, f"MODEL_{middle}_MAPPING_NAMES".replace("__", "_"), {})
    return {kind: _class_names(entry) for kind, entry in mapping.items()}


def _class_names(entry: str | Iterable[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


__all__ = ["TASK_MODELS", "TaskModels", "classes_of", "mapping_of"]
