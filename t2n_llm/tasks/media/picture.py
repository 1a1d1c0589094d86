"""Pictures as pixels: whatever Pillow reads, upright, in red, green and blue.

In: a path. Out: uint8 [H, W, 3]; and, where a front end wants a size, the same picture in that size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from generic_export.errors import MissingExtraError, OptionError


def read_image(path: str | Path, size: tuple[int, int] | None = None, filter_name: str = "bicubic") -> np.ndarray:
    """Read a picture.

    Args:
        path: of a PNG, a JPEG, or another file that Pillow reads.
        size: height and width that are wanted; None keeps its own.
        filter_name: how it gets them: `nearest`, `lanczos`, `bilinear`, `bicubic`, `box` or `hamming`, with antialiasing.

    Returns:
        uint8 [H, W, 3].

    Raises:
        MissingExtraError: Pillow is not installed.
        OptionError: there is no such file, or it is no picture.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError(
            "reading images needs Pillow.", "Install it with pip install 't2n-llm[images]'."
        ) from error
    path = Path(path)
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError as error:
        raise OptionError(f"{path}: not an image.", "Use a PNG or JPEG file.") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise OptionError(f"{path}: cannot be read: {reason}.", "Use a complete PNG or JPEG file.") from error
    if size is not None:
        picture = picture.resize((size[1], size[0]), Image.Resampling[filter_name.upper()])
    return np.asarray(picture)


__all__ = ["read_image"]
