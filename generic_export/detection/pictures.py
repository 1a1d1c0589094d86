"""What a detector does with a picture before its network, and with boxes after it, for pictures of one size."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generic_export.errors import OptionError

Size = tuple[int, int]
"""Height and width."""


class PictureFrame(nn.Module):
    """torchvision's `GeneralizedRCNNTransform` for pictures of one size: colours, another size, zeros at the right and below.

    Args:
        transform: the detector's own; its sizes and colours are read, it is not changed.
        size: of the pictures.

    Attributes:
        size: of the pictures.
        network_size: of the resized picture, where boxes are clipped.
        padded_size: of what the network is given.

    Raises:
        OptionError: the size is not one of a picture.
    """

    ratios: torch.Tensor

    def __init__(self, transform: Any, size: Size) -> None:
        super().__init__()
        if len(size) != 2 or min(size) < 1:
            raise OptionError(
                f"size={size!r} is not a height and a width.", "Use the size of the images, such as (480, 640)."
            )
        self.transform, self.size = transform, (int(size[0]), int(size[1]))
        height, width = transform.resize(torch.zeros(3, *self.size))[0].shape[-2:]
        self.network_size: Size = (height, width)
        step = transform.size_divisible
        self.padded_size: Size = (math.ceil(height / step) * step, math.ceil(width / step) * step)
        # Quotients of f32 numbers, as torchvision takes them.
        ratios = torch.tensor(self.size, dtype=torch.float32) / torch.tensor(self.network_size, dtype=torch.float32)
        self.register_buffer("ratios", ratios.flip(0).repeat(2), persistent=False)  # of x and y, twice

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """Return what the network is given, [1, 3, padded height, padded width], of a picture [1, 3, height, width]."""
        resized = self.transform.resize(self.transform.normalize(picture[0]))[0]
        height, width = (padded - size for padded, size in zip(self.padded_size, self.network_size, strict=True))
        return F.pad(resized, (0, width, 0, height)).unsqueeze(0)

    def clipped(self, boxes: torch.Tensor) -> torch.Tensor:
        """Return boxes [..., 4] cut at the edges of the resized picture."""
        height, width = self.network_size
        x1, y1, x2, y2 = boxes.unbind(-1)
        across, down = (
            [side.clamp(0, limit) for side in sides] for sides, limit in (((x1, x2), width), ((y1, y2), height))
        )
        return torch.stack([across[0], down[0], across[1], down[1]], -1)

    def on_picture(self, boxes: torch.Tensor) -> torch.Tensor:
        """Return boxes of the resized picture [K, 4] as boxes of the picture."""
        return boxes * self.ratios


__all__ = ["PictureFrame", "Size"]
