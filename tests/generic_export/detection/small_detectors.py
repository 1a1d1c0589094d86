"""Detectors of torchvision's classes with a backbone of a few layers, whose random heads tell candidates clearly apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Layers whose results are brought to a spread (and a mean): scores on both sides of the thresholds, boxes that move.
_SPREADS: Mapping[str, tuple[float, float]] = {
    "cls_logits": (2.0, -1.0),
    "classification_head.module_list": (2.0, 0.0),
    "bbox_ctrness": (1.0, 0.0),
    "bbox_reg": (0.5, 0.5),
    "regression_head.module_list": (0.5, 0.0),
    "rpn.head.bbox_pred": (0.3, 0.0),
    "box_predictor.cls_score": (2.0, 0.0),
    "box_predictor.bbox_pred": (1.0, 0.0),
    "mask_fcn_logits": (2.0, 0.0),
    "kps_score_lowres": (2.0, 0.0),
}


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


def _ssd(detection: Any) -> nn.Module:
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

    anchors = DefaultBoxGenerator([[2], [2]], scales=[0.15, 0.3, 0.5], steps=[8, 16])
    head = detection.ssd.SSDHead([32, 32], anchors.num_anchors_per_location(), 4)
    options = {"head": head, "score_thresh": 0.3, "topk_candidates": 50, "detections_per_img": 200}
    return detection.ssd.SSD(Pyramid(), anchors, (72, 64), 4, **options)


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
    "ssd": _ssd,
    "faster_rcnn": _rcnn("FasterRCNN"),
    "mask_rcnn": _rcnn("MaskRCNN", mask_roi_pool=6),
    "keypoint_rcnn": _rcnn("KeypointRCNN", keypoint_roi_pool=6, num_keypoints=3),
}


def small_detector(detection: Any, name: str, seed: int = 0) -> nn.Module:
    """Return a detector by name, the same for the same seed; `detection` is torchvision.models.detection."""
    torch.manual_seed(seed)
    model = DETECTORS[name](detection).eval()
    hooks = [
        module.register_forward_hook(_Spread(*spread))
        for path, module in model.named_modules()
        for part, spread in _SPREADS.items()
        if part in path and isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))
    ]
    with torch.no_grad():
        model([torch.rand(3, 64, 64)])
    for hook in hooks:
        hook.remove()
    return model


class _Spread:
    """Give a layer random weights at its first call, so that each channel of its results has a deviation and a mean."""

    def __init__(self, deviation: float, mean: float) -> None:
        self.deviation, self.mean, self.is_done = deviation, mean, False

    def __call__(self, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if self.is_done:
            return None
        self.is_done = True
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        said = type(layer).forward(layer, *inputs).transpose(0, 1).flatten(1)  # of each channel
        scale = self.deviation / said.std(1).mean()
        layer.weight.mul_(scale)
        layer.bias.sub_(said.mean(1) * scale).add_(self.mean)
        return type(layer).forward(layer, *inputs)
