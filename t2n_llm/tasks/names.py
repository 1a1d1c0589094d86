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
SENTENCE_SIMILARITY = "sentence-similarity"
TEXT_CLASSIFICATION = "text-classification"
SEQUENCE_CLASSIFICATION = "sequence-classification"
FILL_MASK = "fill-mask"
TOKEN_CLASSIFICATION = "token-classification"
QUESTION_ANSWERING = "question-answering"
MULTIPLE_CHOICE = "multiple-choice"
IMAGE_CLASSIFICATION = "image-classification"
IMAGE_FEATURE_EXTRACTION = "image-feature-extraction"
IMAGE_SEGMENTATION = "image-segmentation"
UNIVERSAL_SEGMENTATION = "universal-segmentation"
OBJECT_DETECTION = "object-detection"
DEPTH_ESTIMATION = "depth-estimation"
ZERO_SHOT_IMAGE_CLASSIFICATION = "zero-shot-image-classification"
MASK_GENERATION = "mask-generation"
VIDEO_CLASSIFICATION = "video-classification"
AUDIO_CLASSIFICATION = "audio-classification"
AUDIO_FRAME_CLASSIFICATION = "audio-frame-classification"
AUDIO_XVECTOR = "audio-xvector"
CTC = "ctc"
TIME_SERIES = "time-series"
IMAGE_TEXT_TO_TEXT = "image-text-to-text"
AUDIO_TEXT_TO_TEXT = "audio-text-to-text"
TEXT_TO_TEXT = "text2text-generation"
SPEECH_RECOGNITION = "automatic-speech-recognition"
IMAGE_TO_TEXT = "image-to-text"
TEXT_TO_AUDIO = "text-to-audio"

AUTO = "auto"
"""The task of the architecture that a model's config names."""

SENTENCE_EMBEDDING = "sentence_embedding"
"""What a text's one row is called."""

TASKS: Mapping[str, str] = {
    TEXT_GENERATION: "",
    FEATURE_EXTRACTION: "last hidden states",
    SENTENCE_SIMILARITY: "one vector per text",
    TEXT_CLASSIFICATION: "",
    SEQUENCE_CLASSIFICATION: "the same without token types",
    FILL_MASK: "",
    TOKEN_CLASSIFICATION: "",
    QUESTION_ANSWERING: "",
    MULTIPLE_CHOICE: "",
    IMAGE_CLASSIFICATION: "",
    IMAGE_FEATURE_EXTRACTION: "",
    IMAGE_SEGMENTATION: "a class per pixel",
    UNIVERSAL_SEGMENTATION: "masks and their classes",
    OBJECT_DETECTION: "",
    DEPTH_ESTIMATION: "",
    ZERO_SHOT_IMAGE_CLASSIFICATION: "",
    MASK_GENERATION: "",
    VIDEO_CLASSIFICATION: "",
    AUDIO_CLASSIFICATION: "",
    AUDIO_FRAME_CLASSIFICATION: "",
    AUDIO_XVECTOR: "",
    CTC: "",
    TIME_SERIES: "",
    IMAGE_TEXT_TO_TEXT: "embeddings, encoder and decoder",
    AUDIO_TEXT_TO_TEXT: "the same for sound",
    TEXT_TO_TEXT: "encoder and decoder (translation, summarization)",
    SPEECH_RECOGNITION: "the same for sound",
    IMAGE_TO_TEXT: "the same for images",
    TEXT_TO_AUDIO: "speech",
}
"""What each makes, in words for `--help`; `tasks.registry` says where each is."""

TRIED: Mapping[str, str] = {
    TEXT_GENERATION: '"Once upon a time"',
    TEXT_TO_TEXT: '"A text."',
    SPEECH_RECOGNITION: "--audio speech.wav",
    CTC: "--audio speech.wav",
    IMAGE_TO_TEXT: "--image picture.png",
    IMAGE_TEXT_TO_TEXT: '"Describe this." --image picture.png',
    AUDIO_TEXT_TO_TEXT: '"What is said?" --audio speech.wav',
    TEXT_TO_AUDIO: '"A text." --output speech.wav',
}
"""What a user may give to `t2n-llm generate`, of the tasks that it has a meaning for."""

OTHER_NAMES: Mapping[str, str] = {
    "text-to-speech": TEXT_TO_AUDIO,
    "summarization": TEXT_TO_TEXT,
    "translation": TEXT_TO_TEXT,
    "sentiment-analysis": TEXT_CLASSIFICATION,
    "zero-shot-classification": TEXT_CLASSIFICATION,
    "ner": TOKEN_CLASSIFICATION,
    "semantic-segmentation": IMAGE_SEGMENTATION,
    "instance-segmentation": UNIVERSAL_SEGMENTATION,
    "panoptic-segmentation": UNIVERSAL_SEGMENTATION,
    "time-series-forecasting": TIME_SERIES,
    "causal-lm": TEXT_GENERATION,
    "seq2seq-lm": TEXT_TO_TEXT,
    "masked-lm": FILL_MASK,
    "speech2seq-lm": SPEECH_RECOGNITION,
    "vision2seq-lm": IMAGE_TO_TEXT,
    "audio-ctc": CTC,
}
"""What transformers' pipelines, optimum and the hub call tasks that have another name here."""

FORMS: Mapping[str, tuple[str, ...]] = {
    SPEECH_RECOGNITION: (CTC, AUDIO_TEXT_TO_TEXT),
    IMAGE_SEGMENTATION: (UNIVERSAL_SEGMENTATION,),
    IMAGE_TO_TEXT: (IMAGE_TEXT_TO_TEXT,),
}
"""Tasks that some models do in another form, which has a name of its own here: the model's class decides."""

_WITH_PAST = "-with-past"  # optimum's, for a decoder with a cache: here each has one


def task_named(name: str) -> str:
    """Return the task that a name of transformers, optimum or the hub stands for; an unknown name is returned as given."""
    plain = name.removesuffix(_WITH_PAST)
    if plain.startswith("translation_"):  # translation_en_to_fr
        return TEXT_TO_TEXT
    return OTHER_NAMES.get(plain, plain if plain in TASKS else name)


WITH_SOURCES = frozenset({TEXT_TO_TEXT, SPEECH_RECOGNITION, IMAGE_TO_TEXT})
"""Tasks of encoder-decoders."""

MULTIMODAL = frozenset({IMAGE_TEXT_TO_TEXT, AUDIO_TEXT_TO_TEXT})
"""Tasks whose decoder reads rows of images or sound among those of a text."""

KEEPING_CACHES = WITH_SOURCES | {TEXT_GENERATION}
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
            f"{folder} was exported for {task}, which `t2n-llm {command}` does not support.",
            f"Export the model with --task {TEXT_GENERATION}.",
        )
