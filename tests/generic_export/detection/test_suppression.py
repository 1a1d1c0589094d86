"""Suppression with a fixed number of results keeps what torchvision keeps, in the same order; in the engine too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.detection.suppression import NOTHING, bounded_batched_nms, bounded_nms
from generic_export.errors import OptionError
from tests.engine_check import check

THRESHOLDS = [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 1.0]  # 0.1 and 0.7 are no f32: one is above it, one below


def _kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Keep boxes as torchvision's kernel for a CPU does: f32 quotients against a threshold in f64."""
    order, kept = scores.sort(descending=True, stable=True)[1].tolist(), []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while order:
        best, *rest = order
        kept.append(best)
        sides = (
            torch.minimum(boxes[best, 2:], boxes[rest, 2:]) - torch.maximum(boxes[best, :2], boxes[rest, :2])
        ).clamp(min=0)
        shared = sides[:, 0] * sides[:, 1]
        overlap = shared / (area[best] + area[rest] - shared)
        order = [each for each, much in zip(rest, overlap.double() > threshold, strict=True) if not much]
    return torch.tensor(kept, dtype=torch.int64)


def _kept_by_class(boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor, threshold: float) -> torch.Tensor:
    shifts = classes.float() * (boxes.max() + 1)
    return _kept(boxes + shifts[:, None], scores, threshold)


def _drawn(seed: int, count: int, *, grid: float | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw boxes, scores and classes; on a grid there are equal boxes, equal scores, boxes without area and exact overlaps."""
    generator = torch.Generator().manual_seed(seed)
    corner, size = (torch.rand(count, 2, generator=generator) * limit for limit in (50, 30))
    boxes, scores = torch.cat([corner, corner + size], 1), torch.rand(count, generator=generator)
    if grid is not None:
        boxes, scores = (boxes / grid).round() * grid, (scores * 8).round() / 8
    return boxes, scores, torch.randint(3, (count,), generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    grid=st.sampled_from([None, 3.0, 10.0]),
    threshold=st.sampled_from(THRESHOLDS),
)
def test_what_is_kept(seed: int, count: int, grid: float | None, threshold: float) -> None:
    boxes, scores, classes = _drawn(seed, count, grid=grid)
    for wanted, (indices, kept) in (
        (_kept(boxes, scores, threshold), bounded_nms(boxes, scores, threshold, count + 2)),
        (
            _kept_by_class(boxes, scores, classes, threshold),
            bounded_batched_nms(boxes, scores, classes, threshold, count + 2),
        ),
    ):
        assert indices[:kept].tolist() == wanted.tolist()
        assert (indices[kept:] == NOTHING).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), grid=st.sampled_from([None, 3.0]), threshold=st.sampled_from(THRESHOLDS))
def test_torchvision_keeps_the_same(seed: int, grid: float | None, threshold: float) -> None:
    ops = pytest.importorskip("torchvision.ops", reason="torchvision is not installed (the extra zoo).")
    boxes, scores, classes = _drawn(seed, 80, grid=grid)
    indices, kept = bounded_nms(boxes, scores, threshold, 80)
    assert indices[:kept].tolist() == ops.nms(boxes, scores, threshold).tolist()
    indices, kept = bounded_batched_nms(boxes, scores, classes, threshold, 80)
    assert indices[:kept].tolist() == ops.batched_nms(boxes, scores, classes, threshold).tolist()


def test_torchvision_keeps_the_same_of_many() -> None:
    ops = pytest.importorskip("torchvision.ops", reason="torchvision is not installed (the extra zoo).")
    boxes, _, classes = _drawn(3, 1500)
    scores = torch.randperm(1500, generator=torch.Generator().manual_seed(0)).float()  # equal ones have no order there
    for valid in (scores >= 0, scores >= 400):  # beyond 1,000 and below: the boxes of a class are shifted, or not
        places = valid.nonzero()[:, 0]
        wanted = places[ops.batched_nms(boxes[places], scores[places], classes[places], 0.3)][:40]
        indices, kept = bounded_batched_nms(boxes, scores, classes, 0.3, 40, valid=valid)
        assert (kept, indices.tolist()) == (40, wanted.tolist())


def test_in_the_engine() -> None:
    def kept(boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        few = bounded_batched_nms(boxes, scores, classes, 0.1, 12, valid=scores > 0.3)
        return *bounded_nms(boxes, scores, 0.5, 50), *few, *bounded_nms(boxes, scores, 0.7, 1)

    check(kept, _drawn(0, 40), _drawn(1, 40), _drawn(2, 40, grid=3.0), _drawn(3, 40, grid=10.0))
    boxes, scores, classes = _drawn(0, 40)
    check(kept, (boxes, scores, classes), (boxes, scores * 0, classes))  # none is valid, and all are equal


def test_only_valid_ones_are_kept_or_take_away() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
    indices, kept = bounded_nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5, 3, valid=torch.tensor([False, True, False]))
    assert (indices.tolist(), kept.item()) == ([1, NOTHING, NOTHING], 1)


def test_nothing_to_keep() -> None:
    none = torch.zeros(0, 4)
    assert bounded_nms(none, none[:, 0], 0.5, 2)[0].tolist() == [NOTHING, NOTHING]
    assert bounded_batched_nms(none, none[:, 0], none[:, 0].long(), 0.5, 2)[1] == 0
    with pytest.raises(OptionError, match=r"iou_threshold is -0\.1"):
        bounded_nms(none, none[:, 0], -0.1, 2)
