"""Images of any height and width. The archive takes one image at a time and reads its size from the shape.

In: the shape of an image, with sizes that may be symbolic. Out: what a model takes; and the way back from what transformers'
processor makes of several images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from generic_export.torch_graph.request import DynamicSize

_MOST_ROWS = 8  # of embeddings, in each direction of an example


class FreeForm(Protocol):
    """How images of any height and width are passed: one in the archive, and the same for the model."""

    input_description: ClassVar[str]
    """What the archive takes."""

    @property
    def row_count(self) -> str | int:
        """How many rows of embeddings an image becomes: a formula of the names of its sizes, or a number."""

    @property
    def axes(self) -> Mapping[int, DynamicSize]:
        """The axes of an image that may have any size."""

    def example(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a square image in the archive, for the shape in which the model takes it."""

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """Return the other arguments for images of these shapes, whose sizes may be symbolic."""

    def for_encoder(self, shape: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
        """Return those of them that the encoder of one image needs."""

    def flat(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image as the model takes it alone."""

    def joined(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return several images as the model takes them."""

    def rows(self, shape: Sequence[int]) -> int:
        """Return how many rows of embeddings an image becomes."""

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """Return one image after the other, as the archive takes it; None where one is a video.

        Args:
            processed: by the processor.
            name: of the images in it.
        """


@dataclass(frozen=True)
class PatchGrid:
    """Rows of patches with the size of their grid: [H, W, joined patches, ...] in the archive.

    Attributes:
        name: the argument that says how many patches each image has in each direction.
        merge: how many of them in each direction become one row of embeddings.
        timed: whether their number of frames is said before.
        merge_name: the argument that says `merge` for each image; None where there is none.
    """

    input_description: ClassVar[str] = (
        "one image: the rows that the model's processor makes of its H*m x W*m patches, reshaped. The third size is m*m"
    )

    name: str
    merge: int
    timed: bool
    merge_name: str | None = None

    @property
    def row_count(self) -> str:
        """See `FreeForm`."""
        return "H*W"

    @property
    def axes(self) -> Mapping[int, DynamicSize]:
        """See `FreeForm`."""
        return {0: DynamicSize("H"), 1: DynamicSize("W")}

    def example(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `FreeForm`."""
        side = min(math.isqrt(shape[0]) // self.merge, _MOST_ROWS)
        return (side, side, self.merge**2, *shape[1:])

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """See `FreeForm`."""
        frames = [1] if self.timed else []
        grids = [[*frames, self.merge * height, self.merge * width] for height, width, *_ in shapes]
        known = {self.name: torch.tensor(grids, device=device)}
        if self.merge_name is not None:
            known[self.merge_name] = torch.tensor([self.merge] * len(shapes), device=device)
        return known

    def for_encoder(self, shape: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
        """See `FreeForm`: all of them."""
        return self.known([shape], device)

    def flat(self, image: torch.Tensor) -> torch.Tensor:
        """See `FreeForm`."""
        return image.flatten(0, 2)

    def joined(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `FreeForm`."""
        return torch.cat([self.flat(image) for image in images])

    def rows(self, shape: Sequence[int]) -> int:
        """See `FreeForm`."""
        return shape[0] * shape[1]

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """See `FreeForm`."""
        grids, rows = processed[self.name], processed[name]
        sizes = [(int(height) // self.merge, int(width) // self.merge) for *_, height, width in grids]
        if self.timed and (grids[:, 0] != 1).any():
            return None
        ends = np.cumsum([height * width * self.merge**2 for height, width in sizes])
        parts = zip(np.split(rows, ends[:-1]), sizes, strict=True)
        return tuple(part.reshape(*size, self.merge**2, *rows.shape[1:]) for part, size in parts)


@dataclass(frozen=True)
class MaskedPatches:
    """Rows of patches [1, patches, width], filled up to the longest image (SigLIP 2): [H, W, width] in the archive.

    Attributes:
        merge: how many patches in each direction become one row of embeddings.
    """

    input_description: ClassVar[str] = (
        "one image: the rows that the model's processor makes of its H x W patches, reshaped, without those that fill it up"
    )

    merge: int

    @property
    def row_count(self) -> str:
        """See `FreeForm`."""
        return f"H*W/{self.merge**2}"

    @property
    def axes(self) -> Mapping[int, DynamicSize]:
        """See `FreeForm`."""
        return {axis: DynamicSize(name, multiple_of=self.merge) for axis, name in enumerate("HW")}

    def example(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `FreeForm`."""
        _, patches, width = shape
        side = min(math.isqrt(patches), _MOST_ROWS * self.merge)
        return (side, side, width)

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """See `FreeForm`."""
        sizes = torch.tensor([[*shape[:2]] for shape in shapes], device=device)
        masks = [torch.ones(height * width, dtype=torch.int64, device=device) for height, width, *_ in shapes]
        mask = masks[0][None] if len(masks) == 1 else torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        return {"spatial_shapes": sizes, "pixel_attention_mask": mask}

    def for_encoder(self, shape: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
        """See `FreeForm`: all of them."""
        return self.known([shape], device)

    def flat(self, image: torch.Tensor) -> torch.Tensor:
        """See `FreeForm`."""
        return image.flatten(0, 1)[None]

    def joined(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `FreeForm`."""
        rows = [image.flatten(0, 1) for image in images]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def rows(self, shape: Sequence[int]) -> int:
        """See `FreeForm`."""
        return shape[0] * shape[1] // self.merge**2

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """See `FreeForm`."""
        pairs = zip(processed[name], processed["spatial_shapes"], strict=True)
        return tuple(rows[: height * width].reshape(height, width, -1) for rows, (height, width) in pairs)


@dataclass(frozen=True)
class PlacedPatches(MaskedPatches):
    """The same, with the column and row of each patch (Gemma 4)."""

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """See `FreeForm`."""
        places = [_places(height, width, device) for height, width, *_ in shapes]
        return {"image_position_ids": torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)}

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """See `FreeForm`."""
        pairs = zip(processed[name], processed["image_position_ids"], strict=True)
        sizes = [(rows, *(places.max(axis=0) + 1)) for rows, places in pairs]
        return tuple(rows[: height * width].reshape(height, width, -1) for rows, width, height in sizes)


def _places(height: Any, width: Any, device: Any) -> torch.Tensor:
    """Return the column and row of each patch, [patches, 2]."""
    columns = torch.arange(width, device=device)[None].expand(height, width)
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    return torch.stack((columns.flatten(), rows.flatten()), dim=-1)


@dataclass(frozen=True)
class SizedPixels:
    """Pixels [1, C, H, W] and their size, filled up to the largest image (Pixtral).

    Attributes:
        unit: how many of them in each direction become one row of embeddings.
    """

    input_description: ClassVar[str] = (
        "one image as the model's processor makes it, without what fills it up to the size of larger ones"
    )

    unit: int

    @property
    def row_count(self) -> str:
        """See `FreeForm`."""
        return f"(H/{self.unit})*(W/{self.unit})"

    @property
    def axes(self) -> Mapping[int, DynamicSize]:
        """See `FreeForm`."""
        return {axis: DynamicSize(name, multiple_of=self.unit) for axis, name in ((2, "H"), (3, "W"))}

    def example(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `FreeForm`."""
        return tuple(shape)

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """See `FreeForm`."""
        return {"image_sizes": torch.tensor([[*shape[2:]] for shape in shapes], device=device)}

    def for_encoder(self, shape: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
        """See `FreeForm`: all of them."""
        return self.known([shape], device)

    def flat(self, image: torch.Tensor) -> torch.Tensor:
        """See `FreeForm`."""
        return image

    def joined(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `FreeForm`."""
        height, width = (max(image.shape[axis] for image in images) for axis in (2, 3))
        return torch.cat([pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in images])

    def rows(self, shape: Sequence[int]) -> int:
        """See `FreeForm`."""
        return shape[2] // self.unit * (shape[3] // self.unit)

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """See `FreeForm`."""
        pairs = zip(processed[name], processed["image_sizes"], strict=True)
        return tuple(pixels[None, :, :height, :width] for pixels, (height, width) in pairs)


__all__ = ["FreeForm", "MaskedPatches", "PatchGrid", "PlacedPatches", "SizedPixels"]
