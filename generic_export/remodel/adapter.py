"""`BoundaryAdapter`: a module that takes and gives what a plan says, around one that stays as it is.

In: a module and its `Boundary`. Out: a module to export; parameters bear the names that they have in the inner one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from generic_export.errors import OptionError
from generic_export.remodel.boundary import Boundary
from generic_export.torch_graph.methods import SharedState, inner_of
from generic_export.torch_graph.nested import named_outputs

_BOUNDARY = "_t2n_boundary"


class BoundaryAdapter(SharedState):
    """A module with another boundary.

    Args:
        inner: the module; it is called as it is, hooks included, and not modified.
        boundary: what its inputs and outputs become.

    Raises:
        OptionError: it is a ScriptModule, which keeps its state out of reach.
    """

    def __init__(self, inner: nn.Module, boundary: Boundary) -> None:
        if isinstance(inner, torch.jit.ScriptModule):
            raise OptionError(
                f"sub-graph {boundary.name!r} is a ScriptModule, whose inputs and outputs cannot be changed.",
                "Wrap it in an nn.Module that calls it.",
            )
        super().__init__(inner)
        object.__setattr__(self, _BOUNDARY, boundary)  # past nn.Module; under a name that no child has

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the inner module.

        Args:
            inputs: the archive's inputs, in order.
        Returns:
            The archive's outputs, in order.
        """
        boundary: Boundary = self.__dict__[_BOUNDARY]
        args, kwargs = full_arguments(boundary, *inputs)
        outputs = named_outputs(inner_of(self)(*args, **kwargs))[1]
        axes = [boundary.outputs[position].collapsed for position in boundary.kept]
        kept = [outputs[position] for position in boundary.kept]
        return tuple(tensor.squeeze(gone) if gone else tensor for tensor, gone in zip(kept, axes, strict=True))


def full_arguments(boundary: Boundary, *inputs: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the inner module is called with for these inputs of the archive."""
    return boundary.side.call.arguments(boundary.side.inner(inputs))
