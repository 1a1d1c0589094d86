"""Mixtures of experts as explicit operators: any router stays in the graph, the experts it chooses are one operator.

`moe_families.py` makes transformers call them inside a `with` block, most through its own experts interface; `moe_engine.py` writes
them as `tract_moe_ffn`, or as products over all experts where an activation is none of that operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.compat import without_modes
from generic_export.torch_graph.untraced_calls import untraced_calls
from kvcache.compat import after_experts, gated_activation

# --- the operators -------------------------------------------------------------------------------


@torch.library.custom_op("t2n::experts", mutates_args=())
def experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
) -> torch.Tensor:
    """The feed-forward networks that a router has chosen, weighted and summed.

    Args:
        hidden: float [T, D].
        index: int64 [T, k], distinct per token; E and beyond stand for no expert.
        weights: float [T, k], not negative.
        gate: [E, H, D], the projection that the activation is applied to.
        up: [E, H, D], multiplied with it; None where there is none.
        down: [E, D, H].
        gate_bias, up_bias: [E, H].
        down_bias: [E, D].
        activation: `silu`, `gelu` (tanh) or `relu`.
        alpha, limit: with a limit, (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g) where g = min(gate, limit),
            instead (GPT-OSS).

    Returns:
        [T, D], in the element type of `hidden`.
    """
    routed = _routing_matrix(index, weights.to(hidden.dtype), gate.shape[0])
    inner = grouped_linear(hidden, gate)
    inner = inner if gate_bias is None else inner + gate_bias[:, None]
    if up is None:
        inner = _ACTIVATIONS[activation](inner)
    else:
        other = grouped_linear(hidden, up)
        other = other if up_bias is None else other + up_bias[:, None]
        inner = _gated(inner, other, activation, alpha, limit)
    result = grouped_linear(inner, down)
    result = result if down_bias is None else result + down_bias[:, None]
    return torch.einsum("etd,te->td", result.float(), routed.float()).to(hidden.dtype)


@experts.register_fake
def _(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("t2n::grouped_linear", mutates_args=())
def grouped_linear(input: torch.Tensor, weight: torch.Tensor, role: str | None = None) -> torch.Tensor:
    """A linear layer for each group.

    Args:
        input: float [T, K], the same for all groups, [E, T, K], or [B, E, T, K].
        weight: [E, N, K].
        role: what the weight is called in an archive, where it is part of a parameter.

    Returns:
        [E, T, N], or [B, E, T, N].
    """
    return input @ weight.transpose(1, 2)


@grouped_linear.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, role: str | None = None) -> torch.Tensor:
    batch = input.shape[:-3]
    return input.new_empty(*batch, weight.shape[0], input.shape[-2], weight.shape[1])


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float | None) -> torch.Tensor:
    if limit is None:
        return _ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _tanh_gelu(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(values, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": _tanh_gelu,
    "relu": nn.functional.relu,
}


def _routing_matrix(index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return [T, E]: each token's weight for each expert, 0 for those not chosen."""
    # One column more takes what stands for no expert.
    empty = weights.new_zeros(index.shape[0], experts + 1)
    return empty.scatter(1, index.clamp(max=experts), weights)[:, :experts]


# --- a block of experts, whatever its parameters are called ----------------------------------------


@dataclass(frozen=True)
class Activation:
    """What an engine operator can apply between the projections; see `experts`."""

    name: str
    alpha: float = 1.0
    limit: float | None = None


def routed_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    activation: Activation,
) -> torch.Tensor:
    """Call `t2n::experts`; `biases` are those of gate, up and down, the other arguments as there."""
    return torch.ops.t2n.experts(
        hidden, index, weights, gate, up, down, *biases, activation.name, activation.alpha, activation.limit
    )


def all_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    inner: torch.Tensor,
    down: torch.Tensor,
    between: Callable[[torch.Tensor], torch.Tensor],
    after: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Compute every expert and weigh the results: for what happens in between or after that no engine operator does.

    Args:
        hidden, index, weights: see `experts`.
        inner: [E, N, D], the first projection.
        down: [E, D, H].
        between: [E, T, N] -> [E, T, H].
        after: [E, T, D] -> [E, T, D].
        biases: of the two projections, [E, N] and [E, D].
    """
    values = torch.ops.t2n.grouped_linear(hidden, inner)
    values = between(values if biases[0] is None else values + biases[0][:, None])
    values = torch.ops.t2n.grouped_linear(values, down)
    values = after(values if biases[1] is None else values + biases[1][:, None])
    routed = _routing_matrix(index, weights.float(), inner.shape[0]).transpose(0, 1)[:, :, None]
    return (values.float() * routed).sum(0).to(hidden.dtype)


# --- transformers' side --------------------------------------------------------------------------


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' ExpertsInterface signature: [T, D] and its [T, k] choices to [T, D]."""
    first, second = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    inner_bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    norm = after_experts(module)
    activation = None if norm else recognised_activation(module)
    if activation is None or (inner_bias is not None and not module.has_gate):
        return all_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            inner=first,
            down=second,
            between=gated_activation(module) if module.has_gate else module.act_fn,
            after=norm or (lambda values: values),
            biases=(inner_bias, down_bias),
        )
    gate, up = _halves(first, concatenated=module.is_concatenated) if module.has_gate else (first, None)
    biases = (None, None) if inner_bias is None else _halves(inner_bias, concatenated=module.is_concatenated)
    return routed_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate=gate,
        up=up,
        down=second,
        biases=(*biases, down_bias),
        activation=activation,
    )


def _halves(joined: torch.Tensor, *, concatenated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a joined projection [E, 2H, ...] in gate and up."""
    if concatenated:
        half = joined.shape[1] // 2
        return joined[:, :half], joined[:, half:]
    return joined[:, ::2], joined[:, 1::2]


def recognised_activation(module: Any) -> Activation | None:
    """Return the engine's name of what a block of experts applies between its projections; None when it has none.

    Found by trying: code that subclasses override is what decides, whatever it is called.
    """
    # Values are wanted, also while shapes are being captured or a model is being recorded.
    with without_modes(), torch.no_grad(), untraced_calls():
        # Wide enough that every clamp and every tail shows; its mirror image tells code that asks for the values' sign.
        wide = torch.linspace(-40.0, 40.0, 162, device="cpu").reshape(3, 54)
        apply = gated_activation(module) if module.has_gate else module.act_fn
        try:
            trials = [(probe, apply(probe)) for probe in (wide, -wide)]
        except Exception:  # an activation with parameters has no values here
            return None
        fitting = (c for c in _candidates(module) if all(_agrees(module, c, *trial) for trial in trials))
        return next(fitting, None)


def _agrees(module: Any, candidate: Activation, probe: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether an activation of the engine gives what a block of experts gave for a probe."""
    if module.has_gate:
        gate, up = _halves(probe.T[None], concatenated=module.is_concatenated)
        found = _gated(gate[0].T, up[0].T, candidate.name, candidate.alpha, candidate.limit)
    elif candidate.limit is None:
        found = _ACTIVATIONS[candidate.name](probe)
    else:
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-5, 1e-5)


def _candidates(module: Any) -> Iterator[Activation]:
    for name in _ACTIVATIONS:
        yield Activation(name)
    for alpha_name, limit_name in (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit")):
        alpha, limit = getattr(module, alpha_name, None), getattr(module, limit_name, None)
        if isinstance(alpha, int | float) and isinstance(limit, int | float):
            yield Activation("silu", float(alpha), float(limit))


__all__ = ["Activation", "all_experts", "experts_forward", "recognised_activation", "routed_experts"]
