"""Names of transformers that no release promises, once each: what each is for, and the releases that have it.

In: any transformers from 5.15 to 5.23, where these names were tried. Out: one name for each thing, whatever the release. Those of
PyTorch are in `generic_export.compat`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import cache_utils

# --- layers of a cache -----------------------------------------------------------------------------


class _Absent:
    """Stands for a class that the installed transformers has not: nothing is an instance of it."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Absent)
"""A layer that keeps nothing: 5.23 and later. Before, there is a layer of attention in its place, which stays empty."""


# --- tables of implementations ---------------------------------------------------------------------


def attention_tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the class-wide tables of attention and of mask functions, name -> function.

    `register()` enters a name for good; an entry made here can be taken out again, and `masking_utils` looks only here.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return type(ALL_ATTENTION_FUNCTIONS)._global_mapping, type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping


def experts_table() -> dict[str, Any]:
    """Return the class-wide table of implementations of experts. Models are told which exist from there."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    table: dict[str, Any] = type(ALL_EXPERTS_FUNCTIONS)._global_mapping
    return table


# --- modules ---------------------------------------------------------------------------------------


def gated_activation(module: Any) -> Any:
    """Return what a block of experts applies to gate and up, joined, where it has a gate."""
    return module._apply_gate


def after_experts(module: Any) -> Any:
    """Return the norm that a block of experts applies to each expert's result, or None; 5.20 and later have such blocks."""
    return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None


def family_class(family: str, name: str) -> Any:
    """Return a class of a family's modeling file; None where the installed transformers has not that family or class.

    Of those that we replace methods of, qwen4_exp is in 5.16 and later; the others are in all.
    """
    path = f"transformers.models.{family}"
    try:
        module = import_module(f"{path}.modeling_{family}")
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    return getattr(module, name, None)


__all__ = ["DummyLayer", "after_experts", "attention_tables", "experts_table", "family_class", "gated_activation"]
