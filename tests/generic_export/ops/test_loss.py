"""Every loss of torch.nn.functional with its options, and the distances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.engine_check import check

Loss = Callable[..., torch.Tensor]

X, Y = torch.randn(4, 6), torch.randn(4, 6)
CLASSES = torch.tensor([0, 5, 2, 2])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
WEIGHTS = torch.rand(6) + 0.1

LOSSES: dict[str, tuple[Loss, tuple[torch.Tensor, ...]]] = {
    "mse": (F.mse_loss, (X, Y)),
    "mse_sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), (X, Y)),
    "l1": (F.l1_loss, (X, Y)),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), (X, Y)),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.7), (X, Y)),
    "cross_entropy": (F.cross_entropy, (X, CLASSES)),
    "cross_entropy_weights": (lambda x, t, w: F.cross_entropy(x, t, w), (X, CLASSES, WEIGHTS)),
    "cross_entropy_ignore": (lambda x, t: F.cross_entropy(x, t, ignore_index=2), (X, CLASSES)),
    "cross_entropy_smooth": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1, ignore_index=5),
        (X, CLASSES, WEIGHTS),
    ),
    "cross_entropy_none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (X, CLASSES)),
    "cross_entropy_soft": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), (X, Y)),
    "cross_entropy_images": (F.cross_entropy, (torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5)))),
    "nll_negative_ignore": (
        lambda x, t: F.nll_loss(x.log_softmax(-1), t, ignore_index=-100),
        (X, torch.tensor([0, -100, 2, -100])),
    ),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (X, Y)),
    "bce_logits": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w),
        (X * 30, Y, WEIGHTS),
    ),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), (X, Y)),
    "kl_div_log": (lambda x, y: F.kl_div(x, y, log_target=True), (X, Y)),
    "cosine_embedding": (lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.1), (X, Y, SIGNS)),
    "hinge_embedding": (lambda x, t: F.hinge_embedding_loss(x, t, margin=0.5), (X[:, 0], SIGNS)),
    "margin_ranking": (lambda x, y, t: F.margin_ranking_loss(x[:, 0], y[:, 0], t, margin=0.2), (X, Y, SIGNS)),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True), (X, Y, X.flip(0))),
    "poisson": (F.poisson_nll_loss, (X, Y.abs())),
    "multi_margin": (F.multi_margin_loss, (X, CLASSES)),
    "multilabel_margin": (F.multilabel_margin_loss, (X[:2], torch.tensor([[3, 0, -1, 1, 1, 1], [2, -1, 0, 0, 0, 0]]))),
    "multilabel_soft_margin": (lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).float()), (X, Y)),
    "soft_margin": (lambda x, y: F.soft_margin_loss(x, y.sign()), (X, Y)),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=-1), (X, Y)),
    "pairwise_distance": (lambda x, y: F.pairwise_distance(x, y, p=1.0), (X, Y)),
    "cdist": (torch.cdist, (X, Y[:3])),
    "cdist_p": (lambda x, y: (torch.cdist(x, y, p=1.0), torch.cdist(x, y, p=3.0)), (X, Y)),
    "dist": (lambda x, y: torch.dist(x, y, 3.0), (X, Y)),
    "pdist": (F.pdist, (X,)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    function, args = LOSSES[name]
    check(function, args)


@pytest.mark.parametrize("name", ["mse", "cross_entropy", "cosine_similarity", "kl_div", "cross_entropy_ignore"])
def test_loss_at_another_batch_size(name: str) -> None:
    function, args = LOSSES[name]
    axes = {f"input_{index}": {0: "N"} for index in range(len(args))}
    check(function, args, tuple(torch.cat([value, value[:2]]) for value in args), dynamic_axes=axes)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_in_parts(reduction: str) -> None:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def loss(x: torch.Tensor, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        options = LinearCrossEntropyOptions(batch_chunk_size=2)
        return F.linear_cross_entropy(x, weight, classes, reduction=reduction, options=options)

    check(loss, (X, torch.randn(7, 6), CLASSES))
