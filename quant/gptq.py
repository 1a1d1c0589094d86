"""Error compensation on the deployed grid: what one column loses in rounding, the columns after it make up for.

In: a weight and E[x x^T] of its inputs. Out: `Q4Blocks` with a small output error tr((W - Q) H (W - Q)^T).
The scales are fixed beforehand from the weighted search, so the order in which columns are visited is free and nothing
about it is stored. (Frantar et al. 2022, "GPTQ", arXiv:2210.17323, for the compensation. Chen et al. 2025, "The Geometry of
LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", arXiv:2507.18553, for doing it without an inverse.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from generic_export.errors import WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.imatrix import ImatrixQuantizer, StatisticsAccumulator
from quant.protocol import InputStatistics
from quant.symmetric import quadratic_form
from quant.weighted_search import nearest_levels, not_finite, stored_words, weighted_scale_search

DEFAULT_DAMPING = 0.01
DEFAULT_SWEEPS = 2
# Measured on held-out text, on layers with 256 to 704 channels and 384 to 8192 tokens: 0.3 to 1 are about as good, and all
# better than 0; with fewer tokens than channels the error of the outputs halves.
DEFAULT_SHRINKAGE = 0.5
_LARGEST_SHRINKAGE = 0.9
_FEW_COLUMNS = 32  # whose errors are passed on one by one; those of more are one product
_ROW_BYTES = 64 << 20  # of float32 working copies, so that wide vocabularies stay within memory
_DAMPING_GROWTH = 10.0
_DAMPING_TRIES = 5

_LAZY_GROUPS = 8  # groups whose slopes are one product

DEFAULT_RIDGE = 0.05


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
        hessian = damp(shrunk_hessian(statistics.hessian, statistics.tokens, self.shrinkage), self.damping)
        scales = _static_scales(rows, statistics.mean_square, lattice, found)
        order = torch.argsort(hessian.diagonal(), stable=True)  # visited from its end: what matters most first
        factor, hessian = _unit_factor(hessian, order)
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
        columns, scales = rows.T.contiguous(), scales.to(torch.float32).T.contiguous()
        levels = _compensate(columns, scales, factor, order)
        if self.sweeps:
            descend(columns, levels, scales, hessian, self.sweeps)
        q = (levels.T.contiguous() + ZERO_POINT).to(torch.uint8).unflatten(-1, (-1, GROUP))
        return Q4Blocks(q, scales.T.contiguous().to(torch.float16))


def shrunk_hessian(hessian: torch.Tensor, tokens: int, shrinkage: float) -> torch.Tensor:
    """Return `hessian` [K, K] with its off-diagonal values reduced by the share shrinkage * K / tokens."""
    share = min(_LARGEST_SHRINKAGE, shrinkage * len(hessian) / max(1, tokens))
    shrunk = hessian * (1.0 - share)
    shrunk.diagonal().copy_(hessian.diagonal())
    return shrunk


def damp(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Return H + damping * mean(diag H) * I, in place; channels that were never active get a diagonal of that mean."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    diagonal[diagonal <= 0] = mean
    diagonal += damping * mean
    return hessian


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


def _static_scales(
    rows: torch.Tensor, mean_square: torch.Tensor, lattice: Q4Blocks, found: torch.Tensor
) -> torch.Tensor:
    searched = weighted_scale_search(rows, mean_square).d
    return torch.where(found.reshape(searched.shape), lattice.d.reshape(searched.shape), searched)


def _unit_factor(hessian: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what columns pass on to each other, [K, K], and the Hessian with the damping that took.

    With H = L L^T, columns permuted so that the first to be visited is the last, the error of the outputs is |(W - Q) L|^2, and
    column k of (W - Q) L is (w_k - q_k) L_kk plus what the columns visited before contribute, sum (w_j - q_j) L_jk. The factor is
    L with each of its columns divided by its L_kk.

    Raises:
        WeightError: no damping makes the Hessian positive definite (it holds inf or nan).
    """
    mean = hessian.diagonal().mean()
    damping = 0.0
    for attempt in range(_DAMPING_TRIES):
        lower, failed = torch.linalg.cholesky_ex(hessian.index_select(0, order).index_select(1, order))
        factor = lower.div_(lower.diagonal().clone())
        if not int(failed) and bool(factor.sum().isfinite()):
            return factor, hessian
        damping = DEFAULT_DAMPING * _DAMPING_GROWTH**attempt
        hessian = hessian + torch.eye(len(hessian)) * (damping * mean)
    raise WeightError("the input statistics hold inf or nan.", "Calibrate in f32, on a model whose outputs are finite.")


def _compensate(columns: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return levels -8..7, float32 [K, N], of columns rounded from the last of `order` on, each making up for those before it.

    Args:
        columns: W^T, float32 [K, N].
        scales: float32 [K // 32, N].
        factor: from `_unit_factor`.
        order: int64 [K].
    """
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.column_kernel import round_backwards

    wanted = columns[order]
    errors, levels = wanted.clone(), torch.empty_like(wanted)
    inverses = torch.where(scales != 0, 1.0 / scales, torch.zeros_like(scales)).numpy()
    group_of = order // GROUP

    def visit(start: int, end: int) -> None:
        here = slice(start, end)
        if end - start <= _FEW_COLUMNS:
            changed = (each[here].numpy() for each in (wanted, errors, levels))
            own = factor[here, here].contiguous().numpy()
            round_backwards(*changed, scales.numpy(), inverses, group_of[here].numpy(), own)
            return
        middle = (start + end) // 2
        visit(middle, end)
        wanted[start:middle].addmm_(factor[middle:end, start:middle].T, errors[middle:end])
        visit(start, middle)

    visit(0, len(order))
    natural = wanted  # whose memory is free by now
    natural[order] = levels
    return natural


# Exact coordinate descent over the levels and scales of Q4_0 blocks: the error of a layer's outputs falls with every
# visit.
# In: a weight, levels and scales to start from, and E[x x^T]. Changed in place. Columns of the weight are rows here,
# [K, N], so that one visit of a group is a product of contiguous matrices and a pass over rows that lie side by side.
def descend(
    columns: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor, sweeps: int
) -> None:
    """Visit every group some times, and lower tr(R H R^T), R = W - Q, with each visit.

    With P = R H, the best change of value k alone is P_k / H_kk, and the best scale of a group changes by
    (P_g . q_g) / (q_g^T H_gg q_g); both are rounded to what can be stored, which can only lower the error.

    Sweeps go forwards and backwards in turn: what the groups still to be visited contribute to a group's slopes is then what the
    sweep before has computed, and only the first sweep computes all of P.

    Args:
        columns: W^T, float32 [K, N].
        levels: float32 [K, N], -8 to 7; changed in place.
        scales: float32 [K // 32, N], as float16 holds them; changed in place.
        hessian: float32 [K, K], positive definite.
        sweeps: how often to visit every group.
    """
    residual = columns - (levels.unflatten(0, (-1, GROUP)) * scales.unsqueeze(1)).flatten(0, 1)
    from_visited = torch.empty_like(residual)
    for sweep in range(sweeps):
        backwards = bool(sweep % 2)
        for groups in _blocks_of_groups(len(scales), backwards=backwards):
            here = slice(groups.start * GROUP, groups.stop * GROUP)
            visited, ahead = slice(0, here.start), slice(here.stop, None)
            if backwards:
                visited, ahead = ahead, visited
            slopes = hessian[here, here] @ residual[here]
            slopes += from_visited[here] if sweep else hessian[here, ahead] @ residual[ahead]
            slopes += torch.mm(hessian[here, visited], residual[visited], out=from_visited[here])
            residual[here] -= _descend_groups(
                levels[here], scales[groups.start : groups.stop], slopes, hessian[here, here]
            )


def _blocks_of_groups(count: int, *, backwards: bool) -> Iterable[range]:
    starts = range(0, count, _LAZY_GROUPS)
    for start in reversed(starts) if backwards else starts:
        yield range(start, min(start + _LAZY_GROUPS, count))


def _descend_groups(
    levels: torch.Tensor, scales: torch.Tensor, slopes: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Update neighbouring groups in place, one after the other; returns how their values changed, in the memory of `slopes`."""
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.column_kernel import descend_group

    for group in range(len(scales)):
        own, behind = slice(group * GROUP, (group + 1) * GROUP), slice((group + 1) * GROUP, None)
        curvature = hessian[own, own].contiguous()
        descend_group(levels[own].numpy(), scales[group].numpy(), slopes[own].numpy(), curvature.numpy())
        slopes[behind].addmm_(hessian[behind, own], slopes[own], alpha=-1.0)
    return slopes


# Finding groups that already lie on a 16-level grid, so that they are stored without any loss.
# In: a weight as a checkpoint holds it. Out: `Q4Blocks`, and which groups were on a grid: releases trained for 4 bits,
# and checkpoints that were dequantised from a symmetric 4-bit format and saved as f16, bf16 or f32.
def lattice_blocks(weight: torch.Tensor) -> tuple[Q4Blocks, torch.Tensor]:
    """Find the groups whose values are integer multiples, -8 to 7, of one scale, but for storage noise.

    Args:
        weight: float [..., K], K a multiple of 32.

    Returns:
        Blocks (d = 0 and q = 8 in groups that are on no grid), and bool [..., K // 32]: which groups are.
        All-zero groups count as found.

    Raises:
        WeightError: the weight holds inf or nan.
    """
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.block_kernel import BAD_WEIGHT, find_grids
    from quant.lanes import new_lanes

    scales = torch.empty((*weight.shape[:-1], weight.shape[-1] // GROUP), dtype=torch.float32)
    if find_grids(new_lanes(), *stored_words(weight), scales.view(-1).numpy()) == BAD_WEIGHT:
        raise not_finite()
    values = weight.detach().to(torch.float32)
    found = (scales != 0) | (values.unflatten(-1, (-1, GROUP)) == 0).all(dim=-1)
    return Q4Blocks(nearest_levels(values, scales), scales.to(torch.float16)), found


# A weight that makes up for what its inputs have become: from altered inputs it gives nearly the outputs of the true
# ones.
# In: pairs of inputs, with and without what was quantised in front of a linear. Out: the weight to quantise in place
# of its own.
@dataclass
class DriftAccumulator:
    """Adds up how altered inputs x belong to true inputs y.

    Args:
        channels: K.
    """

    channels: int
    _inputs: StatisticsAccumulator = field(init=False)
    _products: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = StatisticsAccumulator(self.channels, with_hessian=True)
        self._products = torch.zeros(self.channels, self.channels)

    def add(self, altered: torch.Tensor, true: torch.Tensor) -> None:
        """Add a batch, float32 [..., K] each, row by row of the same tokens."""
        rows = altered.reshape(-1, self.channels)
        self._inputs.add(rows)
        self._products.addmm_((true.reshape(-1, self.channels) - rows).T, rows)

    def statistics(self) -> InputStatistics:
        """Return those of the altered inputs."""
        return self._inputs.statistics()

    def corrected(self, weight: torch.Tensor, ridge: float = DEFAULT_RIDGE) -> torch.Tensor:
        """Return V [N, K] that makes E|W y - V x|^2 small: W + W E[(y - x) x^T] (E[x x^T] + r I)^-1.

        Args:
            weight: W, float32 [N, K].
            ridge: what r is of the mean square of x with many tokens; few tokens say little, and K / tokens is added, so that V
                stays nearer to W.
        """
        seen = self._inputs.statistics()
        count = max(1, seen.tokens)
        assert seen.hessian is not None  # asked for above
        damped = damp(seen.hessian, ridge + self.channels / count)
        return weight + torch.linalg.solve(damped, (weight @ (self._products / count)).T).T
