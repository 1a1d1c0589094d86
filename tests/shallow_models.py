"""The zoo's tiny models with fewer layers, for tests that are about something else than what lies between layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo import configs, tiny_model
from t2n_llm.zoo.shrinking import ELSEWHERE

_COUNTS = ("*num_hidden_layers", "n_layers", "*encoder_layers", "*decoder_layers", "num_layers", "depth")


def shallow_model(architecture: str, task: str = TEXT_GENERATION, *, seed: int = 0, layers: int = 1) -> Any:
    """Return what `build_tiny_model` makes, with so many layers where it has three.

    Args:
        architecture: a model type of transformers.
        task: what the model is for; no causal language model.
        seed: of the weights.
        layers: of each stack.
    """
    rules = replace(ELSEWHERE, fewer=(*((pattern, layers) for pattern in _COUNTS), *ELSEWHERE.fewer))
    with mock.patch.object(tiny_model, "ELSEWHERE", rules), mock.patch.object(configs, "ELSEWHERE", rules):
        return tiny_model.build_tiny_model(architecture, seed, task)


__all__ = ["shallow_model"]
