"""What transformers' processor makes of images or sound, cut into what the encoder's archive takes one after the other.

In: the processor's output. Out: an array [N, ...], or an error that says which size fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.tasks.multimodal.family import Family

_MASK, _PLACES = "pixel_attention_mask", "image_position_ids"


def items_of(made: Mapping[str, Any], family: Family) -> tuple[np.ndarray, ...]:
    """Return the images or segments of a prompt, f32, each as the archive takes it (`Family.pixel_shape`).

    Args:
        made: by the processor.
        family: of the model.

    Raises:
        OptionError: the processor makes images of another size, or videos.
    """
    name, shape = family.medium.input_name, family.pixel_shape
    if made.get(name) is None:
        return ()
    processed = {key: np.asarray(made[key]) for key in (name, *family.known([shape])) if key in made}
    if family.free_axes:
        return family.split(processed)
    if family.pictures:
        processed[name] = _in_one_row(made, family)
    processed = _without_padding(processed, name)
    items = _split(processed[name].astype(np.float32), shape, family)
    if items is None or not _is_of_size(processed, family, [shape] * len(items)):
        raise _other_size(name, processed[name].shape, _kept_side(processed, name, shape, family), shape, family)
    return tuple(items)


def _in_one_row(made: Mapping[str, Any], family: Family) -> np.ndarray:
    """Return the numbers of all pictures of each image, [N, numbers]."""
    rows = []
    for name, shape in family.pictures.items():
        pictures = np.asarray(made.get(name))
        if pictures.shape[pictures.ndim - len(shape) :] != shape:
            raise _other_size(name, pictures.shape, None, shape, family)
        rows.append(pictures.reshape(-1, math.prod(shape)))
    return np.concatenate(rows, axis=1)


def _without_padding(processed: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return it without the rows that fill up images [N, rows, width] to the most that the model has."""
    if _MASK in processed:
        rows, counts = _MASK, (processed[_MASK] > 0).sum(axis=1)
    elif _PLACES in processed:
        rows, counts = _PLACES, (processed[_PLACES] >= 0).all(axis=-1).sum(axis=1)
    else:
        return dict(processed)
    most = int(counts.max())
    return {**processed, **{key: processed[key][:, :most] for key in (name, rows)}}


def _split(array: np.ndarray, shape: Sequence[int], family: Family) -> np.ndarray | None:
    """Return one image after the other; None where they have another shape."""
    axis = family.joined_axis()
    if array.ndim == len(shape) + 1 and len(array) == 1:  # the images of one text
        array = array[0]
    if family.stacks_images:
        return array.reshape(-1, *shape) if array.shape[-len(shape) :] == tuple(shape) else None
    if (
        array.ndim != len(shape)
        or _others(array.shape, axis) != _others(shape, axis)
        or array.shape[axis] % shape[axis]
    ):
        return None
    return np.stack(np.split(array, array.shape[axis] // shape[axis], axis))


def _others(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _is_of_size(processed: Mapping[str, np.ndarray], family: Family, shapes: Sequence[Sequence[int]]) -> bool:
    """Say whether the processor says of images what is a constant in the archive."""
    wanted = family.known(shapes)
    return all(np.array_equal(processed[name], np.asarray(wanted[name])) for name in wanted if name in processed)


def _kept_side(processed: Mapping[str, np.ndarray], name: str, shape: Sequence[int], family: Family) -> int | None:
    """Return the height and width that the processor gave square images; None where that does not follow from their shape."""
    side, array = family.image_side(), processed[name]
    if side is None:
        return None
    if len(shape) == 4:
        return int(array.shape[-1]) if shape[-1] == side and array.shape[-1] == array.shape[-2] else None
    images = next((len(value) for key, value in processed.items() if key != name), 1)
    rows = array.shape[-2] // (images if array.ndim == 2 else 1)
    found = side * math.sqrt(rows / shape[-2])
    return round(found) if math.isclose(found, round(found), abs_tol=1e-6) else None


def _other_size(name: str, found: Sequence[int], kept: int | None, shape: Sequence[int], family: Family) -> OptionError:
    side = family.image_side()
    size = "" if side is None else f", that of {side} x {side} pixels"
    message = f"the model's processor makes {name} of shape {list(found)}, and the archive takes {list(shape)}{size}."
    if side is None:
        return OptionError(message, "Use the preprocessor_config.json that belongs to the model.")
    wanted = "an --image-size that the processor keeps" if kept in (None, side) else f"--image-size {kept}"
    return OptionError(message, f"Export the model again with {wanted}.")


__all__ = ["items_of"]
