"""Products of groups of rows with a matrix of each group's own, as mixtures of experts compute them, with tensors of PyTorch alone.

The groups' ends are values, so that no size is known: every row is multiplied with every matrix, and its own product is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from generic_export.compat import OpOverload


def grouped_rewrites() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return the functions that stand for such operators, where a library has registered them."""
    name = "grouped_mm_fallback"  # registered by transformers for what torch.nn.functional.grouped_mm does not take
    library = torch.ops.transformers
    return {getattr(library, name).default: grouped_products} if hasattr(library, name) else {}


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return `input[s] @ weight[g]` for each row s of group g, [S, N]; rows behind the last group are 0.

    Args:
        input: [S, K], the rows of each group together.
        weight: [G, K, N].
        offs: where each group ends, [G].
    """
    rows = torch.arange(input.shape[0], device=input.device)
    begins = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    own = (rows >= begins[:, None]) & (rows < offs[:, None])
    products = torch.matmul(input.unsqueeze(0), weight)
    return torch.where(own.unsqueeze(2), products, torch.zeros_like(products)).sum(0)


__all__ = ["grouped_products", "grouped_rewrites"]
