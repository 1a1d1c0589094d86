"""Pixels as rows of patches, for families whose processor flattens them: Qwen-VL from 2 to 3.5, GLM-4V, Ernie-VL and others.

In: `pixels` uint8 [1, S, S, 3], one picture of the size that the export is made for (`--image-size`). Out: `pixel_values`
f32 [patches, channels * frames * height * width of a patch], neighbours that the encoder joins one after the other.
Source: transformers' `Qwen2VLImageProcessor`; a processor that answers otherwise has no front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from generic_export.torch_graph.request import DynamicAxes
from t2n_llm.graph.options import DEFAULT_IMAGE_SIZE, GraphOptions
from t2n_llm.tasks.frontends.kind import FrontEndCase
from t2n_llm.tasks.frontends.pictures import PIXELS, Geometry, PictureFrontEnd, one_size, picture
from t2n_llm.tasks.frontends.pixels import agrees

_VALUES = "pixel_values"
_CHANNELS = 3


class Patches(nn.Module):
    """`pixels -> pixel_values`."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, processor: Any, side: int) -> None:
        """Take a processor's sizes and colours, for pictures of `side` pixels in both directions."""
        super().__init__()
        self.patch, self.merge = int(processor.patch_size), int(processor.merge_size)
        self.frames = int(processor.temporal_patch_size)
        self.groups = side // (self.patch * self.merge)
        mean, std = (np.array(colours, np.float64) for colours in (processor.image_mean, processor.image_std))
        self.register_buffer("scale", torch.from_numpy(processor.rescale_factor / std).float()[:, None, None])
        self.register_buffer("offset", torch.from_numpy(-mean / std).float()[:, None, None])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return f32 [patches, width] for uint8 [1, S, S, 3]."""
        groups, merge, patch = self.groups, self.merge, self.patch
        grid = pixels.reshape(groups, merge, patch, groups, merge, patch, _CHANNELS)  # rows, columns, colour
        # Bytes are put in order, and become numbers after that: a quarter to move.
        rows = grid.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3).float() * self.scale + self.offset
        frames = rows[:, :, None].expand(-1, -1, self.frames, -1, -1)  # a picture stands still
        return frames.flatten(1)


@dataclass(frozen=True)
class PatchRows(PictureFrontEnd):
    """`Patches` beside its processor."""

    kind: ClassVar[str] = "patches"

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_VALUES,)

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """See `FrontEnd`: one picture at a time, as the encoder takes them."""
        return {}

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `FrontEnd`."""
        return {PIXELS: super().inputs()[PIXELS][:1]}

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return Patches(self.processor, self.geometry.examples[0][0])

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        names = ("patch_size", "merge_size", "temporal_patch_size")
        said = super().described()
        text = said["inputs"][PIXELS].replace("[B,", "[1,")
        return {**said, "inputs": {PIXELS: text}} | {name: int(getattr(self.processor, name)) for name in names}

    def cases(self, generator: np.random.Generator) -> tuple[FrontEndCase, ...]:
        """See `FrontEnd`: two pictures."""
        height, width = self.geometry.examples[0]
        shown = [picture(generator, height, width) for _ in range(2)]
        return tuple(
            FrontEndCase(f"{self.kind} of {name} {height} x {width}", (each[None],), (self._said(each),))
            for name, each in zip(("one", "another"), shown, strict=True)
        )

    def _said(self, shown: np.ndarray) -> np.ndarray:
        return np.asarray(self.processor([shown], return_tensors="np")[_VALUES], np.float32)


def patch_rows(processor: Any, config: Any, options: GraphOptions) -> PatchRows | None:
    """Return the front end of a processor that flattens patches; None where it would resize pictures of the export's size."""
    del config
    side = options.image_size or DEFAULT_IMAGE_SIZE
    if side % (int(processor.patch_size) * int(processor.merge_size)):
        return None
    front = PatchRows(processor, Geometry(one_size(side, side), {"height": side, "width": side}))
    return front if agrees(front) else None


def flattens_patches(processor: Any) -> bool:
    """Say whether a processor has the settings of one that does."""
    sizes = (getattr(processor, name, None) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    colours = (getattr(processor, name, None) for name in ("rescale_factor", "image_mean", "image_std"))
    return all(isinstance(size, int) for size in sizes) and all(colours)


__all__ = ["PatchRows", "Patches", "flattens_patches", "patch_rows"]
