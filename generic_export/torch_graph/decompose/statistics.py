"""`torch.cov` and `torch.corrcoef` without PyTorch's questions about the weights' values, which shapes alone do not answer."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of variables (rows) over observations (columns), as torch.cov's documentation defines it.

    Args:
        input: [variables, observations], or one variable's observations.
        correction, fweights, aweights: as of torch.cov; that weights are not negative is not looked at.
    """
    rows = torch.atleast_2d(input)
    observations = rows.shape[1]
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        total: Tensor | int = observations
        mean = rows.sum(1, keepdim=True) / observations
    else:
        total = weights.sum()
        mean = (rows * weights).sum(1, keepdim=True) / total
    centred = rows - mean
    degrees: Tensor | int
    if weights is None or aweights is None or correction == 0:
        degrees = total - correction
    else:
        # Without frequencies the weights themselves take their place.
        degrees = total - correction * (weights * aweights).sum() / total
    scaled = centred if weights is None else centred * weights
    positive = torch.clamp(degrees, min=0) if isinstance(degrees, Tensor) else max(degrees, 0)
    return ((scaled @ centred.mT.conj()) / positive).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Correlations of variables (rows): their covariance with deviations of 1, within [-1, 1]."""
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = torch.sqrt(torch.diagonal(covariance))
    result = covariance / deviations.unsqueeze(0) / deviations.unsqueeze(1)
    return result if result.is_complex() else torch.clamp(result, -1.0, 1.0)
