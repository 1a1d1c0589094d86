"""Pixels cut, scaled and shifted: what image processors do beside resizing, for every family whose processor does no more.

In: `pixels` uint8 [B, H, W, 3]. Out: `pixel_values` f32 [B, 3, h, w]. What the processor does to colours is asked of itself: it is
shown black, red, green and blue. Where it answers two pictures otherwise than this graph would, there is no front end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.kind import FrontEndCase
from t2n_llm.tasks.frontends.pictures import Geometry, PictureFrontEnd, geometry_of, picture

_VALUES = "pixel_values"
_AS_GIVEN, _BACKWARDS = (0, 1, 2), (2, 1, 0)
_OWN_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ImportError)
"""Whatever the code of a processor raises, which is asked for what it may not be made for."""

_EXACT = 2e-5  # of the largest value: what is left when the formula is the processor's own


@dataclass(frozen=True)
class Colours:
    """What becomes of red, green and blue.

    Attributes:
        order: which of them each output channel is.
        scale, offset: of each output channel.
    """

    order: tuple[int, int, int]
    scale: tuple[float, ...]
    offset: tuple[float, ...]


class Pixels(nn.Module):
    """`pixels -> pixel_values`."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, colours: Colours, geometry: Geometry) -> None:
        """Take what is done to colours, and to the height and the width."""
        super().__init__()
        self.order = colours.order
        self.crop, self.pad = geometry.crop, geometry.pad
        self.register_buffer("scale", torch.tensor(colours.scale)[:, None, None])
        self.register_buffer("offset", torch.tensor(colours.offset)[:, None, None])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return f32 [B, 3, h, w]."""
        if self.crop is not None:
            for axis, size in zip((1, 2), self.crop, strict=True):
                kept = torch.arange(size, device=pixels.device) + (pixels.shape[axis] - size) // 2
                pixels = pixels.index_select(axis, kept)  # a slice of a size that no symbol hides
        if self.order == _BACKWARDS:
            pixels = pixels.flip(3)
        values = pixels.permute(0, 3, 1, 2).float() * self.scale + self.offset
        for axis, size in zip((2, 3), self.pad or (), strict=False):
            shape = [size if each == axis else length for each, length in enumerate(values.shape)]
            values = torch.cat((values, values.new_zeros(shape)), dim=axis).narrow(axis, 0, size)
        return values


@dataclass(frozen=True)
class PlainPixels(PictureFrontEnd):
    """`Pixels` beside its processor."""

    kind: ClassVar[str] = "pixels"

    colours: Colours

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_VALUES,)

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return Pixels(self.colours, self.geometry)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "scale": list(self.colours.scale), "offset": list(self.colours.offset)}

    def cases(self, generator: np.random.Generator) -> tuple[FrontEndCase, ...]:
        """See `FrontEnd`: a picture, and two together, of another size where there is one."""
        one, other = self.geometry.examples
        pictures = [picture(generator, *other)], [picture(generator, *one) for _ in range(2)]
        return tuple(
            FrontEndCase(
                f"{self.kind} of {len(shown)} x {shown[0].shape[0]} x {shown[0].shape[1]}",
                (np.stack(shown),),
                (np.concatenate([_answer(self.processor, self.geometry, each) for each in shown]),),
            )
            for shown in pictures
        )


def plain_pixels(processor: Any, config: Any, options: GraphOptions) -> PlainPixels | None:
    """Return the front end of an image processor that does no more than crop, scale and shift; None for any other."""
    del config, options
    geometry = geometry_of(processor)
    colours = _colours(processor, geometry) if geometry is not None else None
    if geometry is None or colours is None:
        return None
    front = PlainPixels(processor, geometry, colours)
    return front if agrees(front) else None


def _answer(processor: Any, geometry: Geometry, shown: np.ndarray) -> np.ndarray:
    """Return what a processor makes of one picture uint8 [H, W, 3]: f32 [1, channels, h, w].

    Raises:
        ValueError: it makes several pictures of it, or none.
    """
    values = np.asarray(processor([shown], return_tensors="np", **geometry.asked)[_VALUES], np.float32)
    return values.reshape(1, *values.shape[-3:])


def _colours(processor: Any, geometry: Geometry) -> Colours | None:
    """Show a processor a picture of a black, a red, a green and a blue quarter; None where each is not a channel of its own."""
    height, width = geometry.examples[0]
    shown = np.zeros((height, width, 3), np.uint8)
    above, left = slice(0, height // 2), slice(0, width // 2)
    below, right = slice(height // 2, None), slice(width // 2, None)
    for channel, place in enumerate(((above, right), (below, left), (below, right))):
        shown[(*place, channel)] = 255
    try:
        (said,) = _answer(processor, geometry, shown)
    except _OWN_ERRORS:
        return None
    channels, rows, columns = said.shape
    if channels != 3 or (rows, columns) != (geometry.crop or geometry.pad or (height, width)):
        return None
    quarters = said[:, rows // 4 :: rows // 2, columns // 4 :: columns // 2][:, :2, :2].reshape(3, 4).astype(np.float64)
    response = (quarters[:, 1:] - quarters[:, :1]) / 255  # [channel, colour]
    order = tuple(int(colour) for colour in np.abs(response).argmax(axis=1))
    if order not in (_AS_GIVEN, _BACKWARDS):
        return None
    scale = tuple(float(response[channel, colour]) for channel, colour in enumerate(order))
    return Colours(order, scale, tuple(map(float, quarters[:, 0])))


def agrees(front: PictureFrontEnd) -> bool:
    """Say whether what a front end computes is what its processor makes of pictures of its sizes."""
    module = front.module()
    try:
        cases = front.cases(np.random.default_rng(0))
        made = [module(torch.from_numpy(case.inputs[0])).numpy() for case in cases]
    except _OWN_ERRORS:
        return False
    return all(
        got.shape == case.expected[0].shape
        and np.abs(got - case.expected[0]).max() <= _EXACT * max(1.0, np.abs(case.expected[0]).max())
        for got, case in zip(made, cases, strict=True)
    )


__all__ = ["Colours", "Pixels", "PlainPixels", "agrees", "plain_pixels"]
