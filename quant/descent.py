"""Exact coordinate descent over the levels and scales of Q4_0 blocks: the error of a layer's outputs falls with every visit.

In: a weight, levels and scales to start from, and E[x x^T]. Changed in place. Columns of the weight are rows here, [K, N], so that
one visit of a group is a product of contiguous matrices and a pass over rows that lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quant.blocks import GROUP

_LAZY_GROUPS = 8  # groups whose slopes are one product


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


__all__ = ["descend"]
