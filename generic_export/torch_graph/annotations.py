"""Nodes of a captured program that are no operators of the graph: checks, annotations, arithmetic on sizes."""

from __future__ import annotations

import torch

from generic_export.compat import OpOverload, schema_of

# Calls that only check or annotate: they make no value that the graph needs.
_NAMES = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)

SCALAR_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def is_annotation(overload: OpOverload) -> bool:
    """Say whether an operator only checks or annotates."""
    return schema_of(overload).name.split("::")[-1] in _NAMES


__all__ = ["SCALAR_TYPES", "is_annotation"]
