"""Operators of torchvision, where it is imported: what each is written with, or why it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from generic_export.compat import OpOverload
from generic_export.errors import UnsupportedOperatorError
from generic_export.torch_graph.decompose.region_features import roi_align


def torchvision_rewrites() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return the functions of tensors that stand for torchvision's operators; none where they are not there."""
    if "torchvision" not in sys.modules:
        return {}
    operators = torch.ops.torchvision  # a build without its extension has none of them
    return {getattr(operators, name).default: made for name, made in _MADE.items() if hasattr(operators, name)}


def _nms(*args: Any) -> NoReturn:
    raise UnsupportedOperatorError(
        "the number of boxes of torchvision.nms depends on the data, which a graph cannot express.",
        "generic_export.detection.bounded_nms (and bounded_batched_nms) selects the same boxes with a fixed "
        "number of results; generic_export.detection.exportable_detector does so for a whole detector.",
    )


_MADE: Mapping[str, Callable[..., Any]] = {"roi_align": roi_align, "nms": _nms}


__all__ = ["torchvision_rewrites"]
