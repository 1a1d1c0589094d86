"""From what a network says of all anchors to a fixed number of candidates, and from those to detections.

What torchvision drops by its score or its size stays, and is marked as not valid: sizes do not depend on data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from generic_export.detection.pictures import PictureFrame
from generic_export.detection.suppression import bounded_batched_nms

Heads = Mapping[str, torch.Tensor]
"""What a one-stage network says: `cls_logits` [1, A, C], `bbox_regression` [1, A, 4]; FCOS `bbox_ctrness` [1, A, 1] too."""


@dataclass(frozen=True)
class Candidates:
    """Boxes that may be detections, in the order in which torchvision has them.

    Attributes:
        boxes: f32 [N, 4], on the resized picture.
        scores: f32 [N].
        labels: i64 [N].
        valid: bool [N], which of them torchvision would have.
    """

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """Return several as one."""
        boxes, scores, labels, valid = zip(*((p.boxes, p.scores, p.labels, p.valid) for p in parts), strict=True)
        return Candidates(torch.cat(boxes), torch.cat(scores), torch.cat(labels), torch.cat(valid))


@dataclass(frozen=True)
class Found:
    """Detections, the best first; rows from `count` on are zeros.

    Attributes:
        boxes: f32 [K, 4], on the resized picture.
        labels: i64 [K].
        scores: f32 [K].
        count: i64 [].
    """

    boxes: torch.Tensor
    labels: torch.Tensor
    scores: torch.Tensor
    count: torch.Tensor

    def only_found(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [K, ...] with zeros in the rows of no detection."""
        rows = torch.arange(values.shape[0], device=values.device) < self.count
        return torch.where(rows.reshape(-1, *(1,) * (values.dim() - 1)), values, torch.zeros_like(values))


def best(candidates: Candidates, iou_threshold: float, outputs: int) -> Found:
    """Return the candidates that stay after suppression within each label."""
    indices, count = bounded_batched_nms(
        candidates.boxes, candidates.scores, candidates.labels, iou_threshold, outputs, valid=candidates.valid
    )
    places = indices.clamp(min=0)
    picked = Found(candidates.boxes[places], candidates.labels[places], candidates.scores[places], count)
    boxes, labels, scores = map(picked.only_found, (picked.boxes, picked.labels, picked.scores))
    return Found(boxes, labels, scores, count)


def of_levels(model: Any, heads: Heads, anchors: torch.Tensor, sizes: Sequence[int], frame: PictureFrame) -> Candidates:
    """Return the candidates of RetinaNet and FCOS: the best pairs of an anchor and a class on each level of the pyramid.

    Args:
        model: the detector.
        heads: what its network says.
        anchors: of all levels, f32 [A, 4].
        sizes: how many anchors each level has.
        frame: of the pictures.
    """
    centred = "bbox_ctrness" in heads
    decode = model.box_coder.decode if centred else model.box_coder.decode_single
    scores = torch.sigmoid(heads["cls_logits"][0])
    if centred:
        scores = torch.sqrt(scores * torch.sigmoid(heads["bbox_ctrness"][0]))
    classes = scores.shape[1]
    levels = zip(scores.split(sizes), heads["bbox_regression"][0].split(sizes), anchors.split(sizes), strict=True)
    parts = []
    for level_scores, deltas, level_anchors in levels:
        values, pairs, valid = _best_above(level_scores.flatten(), model.score_thresh, model.topk_candidates)
        places = torch.div(pairs, classes, rounding_mode="floor")
        boxes = frame.clipped(decode(deltas[places], level_anchors[places]))
        parts.append(Candidates(boxes, values, pairs % classes, valid))
    return Candidates.joined(parts)


def of_classes(model: Any, heads: Heads, anchors: torch.Tensor, frame: PictureFrame) -> Candidates:
    """Return the candidates of SSD: the best anchors for each class but the background, which is the first.

    Args:
        model: the detector.
        heads: what its network says.
        anchors: f32 [A, 4].
        frame: of the pictures.
    """
    boxes = frame.clipped(model.box_coder.decode_single(heads["bbox_regression"][0], anchors))
    scores = F.softmax(heads["cls_logits"][0], dim=-1)[:, 1:].T  # [C - 1, A]
    values, places, valid = _best_above(scores, model.score_thresh, model.topk_candidates)
    labels = torch.arange(1, scores.shape[0] + 1, device=scores.device).unsqueeze(1).expand_as(places)
    return Candidates(boxes[places.flatten()], values.flatten(), labels.flatten(), valid.flatten())


def _best_above(scores: torch.Tensor, threshold: float, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best scores along the last axis, where they lie, and which are above a threshold (those come first)."""
    above = scores > threshold
    values, places = torch.where(above, scores, -1.0).topk(min(count, scores.shape[-1]), dim=-1)
    return values, places, values > threshold


__all__ = ["Candidates", "Found", "Heads", "best", "of_classes", "of_levels"]
