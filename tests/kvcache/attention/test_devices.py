"""Attention as it is written for CUDA, in the engine on the CPU against PyTorch: lengths 1 to 300, chunks of 1, 16, 64 and 128."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.inference_target.tract.engines.device_forms import forms_of
from generic_export.nnef.attention_forms import AttentionForm
from generic_export.read.outline import read_outline
from tests.engine_check import check
from tests.kvcache.attention.test_operator import AXES, Attention, tensors

CUDA = TractNNEF(check_io=False, dynamic_axes=AXES, device="cuda")
# Lengths around the tiles of 32 keys and 64 queries, around 128 and 256, and at random.
LENGTHS = [1, 2, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 288, 300]
CALLS = [(steps, total) for steps in (1, 16, 64, 128) for total in LENGTHS if steps <= total]


IN_F16 = replace(CUDA, attention_in_f16=True)


def rounded(call: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Values of f16 in f32, in which PyTorch's own arithmetic adds no error of f16."""
    return tuple(each.half().float() for each in call)


@pytest.mark.parametrize(
    "attention", [Attention(), Attention(causal=False), Attention(window=40)], ids=["causal", "open", "window"]
)
@pytest.mark.parametrize("width", [64, 128])
def test_padded_operator(attention: Attention, width: int) -> None:
    torch.manual_seed(0)
    calls = [rounded(tensors(steps, total, width=width)) for steps, total in CALLS]
    text = check(attention, *calls, target=IN_F16, rtol=2e-3, atol=1e-3)
    assert forms_of(read_outline(text)) == {AttentionForm.PADDED_SDPA: 1}


@pytest.mark.parametrize(
    ("attention", "width"),
    [
        (Attention(), 80),
        (Attention(causal=False), 96),
        (Attention(window=40), 256),
        (Attention(softcap=5.0, window=40), 64),
        (Attention(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])), 64),
        (Attention(slope=-0.2), 64),
        (Attention(slope=-0.2, window=40), 64),
        (Attention(), 64),  # f32: the operator computes in f16 there
    ],
    ids=["80", "96", "256", "capped", "sinks", "bias", "bias and window", "f32"],
)
def test_plain_softmax(attention: Attention, width: int) -> None:
    torch.manual_seed(0)
    calls = [tensors(steps, total, width=width) for steps, total in CALLS[::2]]
    text = check(attention, *calls, target=CUDA, rtol=1e-4, atol=2e-5)
    assert forms_of(read_outline(text)) == {AttentionForm.PLAIN_SOFTMAX: 1}


class Latent(nn.Module):
    """Keys in two parts, values another width, as absorbed latent attention has them."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, more: torch.Tensor, rotated: torch.Tensor
    ) -> torch.Tensor:
        return torch.ops.t2n.attention(query, key, key, None, 0.3, True, None, None, more, rotated)


def test_latent_attention() -> None:
    torch.manual_seed(0)
    axes = {"input_0": {2: "S"}, "input_1": {2: "T"}, "input_2": {2: "S"}, "input_3": {2: "T"}}
    calls = []
    for steps, total in CALLS[::4]:
        query, key, _ = tensors(steps, total, key_heads=1, width=64)
        more, rotated, _ = tensors(steps, total, key_heads=1, width=16)
        calls.append((query, key, more, rotated))
    target = TractNNEF(check_io=False, dynamic_axes=axes, device="cuda")
    text = check(Latent(), *calls, target=target, rtol=1e-4, atol=2e-5)
    assert forms_of(read_outline(text)) == {AttentionForm.PLAIN_SOFTMAX: 1}


class Eager(nn.Module):
    """Attention that a model spells out itself, masks added or chosen."""

    def __init__(self, *, chosen: bool) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * 0.3
        steps, total = scores.shape[-2:]
        seen = torch.arange(total)[None, :] <= torch.arange(steps)[:, None] + (total - steps)
        if self.chosen:
            scores = scores.masked_fill(~seen, float("-inf"))
        else:
            scores = scores + torch.where(seen, 0.0, -1e9)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("chosen", [False, True])
def test_attention_that_a_model_spells_out(chosen: bool) -> None:
    torch.manual_seed(0)
    calls = [tensors(steps, total, key_heads=4) for steps, total in CALLS[::6]]
    on_cpu = check(Eager(chosen=chosen), *calls, dynamic_axes=AXES)
    on_cuda = check(Eager(chosen=chosen), *calls, target=CUDA)
    assert forms_of(read_outline(on_cpu)) == {AttentionForm.FUSIBLE_SOFTMAX: 1}
    assert forms_of(read_outline(on_cuda)) == {AttentionForm.PLAIN_SOFTMAX: 1}


def test_pytorchs_own_operator() -> None:
    class Own(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    torch.manual_seed(0)
    axes = {name: {2: "S"} for name in AXES}
    calls = [tensors(length, length, key_heads=4, width=64) for length in (5, 64, 128)]
    text = check(Own(), *calls, target=TractNNEF(check_io=False, dynamic_axes=axes, device="cuda"))
    assert forms_of(read_outline(text)) == {AttentionForm.PLAIN_SOFTMAX: 1}


def test_padding_is_out_of_sight() -> None:
    """Rows of padding weigh nothing, also where all scores are far below zero."""
    query = torch.full((1, 4, 1, 64), 30.0).half()
    key = torch.full((1, 2, 5, 64), -30.0).half()
    value = torch.ones(1, 2, 5, 64).half()
    check(Attention(), (query, key, value), target=CUDA, rtol=0, atol=1e-3)
    assert np.isfinite((query @ key.repeat(1, 2, 1, 1).transpose(-1, -2)).numpy()).all()
