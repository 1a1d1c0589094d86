"""Position embeddings of image encoders for the grid of one image: places and weights along each axis, then their products.

transformers computes them patch by patch, for all images at once. For one image of any size that is a long graph of divisions,
which tract takes minutes to load.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from generic_export.errors import CaptureError

_FUNCTION = "get_vision_interpolation_indices_and_weights"
_KEYS = -0.75
"""The parameter of PyTorch's bicubic kernel (Keys 1981)."""


@contextmanager
def positions_of_one_image(network: Any) -> Iterator[None]:
    """Let a model resample its position embeddings for one image, for the length of the block.

    Args:
        network: transformers' model.
    """
    names = {type(each).__module__ for each in network.modules()}
    with ExitStack() as stack:
        for code in (sys.modules[name] for name in names if hasattr(sys.modules[name], _FUNCTION)):
            stack.enter_context(mock.patch.object(code, _FUNCTION, resampled_places))
        yield


def resampled_places(
    grid_thw: torch.Tensor,
    num_grid_per_side: int,
    mode: str = "bilinear",
    align_corners: bool = False,
    spatial_merge_size: int = 1,
    padding: str = "border",
    kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do for one image of one frame what transformers' function of the same arguments does for several.

    Args:
        grid_thw: int64 [1, 3], frames and patches in each direction.
        num_grid_per_side: positions of the table in each direction.
        mode: bilinear or bicubic, as in `torch.nn.functional.interpolate`.
        align_corners: as there.
        spatial_merge_size: patches in each direction that are next to each other in the result.
        padding: `border` takes positions beyond the table from its edge; `zeros` leaves them out.
        kwargs: of the caller.

    Returns:
        For each patch, places in the flattened table and their weights, [patches, taps].

    Raises:
        CaptureError: the mode is another one.
    """
    del kwargs
    ((_, height, width),) = grid_thw.tolist()
    options = num_grid_per_side, mode, align_corners, padding, grid_thw.device
    (rows, by_row), (columns, by_column) = _taps(height, *options), _taps(width, *options)
    places = rows[:, None, :, None] * num_grid_per_side + columns[None, :, None, :]
    weights = by_row[:, None, :, None] * by_column[None, :, None, :]
    return _in_blocks(places.flatten(2), spatial_merge_size), _in_blocks(weights.flatten(2), spatial_merge_size)


def _taps(
    size: Any, side: int, mode: str, align_corners: bool, padding: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each patch along an axis, the positions that it is made of and their weights, [size, taps]."""
    patch = torch.arange(size, device=device).to(torch.float32)
    centers = patch * (side - 1) / torch.sym_max(size - 1, 1) if align_corners else (patch + 0.5) * side / size - 0.5
    before = centers.floor()
    if mode not in ("bilinear", "bicubic"):
        raise CaptureError(f"position embeddings are resampled with the mode {mode!r}, not bilinear or bicubic.")
    offsets = torch.arange(*((0, 2) if mode == "bilinear" else (-1, 3)), device=device)
    places = before.long()[:, None] + offsets
    far = ((centers - before)[:, None] - offsets).abs()
    weights = (1 - far).clamp(min=0) if mode == "bilinear" else _bicubic(far)
    if padding == "zeros":
        weights = weights * ((places >= 0) & (places < side))
    return places.clamp(0, side - 1), weights


def _bicubic(far: torch.Tensor) -> torch.Tensor:
    near_weights = ((_KEYS + 2) * far - (_KEYS + 3)) * far * far + 1
    far_weights = ((_KEYS * far - 5 * _KEYS) * far + 8 * _KEYS) * far - 4 * _KEYS
    return torch.where(far <= 1, near_weights, far_weights)


def _in_blocks(values: torch.Tensor, side: int) -> torch.Tensor:
    """Return [height, width, taps] as [patches, taps], block after block of patches."""
    height, width, taps = values.shape
    blocks = values.reshape(height // side, side, width // side, side, taps)
    return blocks.transpose(1, 2).reshape(-1, taps)


__all__ = ["positions_of_one_image", "resampled_places"]
