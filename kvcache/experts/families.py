"""transformers calls the experts of `kvcache.experts.operators`: through its experts interface, or family by family.

In: nothing. Out: `explicit_experts()`, inside which that interface knows ours, and the loaded classes of those families call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvcache.attention.families import Forwards, registered, replaced_forwards
from kvcache.compat import experts_table, gated_activation
from kvcache.experts.operators import Activation, all_experts, experts_forward, recognised_activation, routed_experts

EXPERTS_NAME = "t2n_explicit"
"""The name under which transformers knows our experts while `explicit_experts()` is entered."""


@contextmanager
def explicit_experts() -> Iterator[str]:
    """Register the explicit experts with transformers and with the families below inside a `with` block; yields their name."""
    with registered(experts_table(), EXPERTS_NAME, experts_forward), replaced_forwards(_FORWARDS):
        yield EXPERTS_NAME


# --- DBRX: three stacks in one axis, the last one transposed ----------------------------------------


def _dbrx_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    stacked = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    result = _gated(
        hidden_states.reshape(-1, self.hidden_size),
        top_k_index,
        top_k_weights,
        gate=self.mlp.w1.view(stacked),
        up=self.mlp.v1.view(stacked),
        down=self.mlp.w2.view(stacked).transpose(1, 2),
        act_fn=self.mlp.activation_fn,
    )
    return result.view(hidden_states.shape[0], -1, self.hidden_size)


# --- LongCat: experts beyond the last one hand on what they get ---------------------------------------


def _longcat_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    real = self.num_routed_experts
    idle = (top_k_weights * (top_k_index >= real)).sum(-1, keepdim=True)
    handed_on = (hidden_states * idle).to(hidden_states.dtype)
    if real == 0:
        return handed_on
    half = self.intermediate_size
    result = _gated(
        hidden_states,
        top_k_index.clamp(max=real),
        top_k_weights * (top_k_index < real),
        gate=self.gate_up_proj[:real, :half],
        up=self.gate_up_proj[:real, half:],
        down=self.down_proj,
        act_fn=self.act_fn,
    )
    return result + handed_on


# --- Llama 4: what an expert reads is scaled, not what it says ----------------------------------------


def _llama4_moe(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(hidden, self.router.weight, self.router.bias)
    chosen, index = torch.topk(logits, self.top_k, dim=1)
    scores = torch.sigmoid(chosen.float()).to(hidden.dtype)
    inner, half = self.experts, self.experts.expert_dim
    scaled = (hidden[:, None] * scores[:, :, None]).reshape(-1, self.hidden_dim)
    routed = _gated(
        scaled,
        index.reshape(-1, 1),
        torch.ones_like(scores).reshape(-1, 1),
        gate=inner.gate_up_proj.transpose(1, 2)[:, :half],
        up=inner.gate_up_proj.transpose(1, 2)[:, half:],
        down=inner.down_proj.transpose(1, 2),
        act_fn=inner.act_fn,
    )
    result = self.shared_expert(hidden) + routed.reshape(-1, self.top_k, self.hidden_dim).sum(dim=1)
    return result, logits


# --- JetMoE: experts in the feed-forward network, and around the attention ----------------------------


def _jetmoe_moe(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    hidden = layer_input.reshape(-1, self.input_size)
    index, gates = _jetmoe_routing(self.router, hidden)
    half = self.hidden_size
    result = _gated(
        hidden,
        index,
        gates,
        gate=self.input_linear.weight[:, :half],
        up=self.input_linear.weight[:, half:],
        down=self.output_linear.weight,
        act_fn=self.activation,
    )
    return result.reshape(layer_input.shape) + self.bias


def _jetmoe_map(self: Any, layer_input: torch.Tensor) -> tuple[torch.Tensor, None, tuple[torch.Tensor, torch.Tensor]]:
    """Queries of the chosen attention experts, [B, S, k, width]."""
    batch, length, _ = layer_input.shape
    hidden = layer_input.reshape(-1, self.input_size)
    index, gates = _jetmoe_routing(self.router, hidden)
    every = torch.ops.t2n.grouped_linear(hidden, self.input_linear.weight).transpose(0, 1)
    places = index[:, :, None].expand(-1, -1, self.hidden_size)
    return every.gather(1, places).view(batch, length, self.top_k, self.hidden_size), None, (index, gates)


def _jetmoe_reduce(self: Any, layer_input: torch.Tensor, topo_info: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    batch, length, _, width = layer_input.shape
    index, gates = topo_info
    # [T, k, width] lies where its expert reads it, [T, E, width], weighted; the other experts read zeros.
    empty = layer_input.new_zeros(index.shape[0], self.num_experts, width)
    weighted = layer_input.reshape(-1, self.top_k, width) * gates[:, :, None]
    read = empty.scatter(1, index[:, :, None].expand(-1, -1, width), weighted).transpose(0, 1)
    result = torch.ops.t2n.grouped_linear(read, self.output_linear.weight).sum(0)
    return result.view(batch, length, self.input_size) + self.bias


def _jetmoe_routing(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = router.layer(hidden).float()
    chosen, index = logits.topk(router.top_k, dim=1)
    return index, torch.softmax(chosen, dim=1).type_as(hidden)


# --- Switch Transformers: experts are modules, a token goes to one of them or to none ------------------


def _switch_experts(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """`selected_experts` is one-hot [T, 1, E], zeros where the chosen expert has no room left: then it is none."""
    chosen = selected_experts[:, 0]
    index = torch.where(chosen.sum(-1) > 0, chosen.argmax(-1), self.num_experts)
    experts = [self[f"expert_{number}"] for number in range(self.num_experts)]
    return _plain(
        hidden_states,
        index[:, None],
        routing_weights,
        inner=[each.wi for each in experts],
        down=[each.wo for each in experts],
        act_fn=experts[0].act,
    )


def _switch_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best expert of each token, one-hot [B, S, E], and its probability [B, S, 1], in the router's own element type.

    The model's own code casts the classifier in place, which no capture may do. An expert takes the first tokens of a sequence
    that choose it, as many as it has room for (Fedus et al. 2021, section 2.2).
    """
    bias = self.classifier.bias
    logits = torch.nn.functional.linear(
        hidden_states.to(self.dtype),
        self.classifier.weight.to(self.dtype),
        None if bias is None else bias.to(self.dtype),
    )
    probabilities = torch.softmax(logits, dim=-1).to(hidden_states.dtype)
    best, index = probabilities.max(dim=-1)
    chosen = (index[..., None] == torch.arange(self.num_experts, device=index.device)).long()
    return chosen * (chosen.cumsum(-2) <= self.expert_capacity), best[..., None], logits


# --- NLLB-MoE: experts are modules with biases, a token goes to at most two of them ------------------------


def _nllb_router(
    self: Any, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the model's own, which casts its classifier in place, and keeps the capacity for the text that it is called with."""
    bias = self.classifier.bias
    logits = torch.nn.functional.linear(
        hidden_states.to(self.dtype),
        self.classifier.weight.to(self.dtype),
        None if bias is None else bias.to(self.dtype),
    )
    capacity = self.expert_capacity
    try:
        mask, probabilities = self.route_tokens(logits, hidden_states.dtype, padding_mask)
    finally:
        self.expert_capacity = capacity
    return mask, probabilities, logits


def _nllb_experts(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
) -> torch.Tensor:
    """What transformers computes: column j of the mask [T, E] is the number of an expert, with the weight of column j."""
    experts = [self[f"expert_{number}"] for number in range(self.num_experts)]
    # Several columns name one expert, and the operator takes distinct ones: their weights are added first.
    numbers = torch.arange(self.num_experts, device=router_mask.device)
    weights = ((router_mask[:, :, None] == numbers) * router_probs[:, :, None]).sum(1)
    weights = weights * (1 - self.moe_token_dropout)
    return _plain(
        hidden_states,
        numbers.expand(weights.shape),
        weights.to(hidden_states.dtype),
        inner=[each.fc1 for each in experts],
        down=[each.fc2 for each in experts],
        act_fn=experts[0].act,
    )


# --- Step 3.7: in its last layers, both halves are clamped after the activation ------------------------


def _step_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    joined, down, half = self.gate_up_proj, self.down_proj, self.intermediate_dim
    if math.isinf(self.limit):
        gate, up = joined[:, :half], joined[:, half:]
        return _gated(hidden_states, top_k_index, top_k_weights, gate=gate, up=up, down=down, act_fn=self.act_fn)
    return all_experts(
        hidden_states, top_k_index, top_k_weights, inner=joined, down=down, between=gated_activation(self)
    )


# --- shared ------------------------------------------------------------------------------------------


def _gated(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    act_fn: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """act(gate) * up, then down; as one operator where the engine has the activation."""
    activation = recognised_activation(_Plain(act_fn))
    if activation is None:

        def between(both: torch.Tensor) -> torch.Tensor:
            first, second = both.chunk(2, -1)
            return act_fn(first) * second

        inner = torch.cat((gate, up), dim=1)
        return all_experts(hidden, index, weights, inner=inner, down=down, between=between)
    return routed_experts(hidden, index, weights, gate=gate, up=up, down=down, activation=Activation(activation.name))


def _plain(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    inner: Sequence[torch.nn.Linear],
    down: Sequence[torch.nn.Linear],
    act_fn: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """act(inner), then down, of experts that are modules; as one operator where the engine has the activation."""
    first, second = (torch.stack([layer.weight for layer in layers]) for layers in (inner, down))
    biases = [
        None if layers[0].bias is None else torch.stack([layer.bias for layer in layers]) for layers in (inner, down)
    ]
    activation = recognised_activation(_Plain(act_fn))
    if activation is None:
        return all_experts(
            hidden, index, weights, inner=first, down=second, between=act_fn, biases=(biases[0], biases[1])
        )
    return routed_experts(
        hidden,
        index,
        weights,
        gate=first,
        down=second,
        biases=(biases[0], None, biases[1]),
        activation=Activation(activation.name),
    )


class _Plain:
    """An activation alone, as `recognised_activation` looks at one."""

    has_gate = False
    is_concatenated = True

    def __init__(self, act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.act_fn = act_fn


_FORWARDS: Forwards = {
    ("dbrx", "DbrxExperts", "forward"): _dbrx_experts,
    ("longcat_flash", "LongcatFlashExperts", "forward"): _longcat_experts,
    ("llama4", "Llama4TextMoe", "forward"): _llama4_moe,
    ("jetmoe", "JetMoeMoE", "forward"): _jetmoe_moe,
    ("jetmoe", "JetMoeMoA", "map"): _jetmoe_map,
    ("jetmoe", "JetMoeMoA", "reduce"): _jetmoe_reduce,
    ("switch_transformers", "SwitchTransformersExperts", "forward"): _switch_experts,
    ("switch_transformers", "SwitchTransformersTop1Router", "forward"): _switch_router,
    ("nllb_moe", "NllbMoeExperts", "forward"): _nllb_experts,
    ("nllb_moe", "NllbMoeTop2Router", "forward"): _nllb_router,
    ("step3p7", "Step3p7Experts", "forward"): _step_experts,
}

__all__ = ["EXPERTS_NAME", "explicit_experts"]
