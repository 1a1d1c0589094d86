"""How large images are: what the user says, else the model's config, else what its processor makes of images.

In: a config, the folder with the processor's settings. Out: height and width in pixels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from t2n_llm.tasks.heads.inputs import IMAGE_SIDE, parts_of

PROCESSOR_FILE = "preprocessor_config.json"
_COMBINED_FILE = "processor_config.json"  # newer transformers releases save all settings of a processor here


def image_size_of(config: Any, folder: Path | None, wanted: int | None = None) -> tuple[int, int]:
    """Return height and width of the images that a model is given.

    Args:
        config: transformers config.
        folder: of the checkpoint; None looks at the config alone.
        wanted: what the user asks for, of square images.
    """
    if wanted is not None:
        return wanted, wanted
    ratios = getattr(config, "scaled_images_ratios", None)
    if ratios:  # Depth Pro: what its parts call an image is a patch; the smallest copy of the image is one of those
        side = round(config.patch_size / min(ratios))
        return side, side
    for part in parts_of(config):
        size = _pair(getattr(part, "image_size", None))
        if size is not None:
            return size
    return processed_size(folder) or (IMAGE_SIDE, IMAGE_SIDE)


def processed_size(folder: Path | None) -> tuple[int, int] | None:
    """Return height and width that a processor crops or pads to, or resizes to where it does neither; None if none is said.

    Args:
        folder: with the processor's settings; None for none.
    """
    if folder is None:
        return None
    settings = _settings(folder / PROCESSOR_FILE) or _settings(folder / _COMBINED_FILE).get("image_processor") or {}
    crops = settings.get("crop_size") if settings.get("do_center_crop") else None
    found = (_pair(each) for each in (crops, settings.get("pad_size"), settings.get("size")))
    return next((size for size in found if size is not None), None)


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _pair(size: Any) -> tuple[int, int] | None:
    """Read a size in one of the forms that configs have; None for none."""
    if isinstance(size, dict):
        side = size.get("shortest_edge")
        size = (size.get("height", side), size.get("width", side))
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    pair = tuple(size) if isinstance(size, (list, tuple)) else ()
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        return None
    return pair[0], pair[1]


__all__ = ["PROCESSOR_FILE", "image_size_of", "processed_size"]
