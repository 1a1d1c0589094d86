"""What `export.json` says of a single-pass archive: inputs, outputs, labels, and how the inputs are made.

In: a `HeadModule`. Out: plain data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from generic_export.nnef.graph import NnefVariable
from t2n_llm.graph.interface import text_model
from t2n_llm.tasks.heads.model import HeadModule


def described_tensors(module: HeadModule, dtype: str) -> dict[str, Any]:
    """Return shape and element type of each input and output; a size that follows from those of the inputs is null.

    Args:
        module: the model.
        dtype: that the graph computes in.
    """
    reading = module.reading
    inputs = {
        each.name: {"shape": list(reading.axes(each)), "dtype": "i64" if each.is_integer else dtype}
        for each in reading.inputs
    }
    return inputs | {name: {"shape": list(axes), "dtype": dtype} for name, axes in module.outputs.items()}


def described_model(module: HeadModule, config: Any, variables: Iterable[NnefVariable]) -> dict[str, Any]:
    """Return what a reader of an archive should know of its model.

    Args:
        module: the model.
        config: of transformers.
        variables: everything that is stored.
    """
    stored = list(variables)
    text = config.get_text_config(decoder=True)
    found: dict[str, Any] = {"parameters": sum(variable.values for variable in stored)}
    if hasattr(text, "vocab_size"):
        found = text_model(config, stored) | {"pad_token_id": getattr(text, "pad_token_id", None)}
    if module.head.labelled:
        labels = {str(number): label for number, label in (config.id2label or {}).items()}
        found |= {"id2label": labels, "problem_type": getattr(config, "problem_type", None)}
    elif isinstance(getattr(text, "hidden_size", None), int):
        found["hidden_size"] = text.hidden_size
    if module.pooling is not None:
        found["pooling"] = module.pooling.recorded()
    return found | {"inputs": {each.name: each.values.value for each in module.reading.inputs}}


__all__ = ["described_model", "described_tensors"]
