"""Which class of transformers a head is for a config: its auto class, or the one that the config names where that knows none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from t2n_llm.source.empty_model import ModelKind
from t2n_llm.tasks.heads.table import Head


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
    """Return the encoder alone of an encoder-decoder that transformers has one for (T5): the whole wants a text to answer with."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    alone = ENCODERS.get(config.model_type, "").endswith("EncoderModel")
    return replace(head.kind, auto_class="AutoModelForTextEncoding") if alone else head.kind


__all__ = ["kind_of"]
