"""Recordings of any length. The archive takes one at a time and reads its length from the shape.

In: an encoder that runs without weights. Out: how a recording is passed, and how many rows of embeddings it becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad

from generic_export.torch_graph.request import DynamicSize


@dataclass(frozen=True)
class RowCount:
    """How many rows a recording of length T becomes: `rows * ((T + offset) // divisor)`.

    A convolution with a stride maps T to (T + a) // b, and so does any sequence of them.
    """

    rows: int
    offset: int
    divisor: int

    def __call__(self, length: int) -> int:
        """Return the rows of a recording."""
        return self.rows * ((length + self.offset) // self.divisor)

    @property
    def least(self) -> int:
        """The smallest length that becomes a row."""
        return max(1, self.divisor - self.offset)

    def __str__(self) -> str:
        """As `export.json` says it."""
        time = f"T{self.offset:+}" if self.offset else "T"
        whole = f"({time})/{self.divisor}" if self.offset else f"{time}/{self.divisor}"
        whole = time if self.divisor == 1 else whole
        return f"{self.rows}*({whole})" if self.rows > 1 else whole


def find_row_count(count: Callable[[int], int], length: int, far: int) -> RowCount | None:
    """Return how the number of rows follows from the length of a recording; None if `RowCount` does not describe it.

    Args:
        count: returns the rows for a length, 0 for one that the encoder does not take.
        length: the first length to try.
        far: above the square of the divisor, and no more than the encoder takes beyond `length`.
    """
    count = cache(count)
    low, high = length, length + 1
    while count(high) == count(length):
        if high - length > far:
            return None
        low, high = high, high + 2 * (high - length)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) == count(length) else (low, middle)
    step = count(high) - count(length)
    if step < 1 or count(high) % step or count(high + far) <= count(high):
        return None
    divisor = far * step // (count(high + far) - count(high))
    found = RowCount(step, count(high) // step * divisor - high, divisor)
    return found if all(found(other) == count(other) for other in (length, high + divisor - 1, high + far)) else None


@dataclass(frozen=True)
class AnyLengthSound:
    """A recording as the model takes it alone, of any length.

    Attributes:
        shape: in the archive, with one length.
        axis: the one of the time.
        mask_name: the argument that says which steps are not padding; None where there is none.
        row_rule: how many rows of embeddings it becomes.
        masks_encoder: whether the encoder needs the mask for a recording without padding.
        far: see `find_row_count`.
    """

    input_description: ClassVar[str] = "one recording as the model's processor makes it, without padding"

    shape: tuple[int, ...]
    axis: int
    mask_name: str | None
    row_rule: RowCount | int
    masks_encoder: bool = True
    far: int = 1024

    @property
    def row_count(self) -> str | int:
        """See `FreeForm`."""
        return self.row_rule if isinstance(self.row_rule, int) else str(self.row_rule)

    @property
    def axes(self) -> Mapping[int, DynamicSize]:
        """See `FreeForm`."""
        least = 1 if isinstance(self.row_rule, int) else self.row_rule.least
        return {self.axis: DynamicSize("T", min=least if least > 1 else None)}

    def example(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `FreeForm`."""
        del shape
        return self.shape

    def for_encoder(self, shape: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
        """See `FreeForm`."""
        return self.known([shape], device) if self.masks_encoder else {}

    def known(self, shapes: Sequence[Sequence[int]], device: Any = None) -> dict[str, torch.Tensor]:
        """See `FreeForm`: the mask, True before the end of each recording."""
        if self.mask_name is None:
            return {}
        lengths = [shape[self.axis] for shape in shapes]
        if len(lengths) == 1:
            return {self.mask_name: torch.ones((1, lengths[0]), dtype=torch.bool, device=device)}
        steps = torch.arange(max(lengths), device=device)
        return {self.mask_name: steps < torch.tensor(lengths, device=device)[:, None]}

    def flat(self, image: torch.Tensor) -> torch.Tensor:
        """See `FreeForm`."""
        return image

    def joined(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `FreeForm`: padded with zeros to the longest."""
        longest, after = max(image.shape[self.axis] for image in images), len(self.shape) - 1 - self.axis
        filled = [pad(image, (*(0, 0) * after, 0, longest - image.shape[self.axis])) for image in images]
        return torch.cat(filled)

    def rows(self, shape: Sequence[int]) -> int:
        """See `FreeForm`."""
        return self.row_rule if isinstance(self.row_rule, int) else self.row_rule(shape[self.axis])

    def split(self, processed: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, ...] | None:
        """See `FreeForm`."""
        batch = processed[name]
        if self.mask_name is None or self.mask_name not in processed:
            return tuple(batch[index : index + 1] for index in range(len(batch)))
        lengths = (processed[self.mask_name] > 0).sum(axis=1)
        recordings = zip(np.split(batch, len(batch)), lengths, strict=True)
        return tuple(np.split(recording, [length], self.axis)[0] for recording, length in recordings)


def fills_up_sound(network: Any) -> bool:
    """Say whether a model fills up the rows of each recording to one number (Gemma 3n)."""
    return hasattr(getattr(network.base_model, "embed_audio", None), "vocab_offset")


def filled_up_sound(network: Any, features: torch.Tensor) -> torch.Tensor:
    """Return the rows [rows, D] of a recording [1, T, bands] without padding, filled up as Gemma 3n's forward does."""
    model, count = network.base_model, network.config.audio_soft_tokens_per_image
    padding = torch.zeros(features.shape[:2], dtype=torch.bool, device=features.device)
    rows = model.get_audio_features(features, padding, return_dict=True).pooler_output
    filler = model.embed_audio(input_ids=torch.tensor([[model.vocab_size - 1]], device=features.device))
    return torch.cat((rows, filler.expand(1, count, -1)), dim=1)[0, :count]


__all__ = ["AnyLengthSound", "RowCount", "filled_up_sound", "fills_up_sound", "find_row_count"]
