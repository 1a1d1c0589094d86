"""Names of `transformers.exporters` that its documentation does not list, once each; those of transformers 5.23 and 5.24.

transformers' own backends are made with them: what a model has to be patched with before `torch.export`, which caches are pytree
nodes, what is recorded of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

# Importing it also registers the patches of "dynamo".
from transformers.exporters.exporter_dynamo import (
    patch_model_config,
    register_cache_pytrees_for_model,
    reset_model_state,
)
from transformers.exporters.metadata import build_export_metadata, record_output_structure
from transformers.exporters.utils import apply_patches, module_dtype, prepare_for_export


@contextmanager
def capture_patches(model: nn.Module) -> Iterator[None]:
    """Patch code of transformers that `torch.export` does not capture, and forget what earlier calls left in the model."""
    with ExitStack() as stack:
        stack.enter_context(apply_patches("dynamo"))
        stack.enter_context(reset_model_state(model))
        yield


def model_settings(model: nn.Module, flags: Mapping[str, Any]) -> Any:
    """Return a block in which the model's config has output flags (`use_cache`, `return_dict`, ...)."""
    return patch_model_config(model, dict(flags))


def register_caches(model: nn.Module) -> None:
    """Make pytree nodes of the caches of transformers and of a model's module."""
    register_cache_pytrees_for_model(model)


__all__ = [
    "build_export_metadata",
    "capture_patches",
    "model_settings",
    "module_dtype",
    "prepare_for_export",
    "record_output_structure",
    "register_caches",
]
