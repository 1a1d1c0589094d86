"""Names of transformers that no release promises, once each: what each is for, and the releases that have it.

In: any transformers from 5.15 to 5.24, where these names were tried. Out: one name for each thing, whatever the release. Those of
PyTorch are in `generic_export.compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

from transformers import cache_utils

# --- layers of a cache -----------------------------------------------------------------------------


class _Absent:
    """Stands for a class that the installed transformers has not: nothing is an instance of it."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Absent)
"""A layer that keeps nothing: 5.23 and later. Before, there is a layer of attention in its place, which stays empty."""


# --- the name of a cache ---------------------------------------------------------------------------

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What forwards and answers call the cache: the first in transformers 5.24 and later, one of the others before.

A model of remote code may have an older name under any release, so each is asked what it takes."""


def cache_keyword(forward: Callable[..., Any]) -> str:
    """Return what a forward calls its cache; the name of most models where its signature does not say."""
    parameters = signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


def cache_in(named: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call; None where there is none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)


def cache_of(answer: Any) -> Any:
    """Return the cache in a model's answer; None where there is none.

    5.24 answers to the older names too, as properties that warn: what the answer holds itself is looked at.
    """
    return cache_in(getattr(answer, "__dict__", {}))


def takes_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that stands in the place of a forward, and has a parameter `cache`, be called by any of the names."""

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        return function(*args, **{"cache" if name in CACHE_NAMES else name: value for name, value in named.items()})

    return called


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


__all__ = [
    "CACHE_NAMES",
    "DummyLayer",
    "after_experts",
    "attention_tables",
    "cache_in",
    "cache_keyword",
    "cache_of",
    "experts_table",
    "family_class",
    "gated_activation",
    "takes_cache",
]
