"""Which class of transformers a head is for a config: its auto class, or the one that the config names where that knows none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from t2n_llm.source.empty_model import ModelKind
from t2n_llm.tasks.heads.table import Head, Reads


def kind_of(head: Head, config: Any) -> ModelKind:
    """Return what transformers should make of a config.

    Time series have no auto class for most of their heads: the class is the first of the config's `architectures`.
    """
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    if head.reads is Reads.SERIES and named is not None and hasattr(transformers, named):
        return replace(head.kind, auto_class=named)
    return head.kind


__all__ = ["kind_of"]
