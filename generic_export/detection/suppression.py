"""Non-maximum suppression with a fixed number of results: what torchvision keeps, as one loop over the results.

In: all candidates, and which of them count. Out: as many places as were asked for, and how many of them hold something.
"""

from __future__ import annotations

import math

import torch

from generic_export.errors import OptionError
from generic_export.torch_graph.loops import loop

NOTHING = -1
"""The index where no more candidate is kept."""

# torchvision.ops.batched_nms keeps classes apart by shifting their boxes up to this many candidates, and one by one beyond.
_MOST_SHIFTED = 1000


def bounded_nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    iou_threshold: float,
    outputs: int,
    *,
    valid: torch.Tensor | None = None,
    classes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first indices of `torchvision.ops.nms`, and their number.

    For each result, the best remaining candidate is selected, and all candidates that overlap it by more than the threshold are
    removed. Equal scores are ordered by index.

    Args:
        boxes: f32 [N, 4], x1, y1, x2, y2.
        scores: [N].
        iou_threshold: intersection over union, at least 0; compared in f32, as torchvision does.
        outputs: largest number of results K.
        valid: bool [N], which candidates exist; None for all.
        classes: [N]; only candidates of the same class remove each other. None for one class.

    Returns:
        Indices i64 [K] and their count i64 []. Indices from `count` on are `NOTHING`.

    Raises:
        OptionError: `iou_threshold` is negative.
    """
    if iou_threshold < 0:
        raise OptionError(f"an overlap is not below 0: the threshold is {iou_threshold}.", "Give one from 0 to 1.")
    candidates = boxes.shape[0]
    steps = min(outputs, candidates)
    missing = torch.full((outputs,), NOTHING, dtype=torch.int64, device=boxes.device)
    if steps == 0:
        return missing, missing.new_zeros(())
    # What is kept has no gradient; PyTorch's loop would look for one.
    order = scores.detach().sort(descending=True, stable=True)[1]
    ranked = boxes.detach()[order]
    left = torch.ones_like(order, dtype=torch.bool) if valid is None else valid[order]
    kinds = torch.zeros_like(order) if classes is None else classes[order]
    sides = ranked.unbind(1)
    constants = [*sides, _area(*sides), kinds, torch.arange(candidates, device=boxes.device)]
    bound = _least_overlap(iou_threshold)

    def step(states: list[torch.Tensor], given: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        (open_ones,), (nothing, *columns) = states, given
        places = columns[-1]
        first = torch.where(open_ones, places, candidates).amin(0)
        best = [column[first.clamp(max=candidates - 1).unsqueeze(0)] for column in columns]
        closed = _overlap(best[:5], columns[:5], bound) & (columns[5] == best[5]) | (places == first)
        return [open_ones & ~closed], [torch.where(first < candidates, first, nothing)]

    _, (ranks,) = loop(step, [left], [missing[:steps]], constants=constants)
    indices = torch.where(ranks < 0, ranks, order[ranks.clamp(min=0)])
    return torch.cat([indices, missing[steps:]]), (indices >= 0).sum()


def bounded_batched_nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    classes: torch.Tensor,
    iou_threshold: float,
    outputs: int,
    *,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first indices of `torchvision.ops.batched_nms`, and their number.

    Up to 1,000 valid candidates the boxes of each class are shifted, as torchvision does, which rounds their overlaps the same
    way. Above that, torchvision's order of equal scores depends on an unstable sort and may differ.

    Args:
        boxes: f32 [N, 4], x1, y1, x2, y2; valid boxes have no negative coordinate.
        scores: [N].
        classes: i64 [N].
        iou_threshold: boxes of the same class that overlap more than this are removed; at least 0.
        outputs: largest number of results K.
        valid: bool [N], which candidates exist; None for all.

    Returns:
        Indices i64 [K] and their count i64 []. Indices from `count` on are `NOTHING`.

    Raises:
        OptionError: `iou_threshold` is negative.
    """
    there = torch.ones_like(classes, dtype=torch.bool) if valid is None else valid
    largest = torch.where(there.unsqueeze(1), boxes, 0.0).amax((0, 1)) if boxes.shape[0] else boxes.new_zeros(())
    shifts = classes.to(boxes.dtype) * (largest + 1)
    shifts = torch.where(there.sum() <= _MOST_SHIFTED, shifts, 0.0)
    return bounded_nms(boxes + shifts.unsqueeze(1), scores, iou_threshold, outputs, valid=valid, classes=classes)


def _area(left: torch.Tensor, top: torch.Tensor, right: torch.Tensor, bottom: torch.Tensor) -> torch.Tensor:
    return (right - left) * (bottom - top)


def _overlap(one: list[torch.Tensor], others: list[torch.Tensor], bound: float) -> torch.Tensor:
    """Say which boxes (four sides and the area) share more with one than the bound: intersection > union * bound.

    The product is exact in f64, so that this is the comparison of the f32 quotient, without the engine's reciprocal.
    """
    lows = [torch.maximum(mine, theirs) for mine, theirs in zip(one[:2], others[:2], strict=True)]
    highs = [torch.minimum(mine, theirs) for mine, theirs in zip(one[2:4], others[2:4], strict=True)]
    width, height = ((high - low).clamp(min=0) for high, low in zip(highs, lows, strict=True))
    shared = width * height
    union = one[4] + others[4] - shared
    return (shared > 0) & (shared.double() > union.double() * bound)


def _least_overlap(threshold: float) -> float:
    """Return the bound above which an exact quotient, rounded to f32, is greater than a threshold in f64."""
    below = torch.tensor(threshold, dtype=torch.float32)
    if below.item() > threshold:
        below = torch.nextafter(below, torch.tensor(-math.inf))
    above = torch.nextafter(below, torch.tensor(math.inf))
    return (below.item() + above.item()) / 2


__all__ = ["NOTHING", "bounded_batched_nms", "bounded_nms"]
