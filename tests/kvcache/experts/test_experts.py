"""Experts: our operators against transformers' own loops, and in the engine, whatever router chose them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvcache.experts.families import EXPERTS_NAME, explicit_experts
from kvcache.experts.operators import Activation, all_experts, recognised_activation, routed_experts
from tests.engine_check import check

EXPERTS, WIDTH, INNER, CHOSEN = 6, 32, 64, 2


class Block(nn.Module):
    """A softmax router in front of experts."""

    def __init__(self, activation: Activation, *, gated: bool = True, biased: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation = activation
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.joined = nn.Parameter(torch.randn(EXPERTS, 2 * INNER if gated else INNER, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)  # input-first, as GPT-OSS has it
        self.gated = gated
        self.biases = nn.Parameter(torch.randn(EXPERTS, 2 * INNER)) if biased else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH)) if biased else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = torch.softmax(self.router(hidden), dim=-1).topk(CHOSEN, dim=-1)
        gate, up = (self.joined[:, ::2], self.joined[:, 1::2]) if self.gated else (self.joined, None)
        biases = (None, None) if self.biases is None else (self.biases[:, ::2], self.biases[:, 1::2])
        return routed_experts(
            hidden,
            index,
            weights,
            gate=gate,
            up=up,
            down=self.down.transpose(1, 2),
            biases=(*biases, self.down_bias),
            activation=self.activation,
        )


@pytest.mark.parametrize(
    ("activation", "gated", "biased"),
    [
        (Activation("silu"), True, False),
        (Activation("gelu"), True, False),
        (Activation("relu"), True, True),
        (Activation("silu"), False, False),
        (Activation("silu", 1.7, 0.8), True, True),
    ],
)
def test_experts_in_the_engine(activation: Activation, gated: bool, biased: bool) -> None:
    sizes = [torch.randn(count, WIDTH) for count in (5, 1, 33)]
    text = check(
        Block(activation, gated=gated, biased=biased),
        *((size,) for size in sizes),
        dynamic_axes={"input_0": {0: "S"}},
        atol=3e-5,
        rtol=1e-4,
    )
    assert text.count("= tract_moe_ffn(") == 1
    # The joined projection is taken apart while it is stored, not in the graph: blocks cannot be sliced there.
    assert 'label="joined"' not in text
    assert ('label="routed_up_proj"' in text) == gated


def test_what_a_router_leaves_out_is_not_read() -> None:
    """No expert, and a token that chooses none: neither adds anything."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
            self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return routed_experts(hidden, index, weights, gate=self.gate, down=self.down, activation=Activation("silu"))

    index = torch.tensor([[0, EXPERTS], [3, 1], [EXPERTS, 5]])
    weights = torch.tensor([[0.5, 0.9], [0.0, 0.0], [0.7, 0.3]])
    check(Fixed(), (torch.randn(3, WIDTH), index, weights), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_linear_layer_for_each_group(rank: int) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.ops.t2n.grouped_linear(values, self.weight)

    leading = ((), (EXPERTS,), (2, EXPERTS))[rank - 2]
    values = [torch.randn(*leading, count, WIDTH) for count in (5, 1)]
    axes = {"input_0": {rank - 2: "S"}}
    check(Grouped(), *((each,) for each in values), dynamic_axes=axes, atol=2e-5, rtol=1e-4)


def test_every_expert_computed_is_the_same() -> None:
    block = Block(Activation("silu"))
    hidden = torch.randn(7, WIDTH)
    weights, index = torch.softmax(block.router(hidden), dim=-1).topk(CHOSEN, dim=-1)
    dense = all_experts(
        hidden,
        index,
        weights,
        inner=block.joined,
        down=block.down.transpose(1, 2),
        between=lambda both: nn.functional.silu(both[..., ::2]) * both[..., 1::2],
    )
    torch.testing.assert_close(dense, block(hidden), rtol=1e-5, atol=1e-5)


# --- transformers' side ------------------------------------------------------------------------------


def experts_of(family: str, **changes: Any) -> nn.Module:
    """A family's own block of experts with random weights."""
    from importlib import import_module

    names = {
        "mixtral": "MixtralExperts",
        "gpt_oss": "GptOssExperts",
        "nemotron_h": "NemotronHExperts",
        "deepseek_v4": "DeepseekV4Experts",
        "muse_spark": "MuseSparkExperts",
    }
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    fields = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "moe_hidden_size": WIDTH,
        "moe_latent_size": None,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "swiglu_limit": 0.9,
        "swiglu_alpha": 1.7,
        "post_norm_eps": 1e-6,
        "_experts_implementation": EXPERTS_NAME,
    }
    torch.manual_seed(0)
    block: nn.Module = getattr(module, names[family])(SimpleNamespace(**(fields | changes)))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return block


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "deepseek_v4", "muse_spark"])
def test_our_experts_say_what_transformers_own_loop_says(family: str) -> None:
    block = experts_of(family)
    hidden, index = torch.randn(9, WIDTH), torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(9)])
    weights = torch.rand(9, CHOSEN)
    block.config._experts_implementation = "eager"
    expected = block(hidden, index, weights)
    block.config._experts_implementation = EXPERTS_NAME
    with explicit_experts():
        answer = block(hidden, index, weights)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def test_activations_are_recognised_by_what_they_do() -> None:
    assert recognised_activation(experts_of("mixtral")) == Activation("silu")
    assert recognised_activation(experts_of("mixtral", hidden_act="gelu_pytorch_tanh")) == Activation("gelu")
    assert recognised_activation(experts_of("mixtral", hidden_act="gelu")) is None  # exact, which the engine has not
    clamped = experts_of("gpt_oss")
    assert recognised_activation(clamped) == Activation("silu", clamped.alpha, clamped.limit)
    assert recognised_activation(experts_of("deepseek_v4")) is None  # clamped, but without the added one
    assert recognised_activation(experts_of("nemotron_h")) is None


def test_nothing_outlives_the_block() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    def now() -> list[Any]:
        own = [DbrxExperts.forward, JetMoeMoE.forward, JetMoeMoA.map, JetMoeMoA.reduce, Llama4TextMoe.forward]
        return [dict(ALL_EXPERTS_FUNCTIONS), *own]

    before = now()
    with explicit_experts() as name:
        assert name in ALL_EXPERTS_FUNCTIONS
        assert now()[1:] != before[1:]
    with pytest.raises(ZeroDivisionError), explicit_experts():
        raise ZeroDivisionError
    assert now() == before
