"""The normalization of hyper-connections: in PyTorch as transformers writes it, and in the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from kvcache.attention.operator import explicit_attention
from kvcache.compat import family_class
from tests.engine_check import check


class Normalized(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.t2n.sinkhorn(x.exp(), self.rounds, 1e-6)


@pytest.mark.parametrize("rounds", [0, 1, 19])
def test_in_the_engine(rounds: int) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(1, steps, 4, 4),) for steps in (3, 1, 9)]
    target = TractNNEF(check_io=False, dynamic_axes={"input_0": {1: "S"}})
    check(Normalized(rounds), *calls, target=target)


def test_a_connection_of_transformers_gives_the_same() -> None:
    connection = family_class("deepseek_v4", "DeepseekV4HyperConnection")
    if connection is None:
        pytest.skip("transformers has no DeepSeek-V4")
    from transformers import DeepseekV4Config

    torch.manual_seed(0)
    module = connection(DeepseekV4Config(hidden_size=16)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    streams = torch.randn(1, 5, module.hc_mult, 16)
    own = connection.forward
    expected = module(streams)
    with explicit_attention(), explicit_attention():
        assert connection.forward is not own
        found = module(streams)
    assert connection.forward is own
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
