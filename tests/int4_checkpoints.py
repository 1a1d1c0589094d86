"""Packs known integers the way GPTQ, AWQ and compressed-tensors do, one loop over integers each: slow, and easy to check by eye."""

from __future__ import annotations

from collections.abc import Sequence

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(rows: torch.Tensor, bits: int = 4, order: Sequence[int] | None = None) -> torch.Tensor:
    """Pack integers [n, m] along the last axis into int32 [n, m * bits / 32], field i of a word from integer `order[i]`."""
    fields = 32 // bits
    packed = []
    for row in rows.tolist():
        words = []
        for start in range(0, len(row), fields):
            group = row[start : start + fields]
            group += [0] * (fields - len(group))
            word = sum(group[integer] << (bits * place) for place, integer in enumerate(order or range(fields)))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(words)
    return torch.tensor(packed, dtype=torch.int32)


def gptq_layer(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    bits: int = 4,
    offset: int = 1,
    g_idx: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """A layer of levels [N, K], scales and zero points [N, G]."""
    inputs, groups = levels.shape[1], scales.shape[1]
    return {
        "qweight": pack_words(levels, bits).T.contiguous(),
        "qzeros": pack_words((zeros - offset).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // groups) if g_idx is None else g_idx,
    }


def awq_layer(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer of levels [N, K], scales and zero points [N, G], in AutoAWQ's GEMM layout."""
    return {
        "qweight": pack_words(levels.T, order=AWQ_ORDER),
        "qzeros": pack_words(zeros.T, order=AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def compressed_layer(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, bits: int = 4
) -> dict[str, torch.Tensor]:
    """A layer of levels [N, K] and scales [N, G]; zero points only where they are not in the middle."""
    layer = {
        "weight_packed": pack_words(levels, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(levels.shape),
    }
    return layer if zeros is None else layer | {"weight_zero_point": pack_words(zeros.T, bits).T.contiguous()}


def values_of(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """(level - zero) * scale in float32, with the group of each input spelled out."""
    return (levels - zeros[:, group_of]).to(torch.float32) * scales[:, group_of].to(torch.float32)
