"""Object detection with a fixed number of results: what a detector of torchvision answers, in a graph of known sizes."""

from __future__ import annotations

from generic_export.detection.detector import exportable_detector
from generic_export.detection.suppression import NOTHING, bounded_batched_nms, bounded_nms

__all__ = ["NOTHING", "bounded_batched_nms", "bounded_nms", "exportable_detector"]
