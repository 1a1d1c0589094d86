"""`t2n::scan`: how a captured loop over an axis (`torch._higher_order_ops.scan`) stands in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from generic_export.compat import scan_operator

_LIBRARY = torch.library.Library("t2n", "FRAGMENT")
# `body` holds the captured graph of one step: (states, slices, constants) -> (next states, results).
_LIBRARY.define("scan(Tensor[] init, Tensor[] xs, Tensor[] constants, str body) -> Tensor[]")

SCAN = torch.ops.t2n.scan.default

Tensors = Sequence[torch.Tensor]
Step = Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""(states, one slice of each sequence, then the constants) -> (next states, results)."""


def loop(
    step: Step, states: Tensors, sequences: Tensors, *, constants: Tensors = (), without_steps: Tensors = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run a step for each slice along axis 0, as one loop of the graph; return the last states, and the results along axis 0.

    Args:
        step: reads nothing but its arguments, and every slice (tract has no loop over what its body does not read). It compares no
            slice with a constant: tract takes that out of the loop, and then does not fit the shapes
            (docs/contributing/engine-facts.md#scan-loops).
        states: what the first step begins with; a step's next states have the same shapes.
        sequences: equally long along axis 0.
        constants: what every step reads whole; they follow the slices.
        without_steps: the results where the sequences are empty.
    """
    steps, count = sequences[0].shape[0], len(states)
    if steps == 0:
        return list(states), list(without_steps)
    if steps == 1 or any(0 in state.shape for state in states):  # no loop to the engine either, or nothing to compute
        after, results = step(list(states), [*(each[0] for each in sequences), *constants])
        return after, [each.unsqueeze(0).expand(steps, *each.shape) for each in results]

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        after, results = step(list(values[:count]), list(values[count:]))
        # One state's memory layout for all steps, and none that is an argument unchanged: PyTorch asks for both.
        return [each.clone(memory_format=torch.contiguous_format) for each in (*after, *results)]

    # Views of one tensor among the constants would be taken for something that a step writes to.
    outputs = scan_operator()(
        flat,
        [state.clone(memory_format=torch.contiguous_format) for state in states],
        list(sequences),
        tuple(map(torch.clone, constants)),
    )
    return list(outputs[:count]), list(outputs[count:])
