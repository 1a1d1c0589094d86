"""The feature extractor and the image processor that a source has, as transformers makes them of its preprocessor config.

In: a source. Out: transformers' objects; none where the source has no such config, or transformers cannot build them here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from t2n_llm.source.hub import ModelSource

logger = logging.getLogger(__name__)

_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_AUTO_CLASSES = ("AutoFeatureExtractor", "AutoImageProcessor")


def own_processors(source: ModelSource) -> Iterator[Any]:
    """Yield the feature extractor, then the image processor of a source, those that there are."""
    import transformers

    if source.gguf is not None or not any((source.folder / name).is_file() for name in _CONFIGS):
        return
    for auto_class in _AUTO_CLASSES:
        try:
            yield getattr(transformers, auto_class).from_pretrained(
                source.folder, local_files_only=True, trust_remote_code=source.trust_remote_code
            )
        except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
            # The config is of the other kind, or its class needs a package that is not installed.
            logger.debug("%s: %s: %s", source.name, auto_class, error)


__all__ = ["own_processors"]
