"""The zoo's tiny models with fewer layers, for tests that do not need several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from t2n_llm.zoo import configs, tiny_model
from t2n_llm.zoo.overrides import TASK_OVERRIDES
from t2n_llm.zoo.shrinking import ELSEWHERE

_COUNTS = ("*num_hidden_layers", "n_layers", "*encoder_layers", "*decoder_layers", "num_layers", "depth")


def shallow_model(architecture: str, task: str, *, seed: int = 0, layers: int = 1, **changes: Any) -> Any:
    """Return what `build_tiny_model` makes, with fewer layers than its three.

    Args:
        architecture: a model type of transformers.
        task: what the model is for, as in `t2n_llm.tasks.names`; not text generation.
        seed: of the weights.
        layers: in each stack.
        changes: made to its tiny config.
    """
    rules = replace(ELSEWHERE, fewer=(*((pattern, layers) for pattern in _COUNTS), *ELSEWHERE.fewer))
    with (
        mock.patch.object(tiny_model, "ELSEWHERE", rules),
        mock.patch.object(configs, "ELSEWHERE", rules),
        mock.patch.dict(TASK_OVERRIDES, {architecture: {**TASK_OVERRIDES.get(architecture, {}), **changes}}),
    ):
        return tiny_model.build_tiny_model(architecture, seed, task)
