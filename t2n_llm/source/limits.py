"""Sizes that no model has: refused before anything is built of them, which would take hours or all memory.

In: what config.json says. Out: nothing, or an error with the option that lifts the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generic_export.errors import SourceError

_MOST_NESTED = 8  # configs in configs
_COUNTS_OF_LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "block_count"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)


def refuse_layers(name: str, file: Path, most: int) -> None:
    """Refuse a `config.json` of more layers; what is wrong with it otherwise transformers says.

    Args:
        name: of the model.
        file: the config.
        most: layers that it may have.

    Raises:
        SourceError: it has more.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict):
        refuse_counts(name, content, most)


def refuse_counts(name: str, content: Mapping[str, Any], most: int) -> None:
    """Refuse counts of layers beyond `most`, in a table or in those inside of it; `name` is the model's.

    Raises:
        SourceError: there is one.
    """
    for key, count in _counts(content, 0):
        if count > most:
            shown = str(count) if count < 10**15 else f"{float(min(count, 1 << 1000)):.3g}"
            raise SourceError(
                f"{name}: {key} is {shown}; models of more than {most} layers are not built.",
                f"Correct config.json; if the number is right, pass --max-layers {shown if count < 10**15 else 'N'}.",
            )


def _counts(content: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    for key, value in content.items():
        if isinstance(value, dict) and depth < _MOST_NESTED:
            yield from _counts(value, depth + 1)
        elif str(key).rpartition(".")[2] in _COUNTS_OF_LAYERS and isinstance(value, int | float) and value == value:
            yield str(key), int(min(value, 1 << 1000))


__all__ = ["refuse_counts", "refuse_layers"]
