"""A recurrence over time, written once in PyTorch: captured as one loop, which tract runs as its scan operator.

In: a step in terms of single positions. Out: the last states and the collected results, for any number of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from generic_export.compat import scan_operator

Step = Callable[..., Sequence[torch.Tensor]]
"""(states, slices, constants, all as positional tensors) -> (next states, results)."""


def over_time(
    step: Step,
    states: Sequence[torch.Tensor],
    sequences: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Run a step for each position.

    Args:
        step: takes states, the position's slices and constants; returns new states, shaped as the old ones, and results.
            It multiplies and sums instead of calling matmul: tract moves the axes of an einsum in a loop's body back and
            forth without end, in some graphs and not in others, and is not faster with it.
        states: before the first position.
        sequences: each [S, ...]; position t reads its row t.
        constants: read whole by every step; whatever tensor the step needs must come in as an argument.

    Returns:
        The states after the last position, then each result as [S, ...].
    """
    # What a loop carries may neither share memory with anything else nor have another layout than the step's results.
    carried = [state.clone(memory_format=torch.contiguous_format) for state in states]
    return list(scan_operator()(step, tuple(carried), tuple(sequences), tuple(constants)))


def swap_time(tensor: torch.Tensor) -> torch.Tensor:
    """[B, S, ...] -> [S, B, ...], and back."""
    return tensor.transpose(0, 1)
