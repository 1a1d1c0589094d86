"""`exportable_detector`: a detector of torchvision as a module whose results have fixed sizes.

In: a detector and the size of pictures. Out: a module that takes one picture and answers as the detector does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.detection.candidates import Candidates, Found, Heads, best, of_classes, of_levels
from generic_export.detection.instances import keypoints_of, masks_on_picture
from generic_export.detection.pictures import PictureFrame, Size
from generic_export.detection.two_stages import Maps, detections_of, pooled, proposals_of
from generic_export.errors import MissingExtraError, OptionError

Answers = dict[str, torch.Tensor]


def exportable_detector(model: nn.Module, size: Size, *, raw: bool = False) -> nn.Module:
    """Return a module that computes the detections of a torchvision detector with a fixed number of rows.

    The module takes one image, f32 [1, 3, height, width] with values from 0 to 1, and runs the whole detector: normalization,
    resizing, padding, network, selection and suppression. It returns a dict: `boxes` f32 [K, 4] in image coordinates, `labels`
    i64 [K], `scores` f32 [K] and `count` i64 []; with masks also `masks` f32 [K, 1, height, width]; with keypoints also
    `keypoints` f32 [K, P, 3] and `keypoints_scores` f32 [K, P]. K is the detector's `detections_per_img`. The first `count`
    rows are the detections, best first. The remaining rows are zero.

    Args:
        model: a RetinaNet, FCOS, SSD, Faster R-CNN, Mask R-CNN or Keypoint R-CNN of torchvision. It is referenced, not copied
            or modified.
        size: height and width of the images.
        raw: return the network's outputs for every anchor instead: logits and deltas with torchvision's names, and `anchors`
            f32 [A, 4] in the resized image.

    Raises:
        OptionError: the model is of another class, or `size` is not an image size.
        MissingExtraError: torchvision is not installed.
    """
    try:
        from torchvision.models import detection
        from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
        from torchvision.models.detection.image_list import ImageList
    except ImportError as error:
        raise MissingExtraError(
            "detectors are those of torchvision, which is not installed.", "Run: pip install 't2n-llm[zoo]'"
        ) from error
    classes: tuple[tuple[type, type[_Detector]], ...] = (
        (detection.RetinaNet, _Levels),
        (detection.FCOS, _Levels),
        (detection.ssd.SSD, _Classes),
        (GeneralizedRCNN, _TwoStages),
    )
    kind = next((made for known, made in classes if isinstance(model, known)), None)
    if kind is None:
        names = ", ".join(known.__name__ for known, _ in classes)
        raise OptionError(
            f"{type(model).__name__} is no detector of torchvision.", f"Known are {names} and their subclasses."
        )
    with evaluation_mode(model), torch.no_grad():
        return kind(model, size, ImageList, raw=raw)


class _Detector(nn.Module):
    """What all detectors share.

    Args:
        model: the detector.
        size: of the pictures.
        image_list: torchvision's class, which anchors are made for.
        raw: see `exportable_detector`.
    """

    anchors: torch.Tensor

    def __init__(self, model: Any, size: Size, image_list: Callable[..., Any], *, raw: bool) -> None:
        super().__init__()
        self.model, self.raw = model, raw
        self.frame = PictureFrame(model.transform, size)
        device = next(model.parameters()).device
        empty = torch.zeros(1, 3, *self.frame.padded_size, device=device)
        maps = list(self._maps(empty).values())
        (anchors,) = self._anchor_generator()(image_list(empty, [self.frame.network_size]), maps)
        self.register_buffer("anchors", anchors, persistent=False)
        cells = [each.shape[2] * each.shape[3] for each in maps]
        self.level_sizes = [each * anchors.shape[0] // sum(cells) for each in cells]

    def forward(self, picture: torch.Tensor) -> Answers:
        """Return what `exportable_detector` says, of a picture f32 [1, 3, height, width]."""
        maps = self._maps(self.frame(picture))
        heads = self._heads(maps)
        if self.raw:
            # A graph's output is computed from its input; a constant alone is none.
            return {**heads, "anchors": self.anchors + 0 * picture[0, 0, 0, 0]}
        return self._answers(maps, heads)

    def _anchor_generator(self) -> Any:
        return self.model.anchor_generator

    def _maps(self, picture: torch.Tensor) -> Maps:
        maps: Any = self.model.backbone(picture)
        return {"0": maps} if isinstance(maps, torch.Tensor) else dict(maps)

    def _heads(self, maps: Maps) -> Heads:
        return dict(self.model.head(list(maps.values())))

    def _answers(self, maps: Maps, heads: Heads) -> Answers:
        candidates = self._candidates(heads)
        return self._told(best(candidates, self.model.nms_thresh, self.model.detections_per_img))

    def _candidates(self, heads: Heads) -> Candidates:
        raise NotImplementedError

    def _told(self, found: Found) -> Answers:
        boxes = self.frame.on_picture(found.boxes)
        return {"boxes": boxes, "labels": found.labels, "scores": found.scores, "count": found.count}


class _Levels(_Detector):
    """RetinaNet and FCOS."""

    def _candidates(self, heads: Heads) -> Candidates:
        return of_levels(self.model, heads, self.anchors, self.level_sizes, self.frame)


class _Classes(_Detector):
    """SSD and SSDLite."""

    def _candidates(self, heads: Heads) -> Candidates:
        return of_classes(self.model, heads, self.anchors, self.frame)


class _TwoStages(_Detector):
    """Faster, Mask and Keypoint R-CNN."""

    def _anchor_generator(self) -> Any:
        return self.model.rpn.anchor_generator

    def _heads(self, maps: Maps) -> Heads:
        objectness, deltas = self.model.rpn.head(list(maps.values()))
        return {"objectness": _by_anchor(objectness, 1), "pred_bbox_deltas": _by_anchor(deltas, 4)}

    def _answers(self, maps: Maps, heads: Heads) -> Answers:
        roi_heads = self.model.roi_heads
        objectness, deltas = heads["objectness"][0], heads["pred_bbox_deltas"][0]
        proposals = proposals_of(self.model.rpn, objectness, deltas, self.anchors, self.level_sizes, self.frame)
        features = roi_heads.box_head(pooled(roi_heads.box_roi_pool, maps, proposals.boxes, self.frame))
        logits, box_deltas = roi_heads.box_predictor(features)
        found = detections_of(roi_heads, logits, box_deltas, proposals, self.frame)
        return {**self._told(found), **self._masks(maps, found), **self._keypoints(maps, found)}

    def _masks(self, maps: Maps, found: Found) -> Mapping[str, torch.Tensor]:
        heads = self.model.roi_heads
        if not heads.has_mask():
            return {}
        logits = heads.mask_predictor(heads.mask_head(pooled(heads.mask_roi_pool, maps, found.boxes, self.frame)))
        boxes = self.frame.on_picture(found.boxes)
        return {"masks": found.only_found(masks_on_picture(logits, found.labels, boxes, self.frame.size))}

    def _keypoints(self, maps: Maps, found: Found) -> Mapping[str, torch.Tensor]:
        heads = self.model.roi_heads
        if not heads.has_keypoint():
            return {}
        features = heads.keypoint_head(pooled(heads.keypoint_roi_pool, maps, found.boxes, self.frame))
        points, scores = keypoints_of(heads.keypoint_predictor(features), found.boxes, self.frame.network_size)
        points = torch.cat([points[..., :2] * self.frame.ratios[:2], points[..., 2:]], -1)
        return {"keypoints": found.only_found(points), "keypoints_scores": found.only_found(scores)}


def _by_anchor(levels: list[torch.Tensor], numbers: int) -> torch.Tensor:
    """Return what is said of anchors at each place, [1, anchors * numbers, H, W], one anchor after the other: [1, A, numbers]."""
    rows = [each.unflatten(1, (-1, numbers)).permute(0, 3, 4, 1, 2).flatten(1, 3) for each in levels]
    return torch.cat(rows, 1)


__all__ = ["exportable_detector"]
