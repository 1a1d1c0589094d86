"""Attention in the engine: masks of every kind, causal at the top left, grouped heads, PyTorch's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export.errors import TranslationError
from tests.engine_check import check


def qkv(batch: tuple[int, ...], steps: int, total: int, *, width: int = 8, out: int | None = None) -> tuple:
    return (
        torch.randn(*batch, steps, width),
        torch.randn(*batch, total, width),
        torch.randn(*batch, total, out or width),
    )


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_rank_and_unequal_lengths(batch: tuple[int, ...], causal: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    text = check(attend, qkv(batch, 3, 5))
    assert "tract_transformers_sdpa" in text
    check(attend, qkv(batch, 5, 3, out=4))
    assert ("is_causal=true" in check(attend, qkv(batch, 4, 4))) is causal


MASKS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "bool full": lambda s, t: torch.rand(2, 3, s, t) > 0.4,
    "bool one row": lambda s, t: torch.rand(2, 1, 1, t) > 0.4,
    "bool one column": lambda s, t: torch.rand(1, 3, s, 1) > 0.4,
    "bool rank 2": lambda s, t: torch.rand(s, t) > 0.4,
    "bool nothing visible": lambda s, t: torch.zeros(s, t, dtype=torch.bool),
    "float rank 3": lambda s, t: torch.randn(3, s, t),
    "float one row": lambda s, t: torch.randn(2, 1, 1, t),
    "float -inf": lambda s, t: torch.zeros(1, 1, s, t).masked_fill(torch.rand(s, t) > 0.5, float("-inf")),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_at_dynamic_sizes(kind: str) -> None:
    def args(steps: int, total: int) -> tuple:
        mask = MASKS[kind](steps, total)
        return (*qkv((2, 3), steps, total), mask)

    axes: dict[str, dict[int, str]] = {"input_0": {2: "S"}, "input_1": {2: "T"}, "input_2": {2: "T"}}
    mask = MASKS[kind](4, 6)
    axes["input_3"] = {
        axis: name for axis, name in ((mask.ndim - 2, "S"), (mask.ndim - 1, "T")) if mask.shape[axis] > 1
    }
    check(F.scaled_dot_product_attention, args(4, 6), args(2, 9), dynamic_axes=axes)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_query_heads_are_not_repeated(causal: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=0.3)

    def args(batch: int, steps: int) -> tuple:
        return torch.randn(batch, 6, steps, 8), torch.randn(batch, 2, 7, 8), torch.randn(batch, 2, 7, 8)

    axes = {"input_0": {0: "B", 2: "S"}, "input_1": {0: "B"}, "input_2": {0: "B"}}
    text = check(attend, args(2, 3), args(3, 5), dynamic_axes=axes)
    assert "tile" not in text and "repeat" not in text


def test_dynamic_batch_length_and_causal() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    axes = {f"input_{index}": {0: "B", 2: "S"} for index in range(3)}
    check(attend, qkv((2, 3), 4, 4), qkv((1, 3), 6, 6), qkv((3, 3), 1, 1), dynamic_axes=axes)
    uneven = {"input_0": {2: "S"}, "input_1": {2: "T"}, "input_2": {2: "T"}}
    check(attend, qkv((2, 3), 4, 6), qkv((2, 3), 6, 4), qkv((2, 3), 2, 8), dynamic_axes=uneven)


def test_windows_and_left_padding_longer_than_the_engines_tiles() -> None:
    def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i = torch.arange(q.shape[2])
        mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    axes = {f"input_{index}": {2: "S"} for index in range(3)}
    check(windowed, qkv((1, 2), 70, 70), qkv((1, 2), 3, 3), qkv((1, 2), 101, 101), dynamic_axes=axes)
    left = torch.arange(80)[None, None, None] >= torch.tensor([50, 3])[:, None, None, None]
    check(F.scaled_dot_product_attention, (*qkv((2, 2), 40, 80), left))


def test_a_dynamic_number_of_heads_goes_to_the_batch() -> None:
    axes = {f"input_{index}": {1: "H"} for index in range(3)}
    check(F.scaled_dot_product_attention, qkv((2, 3), 4, 4), qkv((2, 5), 4, 4), dynamic_axes=axes)


def test_batches_broadcast_and_doubles_are_spelled_out() -> None:
    q, k, v = qkv((2, 3), 4, 5)
    check(F.scaled_dot_product_attention, (q, k[:1], v[:1]))
    doubles = tuple(x.double() for x in (q, k, v))
    text = check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), doubles)
    assert "sdpa" not in text


def test_random_attention_is_refused() -> None:
    with pytest.raises(TranslationError, match="dropout"):
        check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), qkv((2,), 3, 3))


# --- PyTorch's layers ----------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention, **kwargs: Any) -> None:
        super().__init__()
        self.layer, self.kwargs = layer, kwargs

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> Any:
        names = ("key_padding_mask", "attn_mask")
        result, weights = self.layer(x, x, x, **dict(zip(names, masks, strict=False)), **self.kwargs)
        return result if weights is None else (result, weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(batch_first: bool, need_weights: bool) -> None:
    layer = Attend(nn.MultiheadAttention(8, 2, batch_first=batch_first), need_weights=need_weights)
    axes = {"input_0": {1: "T"} if batch_first else {0: "T"}}
    shapes = [(2, 5, 8), (2, 3, 8)] if batch_first else [(5, 2, 8), (3, 2, 8)]
    check(layer, *[(torch.randn(shape),) for shape in shapes], dynamic_axes=axes)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_masks(need_weights: bool) -> None:
    layer = Attend(nn.MultiheadAttention(8, 2, batch_first=True), need_weights=need_weights)

    def args(length: int) -> tuple:
        padding = torch.arange(length)[None] >= torch.tensor([[length], [length - 2]])
        return torch.randn(2, length, 8), padding, torch.triu(torch.ones(length, length, dtype=torch.bool), 1)

    axes = {"input_0": {1: "T"}, "input_1": {1: "T"}, "input_2": {0: "T", 1: "T"}}
    check(layer, args(5), args(8), dynamic_axes=axes)


def test_multihead_attention_with_added_keys_and_other_widths() -> None:
    check(Attend(nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)), (torch.randn(5, 2, 8),))

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)

        def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.layer(x, k, v, need_weights=False)[0]

    def args(length: int) -> tuple:
        return torch.randn(2, 3, 8), torch.randn(2, length, 6), torch.randn(2, length, 5)

    check(Cross(), args(4), args(7), dynamic_axes={"input_1": {1: "T"}, "input_2": {1: "T"}})


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def args(batch: int, length: int) -> tuple:
        return (torch.randn(batch, length, 8),)

    check(encoder, args(2, 5), args(1, 9), args(3, 2), dynamic_axes={"input_0": {0: "B", 1: "T"}}, atol=1e-4)


def test_transformer_encoder_with_padding() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padding) * ~padding[..., None]

    def args(length: int) -> tuple:
        return torch.randn(2, length, 8), torch.arange(length)[None] >= torch.tensor([[length], [length - 2]])

    axes = {"input_0": {1: "T"}, "input_1": {1: "T"}}
    check(Padded(), args(5), args(7), dynamic_axes=axes, atol=1e-4)


def test_transformer_decoder_with_causal_mask() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.decoder(x, memory, tgt_mask=mask)

    def args(length: int, source: int) -> tuple:
        return torch.randn(2, length, 8), torch.randn(2, source, 8)

    check(Decoder(), args(5, 4), args(3, 7), dynamic_axes={"input_0": {1: "T"}, "input_1": {1: "S"}}, atol=1e-4)


# --- masks made of positions: tract folds comparisons of ranges wrongly unless it cannot see them ------


def _positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.arange(x.shape[0])
    return i[:, None], i[None]


POSITION_MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant branches": lambda x: torch.where(torch.arange(x.shape[0]) >= 2, 1.0, 0.0) + x,
    "two axes": lambda x: torch.where(_positions(x)[1] <= _positions(x)[0], 0.0, -1e9) + x[:, None],
    "fill": lambda x: x[:, None].repeat(1, x.shape[0]).masked_fill(_positions(x)[1] <= _positions(x)[0], 0.0),
    "window": lambda x: (_positions(x)[1] <= _positions(x)[0]) & (_positions(x)[1] >= _positions(x)[0] - 2) & (x > -9),
    "product": lambda x: (_positions(x)[1] <= _positions(x)[0]).float() * x[:, None],
    "counting down": lambda x: torch.where(torch.arange(3, -x.shape[0], -1) >= 0, 1.0, 0.0),
}


@pytest.mark.parametrize("kind", POSITION_MASKS)
def test_masks_made_of_positions(kind: str) -> None:
    args = [(torch.randn(size),) for size in (6, 2, 9)]
    check(POSITION_MASKS[kind], *args, dynamic_axes={"input_0": {0: "N"}})


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.randn(3, 5)}])
def test_the_sums_of_weights_are_returned_beside_attention(options: dict[str, Any]) -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    check(lambda q, k, v: attend(q, k, v, **options), qkv((2, 3), 3, 5))
