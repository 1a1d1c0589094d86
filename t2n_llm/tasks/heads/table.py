"""Single-pass tasks as data: one row a task says what transformers makes of a config, what that reads, and what it answers.

In: the name of a task. Out: its `Head`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from t2n_llm.source.empty_model import ModelKind
from t2n_llm.tasks import names


class Reads(Enum):
    """What a model is given."""

    TEXT = "text"
    CHOICES = "several endings of a text"
    IMAGE = "an image"
    IMAGE_AND_TEXTS = "images, and texts to compare them with"
    PROMPTED_IMAGE = "an image, and points in it"
    SOUND = "sound"
    VIDEO = "frames of a video"
    SERIES = "a time series"


@dataclass(frozen=True)
class Head:
    """One task.

    Attributes:
        name: the hub's, or an older one of this package.
        kind: transformers' class for it.
        mapping: which of transformers' mappings list its models, the middle of `MODEL_FOR_..._MAPPING_NAMES`.
        reads: what its models are given.
        outputs: what is read of a model's result, and how the graph calls that; those that a model has, in this order.
        otherwise: the same for models that have none of those.
        per_token: the outputs have one row for each token: what a model says of padding is not compared.
        token_types: texts come in pairs, which models with token types are told.
        marks: a part of the text, a question, is what all tokens look at in models with global attention.
        labelled: the config says what each class is called.
        pooled: rows of tokens become one of the text, in the graph.
    """

    name: str
    kind: ModelKind
    mapping: tuple[str, ...]
    reads: Reads
    outputs: tuple[str, ...]
    otherwise: tuple[str, ...] = ()
    per_token: bool = False
    token_types: bool = False
    marks: bool = False
    labelled: bool = False
    pooled: bool = False

    def read_of(self, available: Container[str]) -> tuple[str, ...]:
        """Return which of a result's fields are read; none where the result is another task's."""
        chosen = ([name for name in names if name in available] for names in (self.outputs, self.otherwise))
        return tuple(next((found for found in chosen if found), ()))


def _kind(auto_class: str, description: str) -> ModelKind:
    return ModelKind(auto_class, description, "Choose another --task, such as feature-extraction")


_BACKBONE = ModelKind("AutoModel", "model", "Use a text model")
_CLASSIFIER = Head(
    names.TEXT_CLASSIFICATION,
    _kind("AutoModelForSequenceClassification", "sequence classifier"),
    ("SEQUENCE_CLASSIFICATION",),
    Reads.TEXT,
    ("logits",),
    token_types=True,
    labelled=True,
)

_TEXT_ROWS = (
    Head(names.FEATURE_EXTRACTION, _BACKBONE, ("TEXT_ENCODING",), Reads.TEXT, ("last_hidden_state",), per_token=True),
    Head(
        names.SENTENCE_SIMILARITY, _BACKBONE, ("TEXT_ENCODING",), Reads.TEXT, (names.SENTENCE_EMBEDDING,), pooled=True
    ),
    _CLASSIFIER,
    replace(_CLASSIFIER, name=names.SEQUENCE_CLASSIFICATION, token_types=False),  # as it was before pairs
    Head(
        names.FILL_MASK,
        _kind("AutoModelForMaskedLM", "masked language model"),
        ("MASKED_LM",),
        Reads.TEXT,
        ("logits",),
        per_token=True,
    ),
    Head(
        names.TOKEN_CLASSIFICATION,
        _kind("AutoModelForTokenClassification", "token classifier"),
        ("TOKEN_CLASSIFICATION",),
        Reads.TEXT,
        ("logits",),
        per_token=True,
        labelled=True,
    ),
    Head(
        names.QUESTION_ANSWERING,
        _kind("AutoModelForQuestionAnswering", "question answering model"),
        ("QUESTION_ANSWERING",),
        Reads.TEXT,
        ("start_logits", "end_logits"),
        per_token=True,
        token_types=True,
        marks=True,
    ),
    Head(
        names.MULTIPLE_CHOICE,
        _kind("AutoModelForMultipleChoice", "multiple choice model"),
        ("MULTIPLE_CHOICE",),
        Reads.CHOICES,
        ("logits",),
        token_types=True,
        marks=True,
    ),
)
_IMAGE_ROWS = (
    Head(
        names.IMAGE_CLASSIFICATION,
        _kind("AutoModelForImageClassification", "image classifier"),
        ("IMAGE_CLASSIFICATION",),
        Reads.IMAGE,
        ("logits",),
        ("last_hidden_state",),
        labelled=True,
    ),
    Head(
        names.IMAGE_FEATURE_EXTRACTION,
        replace(_BACKBONE, advice="Use a vision model"),
        ("IMAGE",),
        Reads.IMAGE,
        ("last_hidden_state", "pooler_output", "image_embeds", "reconstruction", "logits"),
    ),
    Head(
        names.IMAGE_SEGMENTATION,
        _kind("AutoModelForSemanticSegmentation", "segmentation model"),
        ("SEMANTIC_SEGMENTATION",),
        Reads.IMAGE,
        ("logits",),
        labelled=True,
    ),
    Head(
        names.UNIVERSAL_SEGMENTATION,
        _kind("AutoModelForUniversalSegmentation", "universal segmentation model"),
        ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"),
        Reads.IMAGE,
        ("class_queries_logits", "masks_queries_logits", "logits", "pred_boxes", "pred_masks"),
        labelled=True,
    ),
    Head(
        names.OBJECT_DETECTION,
        _kind("AutoModelForObjectDetection", "object detector"),
        ("OBJECT_DETECTION",),
        Reads.IMAGE,
        ("logits", "pred_boxes", "order_logits"),
        ("last_hidden_state",),
        labelled=True,
    ),
    Head(
        names.DEPTH_ESTIMATION,
        _kind("AutoModelForDepthEstimation", "depth estimator"),
        ("DEPTH_ESTIMATION",),
        Reads.IMAGE,
        ("predicted_depth", "field_of_view", "domain_logits"),
    ),
    Head(
        names.ZERO_SHOT_IMAGE_CLASSIFICATION,
        _kind("AutoModelForZeroShotImageClassification", "model of images and texts"),
        ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
        Reads.IMAGE_AND_TEXTS,
        ("logits_per_image", "text_embeds", "image_embeds", "itm_score"),
    ),
    Head(
        names.MASK_GENERATION,
        _kind("AutoModelForMaskGeneration", "mask generator"),
        ("MASK_GENERATION",),
        Reads.PROMPTED_IMAGE,
        ("pred_masks", "iou_scores", "object_score_logits"),
    ),
    Head(
        names.VIDEO_CLASSIFICATION,
        _kind("AutoModelForVideoClassification", "video classifier"),
        ("VIDEO_CLASSIFICATION",),
        Reads.VIDEO,
        ("logits",),
        labelled=True,
    ),
)
_SOUND_ROWS = (
    Head(
        names.AUDIO_CLASSIFICATION,
        _kind("AutoModelForAudioClassification", "sound classifier"),
        ("AUDIO_CLASSIFICATION",),
        Reads.SOUND,
        ("logits",),
        labelled=True,
    ),
    Head(
        names.AUDIO_FRAME_CLASSIFICATION,
        _kind("AutoModelForAudioFrameClassification", "audio frame classifier"),
        ("AUDIO_FRAME_CLASSIFICATION",),
        Reads.SOUND,
        ("logits",),
        labelled=True,
    ),
    Head(
        names.AUDIO_XVECTOR,
        _kind("AutoModelForAudioXVector", "speaker model"),
        ("AUDIO_XVECTOR",),
        Reads.SOUND,
        ("logits", "embeddings"),
    ),
    Head(names.CTC, _kind("AutoModelForCTC", "CTC model"), ("CTC",), Reads.SOUND, ("logits",)),
)
_SERIES = Head(
    names.TIME_SERIES,
    _kind("AutoModelForTimeSeriesPrediction", "time series model"),
    ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION"),
    Reads.SERIES,
    ("prediction_outputs", "prediction_logits", "regression_outputs", "mean_predictions", "full_predictions"),
)

HEADS: Mapping[str, Head] = {head.name: head for head in (*_TEXT_ROWS, *_IMAGE_ROWS, *_SOUND_ROWS, _SERIES)}


def kind_of(head: Head, config: Any) -> ModelKind:
    """Return what transformers should make of a config.

    A task of several mappings has no auto class that knows all of them (time series, RF-DETR's masks): the class is the first of
    the config's `architectures`.
    """
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    if len(head.mapping) > 1 and named is not None and hasattr(transformers, named):
        return replace(head.kind, auto_class=named)
    if "TEXT_ENCODING" in head.mapping:
        return _encoder(head, config)
    return head.kind


def _encoder(head: Head, config: Any) -> ModelKind:
    """Return the encoder of an encoder-decoder, if transformers has a class for it (T5): the whole takes a target text, too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    alone = ENCODERS.get(config.model_type, "").endswith("EncoderModel")
    return replace(head.kind, auto_class="AutoModelForTextEncoding") if alone else head.kind


__all__ = ["HEADS", "Head", "Reads", "kind_of"]
