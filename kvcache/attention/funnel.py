"""Funnel: relative positions of pooled texts, for lengths that are not known; transformers counts them in Python's lists.

In: a length. Out: embeddings of the distances between queries and keys of each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Places:
    """Positions first, first + step, ...: what a block's rows stand for in the text."""

    first: int
    step: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.step * (self.count - 1)


def position_embeds(self: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    """`FunnelAttentionStructure.get_position_embeds` (Dai et al. 2020, appendix A.2), of any length.

    Returns:
        For each block the embeddings [distances, D] between its rows, and between those and the rows that they pool (None for
        the first block); of factorised attention what transformers returns.
    """
    width = self.config.d_model
    frequencies = 1 / (10000 ** (torch.arange(0, width // 2, device=device).to(dtype) / (width // 2)))

    def embedded(distances: torch.Tensor) -> torch.Tensor:
        angles = distances.to(dtype)[:, None] * frequencies
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)

    if self.config.attention_type == "factorized":
        angles = torch.arange(seq_len, device=device).to(dtype)[:, None] * frequencies
        sine, cosine = torch.sin(angles), torch.cos(angles)
        pairs = ((sine, sine), (cosine, cosine), (cosine, sine), (-sine, cosine))  # phi, pi, psi, omega
        return tuple(torch.cat(pair, dim=-1) for pair in pairs)
    rows, found = _Places(0, 1, seq_len), []
    for block in range(self.config.num_blocks):
        pooling = None
        if block:
            pooled = _pooled(self.config, rows, block)
            pooling = embedded(_distances(rows, pooled, 2 ** (block - 1), 2, device))
            rows = pooled
        found.append([embedded(_distances(rows, rows, 2**block, 1, device)), pooling])
    return found


def _pooled(config: Any, rows: _Places, block: int) -> _Places:
    """Return every second position; the class token stays, as the one before the first that is pooled."""
    if not config.separate_cls:
        return _Places(0, 2**block, (rows.count + 1) // 2)
    count = 1 + ((rows.count - 1) // 2 if config.truncate_seq else rows.count // 2)
    return _Places(1 - 2**block, 2**block, count)


def _distances(rows: _Places, pooled: _Places, stride: int, shift: int, device: torch.device) -> torch.Tensor:
    """`FunnelAttentionStructure.relative_pos`: from the farthest before to the farthest after, int64."""
    farthest = pooled.first - rows.first + shift * pooled.count * stride
    return torch.arange(farthest, pooled.first - rows.last - 1, -stride, device=device)


__all__ = ["position_embeds"]
