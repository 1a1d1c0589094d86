"""Frequencies that depend on the length: as transformers switches them, in PyTorch and in the engine, before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvcache.rotary.scaling import express_length_switches
from tests.engine_check import check

WIDTH, SWITCH = 16, 16
PARAMETERS = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0 + 0.1 * index for index in range(WIDTH // 2)],
        "long_factor": [2.0 + 0.3 * index for index in range(WIDTH // 2)],
    },
}


class Rotary(nn.Module):
    """Cosines and sines of the last S of P + S positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config: Any = LlamaConfig(
            hidden_size=2 * WIDTH,
            num_attention_heads=2,
            max_position_embeddings=SWITCH if kind == "dynamic" else 4 * SWITCH,
            rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **PARAMETERS[kind]},
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, new: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(new.shape[1]) + past.shape[1]
        cos, sin = self.rotary(new, positions[None])
        return cos, sin


def sizes(new: int, past: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, new, 1), torch.zeros(1, past, 1)


LENGTHS = [(5, 0), (SWITCH, 0), (SWITCH + 1, 0), (40, 0), (1, SWITCH - 1), (1, SWITCH), (3, 30)]


@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_switch_is_transformers_own(kind: str) -> None:
    for length in LENGTHS:
        expected = Rotary(kind)(*sizes(*length))  # a new one each time: transformers' modules remember
        ours = Rotary(kind)
        express_length_switches(ours)
        for answer, reference in zip(ours(*sizes(*length)), expected, strict=True):
            torch.testing.assert_close(answer, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_switch_is_in_the_graph(kind: str) -> None:
    ours = Rotary(kind)
    express_length_switches(ours)
    axes = {"input_0": {1: "S"}, "input_1": {1: "P"}}
    check(ours, *(sizes(*length) for length in LENGTHS), dynamic_axes=axes, atol=2e-5, rtol=1e-4)


def test_frequencies_that_stay_are_left_alone() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plain = nn.Sequential(LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=2)))
    express_length_switches(plain)
    assert "forward" not in vars(plain[0])
