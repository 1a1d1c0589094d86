"""The two stages of R-CNN detectors with fixed numbers of proposals and detections, and features of regions on a pyramid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from generic_export.detection.candidates import Candidates, Found, best
from generic_export.detection.pictures import PictureFrame, Size
from generic_export.torch_graph.decompose.region_features import RegionGrid, sampled, table_of

Maps = Mapping[str, torch.Tensor]
"""Feature maps [1, C, H, W] of the backbone by name."""

_SMALLEST_BOX = 1e-2  # torchvision's RoIHeads drops detections with a side below it


def proposals_of(
    rpn: Any,
    objectness: torch.Tensor,
    deltas: torch.Tensor,
    anchors: torch.Tensor,
    sizes: Sequence[int],
    frame: PictureFrame,
) -> Found:
    """Return the boxes that the proposing network holds for objects, whose label is the level of the pyramid.

    Args:
        rpn: torchvision's `RegionProposalNetwork`.
        objectness: [A, 1].
        deltas: [A, 4].
        anchors: of all levels, f32 [A, 4].
        sizes: how many anchors each level has.
        frame: of the pictures.
    """
    boxes = rpn.box_coder.decode(deltas, [anchors]).reshape(-1, 4)
    parts = []
    for level, (said, there) in enumerate(
        zip(objectness.flatten().split(list(sizes)), boxes.split(list(sizes)), strict=True)
    ):
        values, places = said.topk(min(rpn.pre_nms_top_n(), said.shape[0]))
        clipped, scores = frame.clipped(there[places]), torch.sigmoid(values)
        valid = _large(clipped, rpn.min_size) & (scores >= rpn.score_thresh)
        parts.append(Candidates(clipped, scores, torch.full_like(places, level), valid))
    return best(Candidates.joined(parts), rpn.nms_thresh, rpn.post_nms_top_n())


def detections_of(
    heads: Any, logits: torch.Tensor, deltas: torch.Tensor, proposals: Found, frame: PictureFrame
) -> Found:
    """Return the detections among proposals.

    Args:
        heads: torchvision's `RoIHeads`.
        logits: of classes, the background first [P, C].
        deltas: one box for each class [P, 4 * C].
        proposals: the boxes that they are relative to, [P, 4].
        frame: of the pictures.
    """
    count, classes = logits.shape
    boxes = heads.box_coder.decode(deltas, [proposals.boxes]).reshape(count, classes, 4)[:, 1:]
    scores = F.softmax(logits, -1)[:, 1:]
    # Scores of a proposal sum to one: no more of its classes than this can be above the threshold.
    most = min(classes - 1, int(1 / heads.score_thresh) + 1) if heads.score_thresh > 0 else classes - 1
    scores, places = scores.topk(most, dim=1)
    rows = torch.arange(count, device=places.device).unsqueeze(1) * (classes - 1)
    boxes = frame.clipped(boxes.reshape(-1, 4)[(rows + places).flatten()])
    there = (torch.arange(count, device=places.device) < proposals.count).unsqueeze(1)
    valid = (there & (scores > heads.score_thresh)).flatten() & _large(boxes, _SMALLEST_BOX)
    candidates = Candidates(boxes, scores.flatten(), places.flatten() + 1, valid)
    return best(candidates, heads.nms_thresh, heads.detections_per_img)


def _large(boxes: torch.Tensor, least: float) -> torch.Tensor:
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    return (width >= least) & (height >= least)


def pooled(pool: Any, maps: Maps, boxes: torch.Tensor, frame: PictureFrame) -> torch.Tensor:
    """Return what torchvision's `MultiScaleRoIAlign` does, [K, C, height, width], with each box read from one table of all levels.

    Source: Feature Pyramid Networks (https://arxiv.org/abs/1612.03144), equation 1, for the level of a box.

    Args:
        pool: torchvision's module.
        maps: of the backbone.
        boxes: on the resized picture [K, 4].
        frame: of the pictures.
    """
    levels = [maps[name] for name in maps if name in pool.featmap_names]
    shapes = [(each.shape[2], each.shape[3]) for each in levels]
    scales = pool.scales or [_scale(shape, frame.network_size) for shape in shapes]
    offsets = [sum(height * width for height, width in shapes[:level]) for level in range(len(shapes))]
    level = _level_of(pool, boxes, scales)
    height, width = pool.output_size
    grid = RegionGrid(height, width, pool.sampling_ratio)
    of_scale, of_shape = (torch.tensor(each, device=boxes.device, dtype=boxes.dtype) for each in (scales, shapes))
    starts = torch.tensor(offsets, device=boxes.device)[level]
    return sampled(table_of(levels), boxes * of_scale[level].unsqueeze(1), starts, of_shape[level], grid)


def _scale(shape: Size, size: Size) -> float:
    return 2.0 ** round(math.log2(shape[0] / size[0]))


def _level_of(pool: Any, boxes: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Return the level of the pyramid that each box is read from, i64 [K]."""
    lowest, highest = (int(-math.log2(scale)) for scale in (scales[0], scales[-1]))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    side = area.sqrt().clamp(min=1e-3)  # far below the smallest level, and the logarithm of 0 is no number of a level
    wanted = torch.floor(pool.canonical_level + torch.log2(side / pool.canonical_scale) + 1e-6)
    return (wanted.clamp(lowest, highest) - lowest).long()


__all__ = ["Maps", "detections_of", "pooled", "proposals_of"]
