"""Whole detectors of torchvision, from a picture to detections, with random weights that tell their candidates apart.

As they are made, all anchors get nearly the same score, most of them one below the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from generic_export.detection import exportable_detector
from t2n_llm.zoo.suites.trial import unsettle

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


__all__ = ["tell_apart", "whole_detector"]
