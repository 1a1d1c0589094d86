"""Detectors of torchvision's classes with a backbone of a few layers, whose random heads tell candidates clearly apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from t2n_llm.zoo.suites.torchvision import tell_apart


class Pyramid(nn.Module):
    """Two maps of 32 channels, at an eighth and a sixteenth of the picture."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 9, 8, 4), nn.Conv2d(32, 32, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the maps of pictures [B, 3, H, W]."""
        fine = self.first(x)
        return OrderedDict([("0", fine), ("1", self.second(fine.relu()))])


def _anchors(sides: tuple[int, ...] = (12, 24), ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(tuple((side,) for side in sides), (ratios,) * len(sides))


def _pool(cells: int) -> Any:
    from torchvision.ops import MultiScaleRoIAlign

    return MultiScaleRoIAlign(["0", "1"], cells, 2, canonical_scale=24)


_FRAME = {"min_size": 64, "max_size": 120}


def _retinanet(detection: Any) -> nn.Module:
    return detection.RetinaNet(
        Pyramid(), 4, anchor_generator=_anchors(), topk_candidates=60, detections_per_img=30, **_FRAME
    )


def _fcos(detection: Any) -> nn.Module:
    anchors = _anchors((8, 16), (1.0,))
    return detection.FCOS(Pyramid(), 4, anchor_generator=anchors, topk_candidates=60, detections_per_img=30, **_FRAME)


def _ssd(head: Callable[[Any, list[int]], nn.Module]) -> Callable[[Any], nn.Module]:
    def build(detection: Any) -> nn.Module:
        from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

        anchors = DefaultBoxGenerator([[2], [2]], scales=[0.15, 0.3, 0.5], steps=[8, 16])
        made = head(detection, anchors.num_anchors_per_location())
        options = {"head": made, "score_thresh": 0.3, "topk_candidates": 50, "detections_per_img": 200}
        return detection.ssd.SSD(Pyramid(), anchors, (72, 64), 4, **options)

    return build


def _rcnn(kind: str, **options: Any) -> Callable[[Any], nn.Module]:
    def build(detection: Any) -> nn.Module:
        stages = {"rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 40, "box_detections_per_img": 60}
        pools = {name: _pool(cells) for name, cells in options.items() if name.endswith("_roi_pool")}
        rest = {name: value for name, value in options.items() if name not in pools}
        anchors = _anchors()
        return getattr(detection, kind)(
            Pyramid(), 3, rpn_anchor_generator=anchors, box_roi_pool=_pool(4), **pools, **rest, **stages, **_FRAME
        )

    return build


DETECTORS: Mapping[str, Callable[[Any], nn.Module]] = {
    "retinanet": _retinanet,
    "fcos": _fcos,
    "ssd": _ssd(lambda detection, anchors: detection.ssd.SSDHead([32, 32], anchors, 4)),
    "ssdlite": _ssd(lambda detection, anchors: detection.ssdlite.SSDLiteHead([32, 32], anchors, 4, nn.BatchNorm2d)),
    "faster_rcnn": _rcnn("FasterRCNN"),
    "mask_rcnn": _rcnn("MaskRCNN", mask_roi_pool=6),
    "keypoint_rcnn": _rcnn("KeypointRCNN", keypoint_roi_pool=6, num_keypoints=3),
}


def small_detector(detection: Any, name: str, seed: int = 0) -> nn.Module:
    """Return a detector by name, the same for the same seed; `detection` is torchvision.models.detection."""
    torch.manual_seed(seed)
    return tell_apart(DETECTORS[name](detection).eval(), torch.rand(3, 64, 64))
