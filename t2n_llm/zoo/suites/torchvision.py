"""torchvision: classification, segmentation, detectors, video, optical flow.

A detector is there twice: what its network says of pictures, scores and boxes relative to anchors, and with what it chooses of them
(`_detections`), for one picture of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from generic_export.detection import exportable_detector
from t2n_llm.zoo.suites.case import BATCH, OTHER_BATCH, Given, ModuleCase, between, pictures
from t2n_llm.zoo.suites.trial import unsettle

_SMALLEST: Mapping[str, tuple[int, bool, dict[str, Any]]] = {
    # model -> size of a picture, whether it takes any, what makes it smaller
    "alexnet": (96, True, {}),
    "convnext_tiny": (96, True, {}),
    "densenet121": (96, True, {}),
    "efficientnet_b0": (96, True, {}),
    "efficientnet_v2_s": (96, True, {}),
    "googlenet": (96, True, {"init_weights": False, "aux_logits": False}),
    "inception_v3": (128, True, {"init_weights": False, "aux_logits": False}),
    "maxvit_t": (224, False, {}),
    "mnasnet0_5": (96, True, {}),
    "mobilenet_v2": (96, True, {}),
    "mobilenet_v3_large": (96, True, {}),
    "mobilenet_v3_small": (96, True, {}),
    "regnet_x_400mf": (96, True, {}),
    "regnet_y_400mf": (96, True, {}),
    "resnet18": (96, True, {}),
    "resnext50_32x4d": (96, True, {}),
    "wide_resnet50_2": (96, True, {}),
    "shufflenet_v2_x0_5": (96, True, {}),
    "squeezenet1_1": (96, True, {}),
    "swin_t": (224, False, {}),
    "swin_v2_t": (256, False, {}),
    "vgg11": (64, True, {}),
    "vgg11_bn": (64, True, {}),
    "vit_b_32": (224, False, {}),
    "deeplabv3_mobilenet_v3_large": (96, True, {"weights_backbone": None}),
    "deeplabv3_resnet50": (96, True, {"weights_backbone": None}),
    "fcn_resnet50": (96, True, {"weights_backbone": None}),
    "lraspp_mobilenet_v3_large": (96, True, {"weights_backbone": None}),
}

_DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)

_ONE_SIZE = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}  # their last features are of one pixel
# Their coarsest features are of one pixel up to 128, which is a graph of its own.
_LARGER = {
    "fcos_resnet50_fpn": 160,
    "retinanet_resnet50_fpn": 160,
    "retinanet_resnet50_fpn_v2": 160,
}
_STAGES = {"rpn_post_nms_top_n_test": 100, "box_detections_per_img": 20}
_DETECTING: Mapping[str, dict[str, Any]] = {
    # model -> what makes it smaller; SSDLite's random backbone gives many anchors the very same score, which has no order
    "fasterrcnn_resnet50_fpn": {"num_classes": 9, **_STAGES},
    "fcos_resnet50_fpn": {"num_classes": 9, "topk_candidates": 200},
    "keypointrcnn_resnet50_fpn": {"num_keypoints": 5, **_STAGES},
    "maskrcnn_resnet50_fpn": {"num_classes": 9, **_STAGES},
    "retinanet_resnet50_fpn": {"num_classes": 9, "topk_candidates": 200, "detections_per_img": 100},
    "ssd300_vgg16": {"num_classes": 9, "topk_candidates": 50},
}
_VIDEO = {"mc3_18": (4, 64), "r2plus1d_18": (4, 64), "r3d_18": (4, 64), "s3d": (16, 224), "swin3d_t": (8, 64)}
_LONG_VIDEO = {"mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224)}


class RawDetector(nn.Module):
    """The network of a torchvision detector: maps of the backbone through the head, or the proposing one of two stages."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.rpn.head if hasattr(detector, "rpn") else detector.head

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the head says of pictures [B, 3, H, W]."""
        maps = self.backbone(x)
        return self.head([maps] if isinstance(maps, torch.Tensor) else list(maps.values()))


def _build(name: str, smaller: Mapping[str, Any]) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, **smaller)
    return model


def _detector(name: str) -> nn.Module:
    return RawDetector(_build(name, {"weights_backbone": None}))


def _detections(name: str, smaller: Mapping[str, Any]) -> ModuleCase:
    size = (96, 120)
    resized = {} if name in _ONE_SIZE else {"min_size": 112, "max_size": 160}
    given = {"x": Given((1, 3, *size), between(0, 1))}
    return ModuleCase(partial(whole_detector, name, size, {**smaller, **resized}), given, {}, {})


def _video(name: str, frames: int, size: int) -> ModuleCase:
    return ModuleCase(partial(_build, name, {}), {"x": Given(("B", 3, frames, size, size))}, BATCH, OTHER_BATCH)


def _flow(name: str) -> ModuleCase:
    given = Given(("B", 3, 128, 128))
    return ModuleCase(partial(_build, name, {}), {"image1": given, "image2": given}, BATCH, OTHER_BATCH)


# Layers whose results are brought to a deviation and a mean: scores on both sides of the thresholds, boxes that move.
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


def tell_apart(detector: nn.Module, picture: torch.Tensor) -> nn.Module:
    """Give a detector's heads random weights that spread scores and boxes, and return it.

    Args:
        detector: of torchvision, in eval mode; changed in place.
        picture: f32 [3, H, W], where the heads get their spread.
    """
    hooks = [
        module.register_forward_hook(_Spread(*spread))
        for path, module in detector.named_modules()
        for part, spread in _SPREADS.items()
        if part in path and isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))
    ]
    with torch.no_grad():
        detector([picture])
    for hook in hooks:
        hook.remove()
    return detector


class _Spread:
    """Give a layer random weights at its first call, so that each channel of its results has a deviation and a mean."""

    def __init__(self, deviation: float, mean: float) -> None:
        self.deviation, self.mean, self.is_done = deviation, mean, False

    def __call__(self, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if self.is_done:
            return None
        self.is_done = True
        nn.init.normal_(layer.weight)
        said = type(layer).forward(layer, *inputs).transpose(0, 1).flatten(1)  # of each channel
        said = said if said.shape[1] > 1 else said.T  # of a single pixel: of all channels together
        scale = self.deviation / said.std(1).mean()
        layer.weight.mul_(scale)
        if layer.bias is not None:
            offset = layer.bias[:, None] * (1 - scale)  # the bias is in what was said, and is not scaled
            layer.bias.add_(self.mean - (said * scale + offset).mean(1))
        result: torch.Tensor = type(layer).forward(layer, *inputs)
        return result


def whole_detector(name: str, size: tuple[int, int], options: Mapping[str, Any]) -> nn.Module:
    """Return a detector of torchvision by name as `generic_export.detection.exportable_detector` has it.

    Args:
        name: of torchvision's model.
        size: height and width of the pictures.
        options: what makes it smaller.
    """
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options).eval()
    unsettle(model)  # before the heads get their spread, which it would shift
    return exportable_detector(tell_apart(model, torch.rand(3, *size)), size)


CASES: Mapping[str, ModuleCase] = {
    **{
        name: pictures(partial(_build, name, smaller), size, of_any_size=free)
        for name, (size, free, smaller) in _SMALLEST.items()
    },
    **{
        name: pictures(
            partial(_detector, name), (_ONE_SIZE | _LARGER).get(name, 128), of_any_size=name not in _ONE_SIZE
        )
        for name in _DETECTORS
    },
    **{f"{name}_detections": _detections(name, smaller) for name, smaller in _DETECTING.items()},
    **{name: _video(name, *size) for name, size in (_VIDEO | _LONG_VIDEO).items()},
    **{name: _flow(name) for name in ("raft_small", "raft_large")},
}
