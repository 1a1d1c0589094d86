"""Patches with their row and column, of a picture with a mean and a deviation of its own, as Pix2Struct takes them.

In: `pixels` uint8 [1, H, W, 3], already of as many whole patches as the processor makes of its shape. Out: `flattened_patches` f32
[1, patches, 2 + height * width * 3 of a patch], row and column counted from 1, zeros after the last; `attention_mask` int64
[1, patches]. Source: transformers' `Pix2StructImageProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from generic_export.torch_graph.request import DynamicAxes
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.kind import FrontEndCase
from t2n_llm.tasks.frontends.pictures import PIXELS, Geometry, PictureFrontEnd, picture

_PATCHES, _MASK = "flattened_patches", "attention_mask"
_LEAST = 1e-6  # of the deviation: all pixels of a picture are alike, or it is far greater


class NumberedPatches(nn.Module):
    """`pixels -> (flattened_patches, attention_mask)`."""

    def __init__(self, patch: tuple[int, int], count: int, *, normalizes: bool) -> None:
        """Take the height and width of a patch, and how many there are, empty ones included."""
        super().__init__()
        self.patch, self.count = patch, count
        self.normalizes = normalizes

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [1, patches, 2 + width] and int64 [1, patches]."""
        height, width = self.patch
        grid = pixels.unfold(1, height, height).unfold(2, width, width)  # [1, rows, columns, colour, down, right]
        content = grid.permute(0, 1, 2, 4, 5, 3).flatten(3).float()
        content = self._normalised(content) if self.normalizes else content
        ones = torch.ones_like(content[..., :1])
        row = torch.arange(1, content.shape[1] + 1, device=pixels.device)[None, :, None, None] * ones
        column = torch.arange(1, content.shape[2] + 1, device=pixels.device)[None, None, :, None] * ones
        rows = torch.cat((row, column, content, ones), dim=3).flatten(1, 2)
        filled = torch.cat((rows, rows.new_zeros(1, self.count, rows.shape[2])), dim=1)[:, : self.count]
        return filled[..., :-1], filled[..., -1].long()

    @staticmethod
    def _normalised(values: torch.Tensor) -> torch.Tensor:
        exact = values.double()  # a million values are added one after the other
        centred = exact - exact.mean((1, 2, 3), keepdim=True)
        deviation = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
        return (centred / deviation.clamp(min=_LEAST)).float()


@dataclass(frozen=True)
class NumberedPatchRows(PictureFrontEnd):
    """`NumberedPatches` beside its processor."""

    kind: ClassVar[str] = "numbered-patches"

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return _PATCHES, _MASK

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """See `FrontEnd`: one picture at a time, for each has a shape of its own."""
        return {PIXELS: {1: "H", 2: "W"}}

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `FrontEnd`."""
        return {PIXELS: super().inputs()[PIXELS][:1]}

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        normalizes = bool(self.processor.do_normalize)
        return NumberedPatches(_patch(self.processor), int(self.processor.max_patches), normalizes=normalizes)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        height, width = _patch(self.processor)
        return {
            "inputs": {PIXELS: "uint8 [1, H, W, 3]: red, green, blue, resized as `resize` says"},
            "resize": {
                "rows": f"floor(sqrt(max_patches * {width} * H / ({height} * W))), H and W of the original image",
                "columns": f"floor(sqrt(max_patches * {height} * W / ({width} * H)))",
                "height": f"{height} * rows",
                "width": f"{width} * columns",
                "filter": "bilinear",
            },
            "max_patches": int(self.processor.max_patches),
        }

    def cases(self, generator: np.random.Generator) -> tuple[FrontEndCase, ...]:
        """See `FrontEnd`: two shapes, and a picture without a difference."""
        shown = [picture(generator, *size) for size in self.geometry.examples]
        shown.append(np.full_like(shown[0], 77))
        return tuple(
            FrontEndCase(f"{self.kind} of {name}", (each[None],), self._said(each))
            for name, each in zip(("a wide image", "a tall image", "an empty image"), shown, strict=True)
        )

    def _said(self, shown: np.ndarray) -> tuple[np.ndarray, ...]:
        said = self.processor([shown], return_tensors="np")
        return np.asarray(said[_PATCHES], np.float32), np.asarray(said[_MASK]).astype(np.int64)


def _patch(processor: Any) -> tuple[int, int]:
    size = dict(processor.patch_size)
    return int(size["height"]), int(size["width"])


def numbered_patches(processor: Any, config: Any, options: GraphOptions) -> NumberedPatchRows | None:
    """Return the front end of a `Pix2StructImageProcessor`; None for one that writes the question over the picture."""
    del config, options
    if getattr(processor, "is_vqa", False):
        return None
    (height, width), count = _patch(processor), int(processor.max_patches)
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    columns = count // rows
    examples = ((rows * height, columns * width), (columns * height, rows * width))  # these leave no patch empty
    return NumberedPatchRows(processor, Geometry(examples, {}))


__all__ = ["NumberedPatchRows", "NumberedPatches", "numbered_patches"]
