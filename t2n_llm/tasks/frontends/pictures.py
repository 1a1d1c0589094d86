"""What all front ends of pictures share: pixels in a batch, their size, and pictures to check with.

In: transformers' image processor. Out: the input `pixels`, uint8 [B, H, W, 3], already of the size that the processor resizes to:
resampling stays outside, and the description says to which size, and with which filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from generic_export.torch_graph.request import DynamicAxes
from t2n_llm.tasks.frontends.kind import FrontEnd

PIXELS = "pixels"
"""uint8 [B, H, W, 3]: red, green, blue from 0 to 255."""

_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
_SETTINGS = ("rescale_factor", "image_mean", "image_std")
_HINT_BATCH = 3
_LARGEST_EDGE = 1 << 13
_DIVISOR = 32  # of sizes that processors of detectors leave as they are
_SQUEEZED_FROM = 384  # ConvNeXt's processor crops smaller pictures, and changes the shape of these


@dataclass(frozen=True)
class Geometry:
    """Sizes of pictures, height and width.

    Attributes:
        examples: two sizes that the processor leaves as they are; the same one twice where there is only one.
        rule: how the processor chooses a size, as plain data.
        crop: what it keeps of the middle; None for everything.
        pad: what it fills up to on the right and below, with zeros, once colours are scaled; None for nothing.
        asked: what the processor is told beside a picture, where it would do more to one of these sizes.
    """

    examples: tuple[tuple[int, int], tuple[int, int]]
    rule: Mapping[str, int]
    crop: tuple[int, int] | None = None
    pad: tuple[int, int] | None = None
    asked: Mapping[str, bool] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """Whether all pictures have one size."""
        return self.examples[0] == self.examples[1]


@dataclass(frozen=True)
class PictureFrontEnd(FrontEnd):
    """Pictures that somebody resized.

    Attributes:
        processor: of transformers.
        geometry: which sizes it leaves as they are.
    """

    processor: Any
    geometry: Geometry

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """See `FrontEnd`."""
        return {PIXELS: {0: "B"} if self.geometry.fixed else {0: "B", 1: "H", 2: "W"}}

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `FrontEnd`."""
        height, width = self.geometry.examples[1]
        return {PIXELS: torch.zeros(_HINT_BATCH, height, width, 3, dtype=torch.uint8, device="meta")}

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        sizes = ", ".join(map(str, self.geometry.examples[0])) if self.geometry.fixed else "H, W"
        number = getattr(self.processor, "resample", None)
        return {
            "inputs": {PIXELS: f"uint8 [B, {sizes}, 3]: red, green, blue, resized as `resize` says"},
            "resize": dict(self.geometry.rule) | {"filter": _FILTERS[int(number)] if number is not None else None},
            "crop": list(self.geometry.crop) if self.geometry.crop else None,
            "pad": list(self.geometry.pad) if self.geometry.pad else None,
            **{name: _plain(getattr(self.processor, name, None)) for name in _SETTINGS},
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def picture(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return uint8 [height, width, 3]: slopes and waves of colour under noise, as a photograph has edges and grain."""
    down, right = np.mgrid[:height, :width] / max(height, width)
    waves = np.stack([down, right, np.sin(9 * down * right + 5 * right)], axis=-1)
    noise = 0.15 * generator.standard_normal((height, width, 3))
    return np.asarray(np.clip(255 * (0.5 + 0.4 * waves * generator.uniform(-1, 1, 3) + noise), 0, 255), np.uint8)


def geometry_of(processor: Any) -> Geometry | None:
    """Return the sizes that an image processor leaves as they are; None where its config does not say."""
    tile = _edges(processor, "max_image_size").get("longest_edge")
    if tile and hasattr(processor, "do_image_splitting"):  # Idefics3 and SmolVLM cut a picture into tiles of one size
        asked = {"do_image_splitting": False, "do_resize": False}
        return Geometry(one_size(tile, tile), {"height": tile, "width": tile}, asked=asked)
    size, crop = _edges(processor, "size"), _crop_of(processor)
    if any(value > _LARGEST_EDGE for value in size.values()):
        return None  # these are numbers of pixels, by which Qwen's and others choose a grid
    if {"height", "width"} <= set(size):
        return Geometry(one_size(size["height"], size["width"]), size, crop)
    if "shortest_edge" in size:
        return _by_shortest_edge(processor, size, crop)
    longest = size.get("longest_edge")
    if longest is None:
        return None
    to = _edges(processor, "pad_size") if getattr(processor, "do_pad", False) else {}
    pad = (to["height"], to["width"]) if {"height", "width"} <= set(to) else None
    return Geometry(((longest, longest), (longest, longest * 3 // 4)), size, crop, pad)


def _by_shortest_edge(processor: Any, size: Mapping[str, int], crop: tuple[int, int] | None) -> Geometry:
    shortest, share, name = size["shortest_edge"], getattr(processor, "crop_pct", None), type(processor).__name__
    if name.startswith("ConvNext") and (shortest >= _SQUEEZED_FROM or share is None):
        return Geometry(one_size(shortest, shortest), {"height": shortest, "width": shortest})
    if name.startswith("ConvNext") and share is not None:
        shortest, crop = int(shortest / share), (shortest, shortest)
    elif name.startswith("PoolFormer") and share is not None:
        shortest = int(shortest / share)
    elif name.startswith("Levit"):
        shortest = int(256 / 224 * shortest)
    wider = shortest * 5 // 4
    wider = wider // _DIVISOR * _DIVISOR if wider // _DIVISOR * _DIVISOR > shortest else wider
    longest = min(size.get("longest_edge", wider), wider)
    return Geometry(((shortest, shortest), (shortest, longest)), {**size, "shortest_edge": shortest}, crop)


def _edges(processor: Any, name: str) -> dict[str, int]:
    stated = getattr(processor, name, None)
    if not stated or isinstance(stated, int):
        return {}
    return {edge: int(value) for edge, value in dict(stated).items() if value}


def one_size(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the examples of a `Geometry` without any other size."""
    return (height, width), (height, width)


def _crop_of(processor: Any) -> tuple[int, int] | None:
    if not getattr(processor, "do_center_crop", False):
        return None
    size = _edges(processor, "crop_size")
    edge = size.get("shortest_edge", 0)
    height, width = size.get("height", edge), size.get("width", edge)
    return (height, width) if height and width else None


__all__ = ["PIXELS", "Geometry", "PictureFrontEnd", "geometry_of", "one_size", "picture"]
