"""What makes an export folder one of `transformers.exporters` too: the entries of `export.json` that `ExportedModel` reads.

In: a manifest of ours. Out: `schema_version`, `export_format` and `components`, as transformers 5.23 writes them. A single pass is
called like its model, a language model with a growing cache (`t2n_llm/exporters/language_model.py`), an encoder alone.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from generic_export.compat import pytree
from t2n_llm.tasks.names import TEXT_GENERATION, recorded_task

SCHEMA_VERSION = 1
EXPORT_FORMAT = "tract"
LANGUAGE_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "cache")
_ENCODER = "encoder"
_TYPES = {"i64": "int64", "f16": "float16", "f32": "float32", "bool": "bool"}
_STATE = re.compile(r"cache_(key|value)")


def transformers_entries(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `export.json` by which transformers loads the folder.

    Args:
        manifest: of an export. An archive that transformers' interface has no call for gets no component.
    """
    return {"schema_version": SCHEMA_VERSION, "export_format": EXPORT_FORMAT, "components": _components(manifest)}


def _components(manifest: Mapping[str, Any]) -> dict[str, Any]:
    graph, parts = manifest["graph"], manifest.get("archives") or {}
    if "interface" in graph:
        return {"model": _component(manifest, manifest["archive"], graph["inputs"], graph["outputs"])}
    if recorded_task(manifest) == TEXT_GENERATION and all(_STATE.fullmatch(state["kind"]) for state in graph["states"]):
        return {"model": _component(manifest, manifest["archive"], LANGUAGE_MODEL_INPUTS, ("logits",))}
    if _ENCODER in parts and "encoder_decoder" in manifest:
        part = parts[_ENCODER]
        return {_ENCODER: _component(manifest, part["archive"], part["graph"]["inputs"], part["graph"]["outputs"])}
    return {}


def _component(
    manifest: Mapping[str, Any], archive: str, inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, Any]:
    tensors = manifest["graph"].get("interface", {})
    architecture = str(manifest["source"].get("architecture", ""))
    leaf = torch.empty(0)
    _, in_spec = pytree.tree_flatten(((), dict.fromkeys(inputs, leaf)))
    _, out_spec = pytree.tree_flatten(_result(architecture, outputs, leaf))
    return {
        "file": archive,
        "metadata": {
            "architecture": architecture,
            "packages": {name: text for name, text in manifest["versions"].items() if isinstance(text, str)},
            "export_config": {"export_format": EXPORT_FORMAT},
            "export_dtype": "float32",
            "export_device": "cpu",
            "kwargs": {name: _described(tensors.get(name)) for name in inputs},
            "in_spec": pytree.treespec_dumps(in_spec),
            "out_spec": pytree.treespec_dumps(out_spec),
            "in_constants": {},
            "out_constants": [],
        },
    }


def _described(tensor: Mapping[str, Any] | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    dtype = _TYPES.get(tensor["dtype"], tensor["dtype"])
    return {"rank": len(tensor["shape"]), "shape": list(tensor["shape"]), "dtype": dtype}


def _result(architecture: str, outputs: Sequence[str], leaf: torch.Tensor) -> Any:
    """Return what the model's forward returns with these outputs: of the class that it is annotated with, or a dict."""
    import transformers
    from transformers.utils import ModelOutput

    forward = getattr(getattr(transformers, architecture, None), "forward", None)
    try:
        returned = typing.get_type_hints(forward).get("return") if forward is not None else None
    except Exception:  # annotations of names that a module imports for type checkers alone
        returned = None
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and set(outputs) <= set(kind.__annotations__):
            found = kind(**dict.fromkeys(outputs, leaf))
            if list(found) == list(outputs):  # the archive's order
                return found
    return dict.fromkeys(outputs, leaf)


__all__ = ["EXPORT_FORMAT", "LANGUAGE_MODEL_INPUTS", "SCHEMA_VERSION", "transformers_entries"]
