"""Masks and keypoints of a fixed number of detections: maps of each box, resized to it without a size that depends on it.

A resized map is two products: one matrix says what each row of the picture takes from the rows of the map, one its columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from generic_export.detection.pictures import Size

_BORDER = 1  # zeros around a mask before it is resized (torchvision's paste_masks_in_image)
_CUBIC = -0.75  # PyTorch's coefficient of bicubic interpolation


def masks_on_picture(logits: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor, size: Size) -> torch.Tensor:
    """Return the mask of each detection on the whole picture, f32 [K, 1, height, width], zero outside of its box.

    Args:
        logits: of every class, [K, C, M, M].
        labels: i64 [K].
        boxes: on the picture [K, 4].
        size: of the picture.
    """
    count, _, side, _ = logits.shape
    wanted = labels.reshape(-1, 1, 1, 1).expand(count, 1, side, side)
    masks = F.pad(logits.sigmoid().gather(1, wanted)[:, 0], (_BORDER,) * 4)
    grown = _expanded(boxes, (side + 2 * _BORDER) / side).long()
    lengths = (grown[:, 2:] - grown[:, :2] + 1).clamp(min=1)  # width, height
    height, width = size
    rows = _linear_shares(grown[:, 1], lengths[:, 1], height, masks.shape[1])
    columns = _linear_shares(grown[:, 0], lengths[:, 0], width, masks.shape[2])
    return (rows @ masks @ columns.transpose(1, 2)).unsqueeze(1)


def _expanded(boxes: torch.Tensor, scale: float) -> torch.Tensor:
    """Return boxes that are larger by a factor about their centres."""
    low, high = boxes[:, :2], boxes[:, 2:]
    half, centre = (high - low) * 0.5 * scale, (high + low) * 0.5
    return torch.cat([centre - half, centre + half], 1)


def _linear_shares(begin: torch.Tensor, length: torch.Tensor, places: int, cells: int) -> torch.Tensor:
    """Return what each place of an axis of the picture takes from each cell of a map, [K, places, cells].

    The map is resized to `length` places from `begin` on, as F.interpolate(mode="bilinear") does.
    """
    place = torch.arange(places, device=begin.device).unsqueeze(0) - begin.unsqueeze(1)  # [K, places]
    inside = (place >= 0) & (place < length.unsqueeze(1))
    source = ((place.float() + 0.5) * (cells / length.float()).unsqueeze(1) - 0.5).clamp(0, cells - 1)
    distance = (source.unsqueeze(2) - torch.arange(cells, device=begin.device)).abs()
    return torch.where(inside.unsqueeze(2), (1 - distance).clamp(min=0), 0.0)


def keypoints_of(maps: torch.Tensor, boxes: torch.Tensor, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the map of each keypoint is highest inside of its box: x, y, 1 in [K, P, 3], and the heights [K, P].

    Args:
        maps: of each keypoint of each detection, [K, P, M, M].
        boxes: on the resized picture [K, 4]; no larger than it.
        size: of the resized picture.
    """
    lengths = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1)  # width, height
    cells = lengths.ceil()
    height, width = size
    columns = _cubic_shares(cells[:, 0], width, maps.shape[3])
    rows = _cubic_shares(cells[:, 1], height, maps.shape[2])
    outside = _beyond(cells[:, 1], height).unsqueeze(2) | _beyond(cells[:, 0], width).unsqueeze(1)
    # One keypoint after the other, so that an engine which frees what is read need not hold the resized maps of all.
    found = [_highest(rows @ each @ columns.transpose(1, 2), outside) for each in maps.unbind(1)]
    scores, places = (torch.stack(part, 1) for part in zip(*found, strict=True))
    down = torch.div(places, width, rounding_mode="floor")
    cell = torch.stack([places - down * width, down], 2).float()
    points = (cell + 0.5) * (lengths / cells).unsqueeze(1) + boxes[:, :2].unsqueeze(1)
    return torch.cat([points, torch.ones_like(points[:, :, :1])], 2), scores


def _beyond(length: torch.Tensor, places: int) -> torch.Tensor:
    return torch.arange(places, device=length.device) >= length.unsqueeze(1)


def _highest(values: torch.Tensor, outside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.where(outside, -torch.inf, values).flatten(1)
    place = flat.argmax(1)
    return flat.gather(1, place.unsqueeze(1))[:, 0], place


def _cubic_shares(length: torch.Tensor, places: int, cells: int) -> torch.Tensor:
    """Return what each place takes from each cell of a map that is resized to `length` places, [K, places, cells].

    Source: R. Keys, Cubic convolution interpolation for digital image processing (1981), as F.interpolate(mode="bicubic") has it.
    """
    place = torch.arange(places, device=length.device).unsqueeze(0).float()
    source = (place + 0.5) * (cells / length).unsqueeze(1) - 0.5
    first = source.floor()
    part = source - first
    cell = torch.arange(cells, device=length.device)
    shares = (_far(part + 1), _near(part), _near(1 - part), _far(2 - part))
    total = torch.zeros(1, device=length.device)
    for offset, share in zip((-1, 0, 1, 2), shares, strict=True):
        taken = (first + offset).clamp(0, cells - 1).unsqueeze(2) == cell
        total = total + torch.where(taken, share.unsqueeze(2), 0.0)
    return total


def _near(distance: torch.Tensor) -> torch.Tensor:
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: torch.Tensor) -> torch.Tensor:
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


__all__ = ["keypoints_of", "masks_on_picture"]
