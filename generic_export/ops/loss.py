"""Losses and distances whose own decomposition is absent or does not export; the others decompose well by themselves."""

from __future__ import annotations

import torch

from generic_export.ops.linear import minkowski
from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    """Apply PyTorch's `reduction` argument: 0 none, 1 mean, 2 sum."""
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@rewrites(aten.dist.default)
def dist(self: Tensor, other: Tensor, p: float = 2.0) -> Tensor:
    """The p-norm of a difference."""
    return torch.linalg.vector_norm(self - other, p)


@rewrites(aten.pdist.default, aten._pdist_forward.default)
def pdist(self: Tensor, p: float = 2.0) -> Tensor:
    """Distances between all pairs of rows."""
    rows, columns = torch.triu_indices(self.shape[0], self.shape[0], 1).unbind(0)
    return minkowski(self[rows] - self[columns], p)


@rewrites(aten.hinge_embedding_loss.default)
def hinge_embedding_loss(self: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    """x where the target is 1, max(0, margin - x) where it is -1."""
    apart = torch.where(target != 1, torch.clamp(margin - self, min=0), 0.0)
    together = torch.where(target != -1, self, 0.0)
    return _reduced((apart + together).to(self.dtype), reduction)


@rewrites(aten.cosine_embedding_loss.default)
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1."""
    epsilon = 1e-12
    squares = ((input1 * input1).sum(-1) + epsilon) * ((input2 * input2).sum(-1) + epsilon)
    cosine = (input1 * input2).sum(-1) / torch.sqrt(squares)
    zero = torch.zeros_like(cosine)
    together = torch.where(target == 1, 1.0 - cosine, zero)
    return _reduced(together + torch.where(target == -1, torch.clamp(cosine - margin, min=0), zero), reduction)


@rewrites(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """max(0, 1 - (x[label] - x[other])), summed over the labels before the first -1 and the classes that are no label.

    PyTorch's decomposition (2.13) also counts the padding after the first -1, as if it were class 0.
    """
    scores, labels = torch.atleast_2d(self), torch.atleast_2d(target)
    classes = torch.arange(scores.shape[1])
    first_end = torch.where(labels == -1, classes, scores.shape[1]).amin(-1, keepdim=True)
    given = classes < first_end
    chosen = torch.gather(scores, -1, torch.where(given, labels, 0))
    is_label = ((labels.unsqueeze(-1) == classes) & given.unsqueeze(-1)).to(torch.int64).sum(1) > 0
    margins = torch.clamp(1.0 - chosen.unsqueeze(-1) + scores.unsqueeze(1), min=0)
    counted = given.unsqueeze(-1) & ~is_label.unsqueeze(1)
    loss = torch.where(counted, margins, 0.0).to(self.dtype).sum((1, 2)) / scores.shape[1]
    loss = loss if self.dim() > 1 or reduction else loss.squeeze(0)
    return _reduced(loss, reduction)
