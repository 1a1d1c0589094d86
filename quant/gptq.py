"""Error compensation on the deployed grid: what one column loses in rounding, the columns after it make up for.

In: a weight and E[x x^T] of its inputs. Out: `Q4Blocks` with a small output error tr((W - Q) H (W - Q)^T).
The scales are fixed beforehand from the weighted search, so the order in which columns are visited is free and nothing
about it is stored. (Frantar et al. 2022, "GPTQ", arXiv:2210.17323, for the compensation.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from generic_export.errors import WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.imatrix import ImatrixQuantizer
from quant.lattice import lattice_blocks
from quant.protocol import InputStatistics
from quant.symmetric import quadratic_form
from quant.weighted_search import HIGHEST, LOWEST, weighted_scale_search

DEFAULT_DAMPING = 0.01
DEFAULT_SWEEPS = 2
# Measured on held-out text, on layers with 256 to 704 channels and 384 to 8192 tokens: 0.3 to 1 are about as good, and all
# better than 0; with fewer tokens than channels the error of the outputs halves.
DEFAULT_SHRINKAGE = 0.5
_LARGEST_SHRINKAGE = 0.9
_LAZY_GROUPS = 8  # groups whose effect on the columns behind them is one product
_BLOCK_COLUMNS = 128
_ROW_BYTES = 256 << 20  # of float32 working copies, so that wide vocabularies stay within memory
_DAMPING_GROWTH = 10.0
_DAMPING_TRIES = 5


@dataclass(frozen=True)
class GptqQuantizer:
    """Quantise with error compensation; without a Hessian it does what the imatrix search does.

    Attributes:
        damping: added to the Hessian's diagonal, as a fraction of its mean; ten times more when it is not definite.
        sweeps: passes of exact coordinate descent over levels and scales after the compensation.
        shrinkage: correlations are pulled to zero by this times channels over tokens: what few tokens say of them is
            mostly chance.
    """

    damping: float = DEFAULT_DAMPING
    sweeps: int = DEFAULT_SWEEPS
    shrinkage: float = DEFAULT_SHRINKAGE

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """Choose levels and scales; see `Quantizer`.

        Raises:
            WeightError: the Hessian's size is not the weight's, or the weight holds inf or nan.
        """
        if statistics is None or statistics.hessian is None:
            return ImatrixQuantizer().quantize(weight, statistics)
        if statistics.hessian.shape != (weight.shape[-1], weight.shape[-1]):
            raise WeightError(
                f"a Hessian of shape {tuple(statistics.hessian.shape)} does not belong to a weight with "
                f"{weight.shape[-1]} input channels.",
                "Collect the statistics with this model.",
            )
        lattice, found = lattice_blocks(weight)
        if bool(found.all()):
            return lattice
        rows = weight.detach().to(torch.float32).reshape(-1, weight.shape[-1])
        hessian = damped_hessian(shrunk_hessian(statistics.hessian, statistics.tokens, self.shrinkage), self.damping)
        scales = _static_scales(rows, statistics.mean_square, lattice, found)
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        factor, hessian = _inverse_factor(hessian, order)
        step = max(1, _ROW_BYTES // (4 * rows.shape[1]))
        pieces = [
            self._quantize_rows(rows[start : start + step], scales[start : start + step], factor, hessian, order)
            for start in range(0, len(rows), step)
        ]
        shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
        q = torch.cat([piece.q for piece in pieces]).reshape(*shape, GROUP)
        d = torch.cat([piece.d for piece in pieces]).reshape(shape)
        # A weight trained on the grid was right as it was: nothing to compensate in those groups.
        return Q4Blocks(torch.where(found.unsqueeze(-1), lattice.q, q), torch.where(found, lattice.d, d))

    def _quantize_rows(
        self, rows: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, hessian: torch.Tensor, order: torch.Tensor
    ) -> Q4Blocks:
        levels = _compensate(rows, scales, factor, order)
        return descend(rows, Q4Blocks(_as_blocks(levels), scales), hessian, self.sweeps)


def shrunk_hessian(hessian: torch.Tensor, tokens: int, shrinkage: float) -> torch.Tensor:
    """Return `hessian` [K, K] with its off-diagonal values reduced by the share shrinkage * K / tokens."""
    share = min(_LARGEST_SHRINKAGE, shrinkage * len(hessian) / max(1, tokens))
    return torch.diag(hessian.diagonal() * share).add_(hessian, alpha=1.0 - share)


def damped_hessian(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Return float32 H + damping * mean(diag H) * I; channels that were never active get a diagonal of that mean."""
    damped = hessian.detach().to(torch.float32).clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    diagonal[diagonal <= 0] = mean
    diagonal += damping * mean
    return damped


def output_power(weight: torch.Tensor, statistics: InputStatistics) -> float:
    """Return E[|W x|^2]: tr(W H W^T), or with mean squares only the sum of w^2 E[x^2].

    Args:
        weight: float32 [..., K]; the residual W - Q gives the error of the outputs.
        statistics: of the K inputs.
    """
    rows = weight.detach().to(torch.float32).reshape(-1, weight.shape[-1])
    step = max(1, _ROW_BYTES // (4 * rows.shape[1]))
    return sum(_rows_power(rows[start : start + step], statistics) for start in range(0, len(rows), step))


def _rows_power(rows: torch.Tensor, statistics: InputStatistics) -> float:
    if statistics.hessian is None:
        return float((rows.square() @ statistics.mean_square).sum(dtype=torch.float64))
    return quadratic_form(rows, statistics.hessian)


def descend(weight: torch.Tensor, blocks: Q4Blocks, hessian: torch.Tensor, sweeps: int) -> Q4Blocks:
    """Lower the output error further by exact coordinate descent, first over levels, then over each group's scale.

    With R = W - Q and P = R H, the best change of value k alone is P_k / H_kk, and the best scale of a group changes by
    (P_g . q_g) / (q_g^T H_gg q_g); both are rounded to what can be stored, which can only lower the error.

    Args:
        weight: float32 [N, K].
        blocks: where to start, q [N, K // 32, 32] and d [N, K // 32].
        hessian: float32 [K, K], positive definite.
        sweeps: how often to visit every group.
    """
    if not sweeps:
        return blocks
    q = blocks.q.to(torch.float32) - ZERO_POINT
    d = blocks.d.clone()
    for _ in range(sweeps):
        # Afresh in every sweep, so that float32 noise does not pile up, and columns that were visited need no slopes.
        slope = (weight - Q4Blocks((q + ZERO_POINT).to(torch.uint8), d).dequantize()) @ hessian
        for start in range(0, d.shape[1], _LAZY_GROUPS):
            end = min(start + _LAZY_GROUPS, d.shape[1])
            columns = slice(start * GROUP, end * GROUP)
            change = _descend_groups(q, d, range(start, end), slope[:, columns], hessian[columns, columns])
            slope[:, columns.stop :].addmm_(change, hessian[columns, columns.stop :], alpha=-1.0)
    return Q4Blocks((q + ZERO_POINT).to(torch.uint8), d)


def _descend_groups(
    q: torch.Tensor, d: torch.Tensor, groups: range, slope: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Update neighbouring groups in place, one after the other; returns how their values changed, [N, 32 * groups].

    What that does to the slopes of all columns behind them is one product for all of these groups: one for each reads and writes
    the whole matrix every time.
    """
    slope, changes = slope.clone(), torch.empty_like(slope)
    for index, group in enumerate(groups):
        columns = slice(index * GROUP, (index + 1) * GROUP)
        change = _descend_group(q, d, group, slope[:, columns].clone(), hessian[columns, columns])
        changes[:, columns] = change
        slope[:, columns.stop :].addmm_(change, hessian[columns, columns.stop :], alpha=-1.0)
    return changes


def _descend_group(
    q: torch.Tensor, d: torch.Tensor, group: int, slope: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Update one group's levels and scales in place; returns how its values changed, [N, 32]."""
    levels, scale = q[:, group], d[:, group].to(torch.float32)
    before = levels * scale.unsqueeze(1)
    slope, levels = slope.T.contiguous(), levels.T.contiguous()
    inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
    for k in range(GROUP):
        wanted = levels[k] + slope[k] * inverse / hessian[k, k]
        new = wanted.round_().clamp_(LOWEST, HIGHEST)
        step = (new - levels[k]).mul_(scale)
        levels[k] = new
        slope.addr_(hessian[k], step, alpha=-1.0)
    power = (levels * (hessian @ levels)).sum(dim=0)
    step = torch.where(power > 0, (slope * levels).sum(dim=0) / power, torch.zeros_like(power))
    refitted = (scale + step).to(torch.float16)
    d[:, group] = torch.where(refitted.isfinite(), refitted, d[:, group])
    q[:, group] = levels.T
    return q[:, group] * d[:, group].to(torch.float32).unsqueeze(1) - before


def _static_scales(
    rows: torch.Tensor, mean_square: torch.Tensor, lattice: Q4Blocks, found: torch.Tensor
) -> torch.Tensor:
    searched = weighted_scale_search(rows, mean_square).d
    return torch.where(found.reshape(searched.shape), lattice.d.reshape(searched.shape), searched)


def _inverse_factor(hessian: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper Cholesky factor of the permuted inverse, and the Hessian with the damping that took.

    Raises:
        WeightError: no damping makes the Hessian positive definite (it holds inf or nan).
    """
    mean = hessian.diagonal().mean()
    damping = 0.0
    for attempt in range(_DAMPING_TRIES):
        lower, failed = torch.linalg.cholesky_ex(hessian[order][:, order])
        if not int(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(factor.isfinite().all()):
                return factor, hessian
        damping = DEFAULT_DAMPING * _DAMPING_GROWTH**attempt
        hessian = hessian + torch.eye(len(hessian)) * (damping * mean)
    raise WeightError("the input statistics hold inf or nan.", "Calibrate in f32, on a model whose outputs are finite.")


def _compensate(rows: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return float levels -8..7 [N, K], columns rounded in `order` and their errors passed on."""
    pending = rows.T[order].contiguous()  # columns as contiguous rows
    scale_of = scales.to(torch.float32).T.repeat_interleave(GROUP, dim=0)[order]
    inverse_of = torch.where(scale_of != 0, 1.0 / scale_of, torch.zeros_like(scale_of))
    levels = torch.empty_like(pending)
    for start in range(0, len(order), _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, len(order))
        block, errors = pending[start:end], torch.empty_like(pending[start:end])
        triangle = factor[start:end, start:end]
        for k in range(end - start):
            q = torch.mul(block[k], inverse_of[start + k], out=levels[start + k]).round_().clamp_(LOWEST, HIGHEST)
            torch.addcmul(block[k], q, scale_of[start + k], value=-1.0, out=errors[k]).div_(triangle[k, k])
            block[k + 1 :].addr_(triangle[k, k + 1 :], errors[k], alpha=-1.0)
        pending[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1.0)
    natural = torch.empty_like(levels)
    natural[order] = levels
    return natural.T


def _as_blocks(levels: torch.Tensor) -> torch.Tensor:
    return (levels + ZERO_POINT).to(torch.uint8).contiguous().unflatten(-1, (-1, GROUP))
