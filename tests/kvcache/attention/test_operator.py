"""Our attention operator: against PyTorch's own, in the engine, with a past, grouped heads, masks and capped scores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kvcache
from generic_export import TractNNEF
from generic_export.errors import CaptureError
from generic_export.inference_target.tract.engines.device_forms import forms_of
from generic_export.nnef.attention_forms import AttentionForm
from generic_export.read.outline import read_outline
from kvcache.attention.operator import ATTENTION_NAME
from tests.engine_check import check

AXES = {"input_0": {2: "S"}, "input_1": {2: "T"}, "input_2": {2: "T"}}


class Attention(nn.Module):
    def __init__(
        self,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slope: float | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.window, self.softcap, self.slope, self.causal = window, softcap, slope, causal
        self.sinks = None if sinks is None else nn.Parameter(sinks)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = None
        if self.window is not None:
            total, steps = key.shape[2], query.shape[2]
            queries = (torch.arange(steps) + (total - steps))[:, None]
            keys = torch.arange(total)[None, :]
            mask = ((keys <= queries) & (keys > queries - self.window))[None, None]
        causal = mask is None
        if self.slope is not None:  # a bias by distance, beside a causal mask or with a window in it
            keys = torch.arange(key.shape[2], dtype=query.dtype)[None, None, None, :]
            bias = (keys * self.slope).expand(1, 1, query.shape[2], -1)
            mask = bias if mask is None else bias.masked_fill(~mask, -65504.0)
        return torch.ops.t2n.attention(query, key, value, mask, 0.3, causal and self.causal, self.softcap, self.sinks)


def tensors(steps: int, total: int, heads: int = 4, key_heads: int = 2, width: int = 8, batch: int = 1):
    return (
        torch.randn(batch, heads, steps, width),
        torch.randn(batch, key_heads, total, width),
        torch.randn(batch, key_heads, total, width),
    )


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 3])
def test_in_the_engine(key_heads: int, softcap: float | None, window: int | None) -> None:
    torch.manual_seed(0)
    text = check(
        Attention(window=window, softcap=softcap),
        tensors(5, 12, key_heads=key_heads),
        tensors(1, 9, key_heads=key_heads),
        tensors(7, 7, key_heads=key_heads),
        dynamic_axes=AXES,
    )
    assert ("tract_transformers_sdpa" in text) == (softcap is None)
    assert "tile(" not in text and "tract_core_broadcast(input_1" not in text  # heads are never repeated


PRODUCTS = TractNNEF(check_io=False, dynamic_axes=AXES, attention_as_products=True)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        Attention(causal=False),
        Attention(window=3),
        Attention(softcap=5.0, window=3),
        Attention(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        Attention(slope=-0.2),
        Attention(slope=-0.2, window=3),
    ],
    ids=["causal", "open", "window", "capped", "sinks", "bias", "bias and window"],
)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_as_two_products(attention: Attention, key_heads: int) -> None:
    torch.manual_seed(0)
    sizes = ((5, 12), (1, 9), (70, 130))
    calls = [tensors(steps, total, key_heads=key_heads) for steps, total in sizes]
    text = check(attention, *calls, target=PRODUCTS)
    assert "sdpa" not in text and text.count("tract_core_einsum") == 2
    assert text.index("einsum([input_1, ") < text.index("einsum([input_2, ")  # what may be a cache comes first


class Blind(nn.Module):
    """Hides every key from some queries, as padding in front of a text does from the tokens of it."""

    def __init__(self, softcap: float | None) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = (seen > 0)[:, None, None, :].expand(-1, -1, query.shape[2], -1)
        return torch.ops.t2n.attention(query, key, value, mask, 30.0, False, self.softcap)  # scores of hundreds


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_query_that_sees_nothing_averages_all_keys(softcap: float | None) -> None:
    torch.manual_seed(0)
    calls = []
    for steps, total in ((5, 12), (3, 70)):
        query, key, value = tensors(steps, total, batch=2)
        seen = torch.ones(2, total)
        seen[1] = 0
        blind = Blind(softcap)(query, key, value, seen)[1]
        mean = value[1].mean(dim=1, keepdim=True).repeat_interleave(2, dim=0)
        torch.testing.assert_close(blind, mean.expand_as(blind))
        calls.append((query, key, value, seen))
    axes = AXES | {"input_3": {1: "T"}}
    target = TractNNEF(check_io=False, dynamic_axes=axes, attention_as_products=True)
    check(Blind(softcap), *calls, target=target, atol=5e-5)  # the scale is in the queries, which rounds otherwise


def test_two_products_of_a_batch_and_of_values_wider_than_keys() -> None:
    torch.manual_seed(0)
    axes = {name: {**axes, 0: "B"} for name, axes in AXES.items()}
    target = TractNNEF(check_io=False, dynamic_axes=axes, attention_as_products=True)
    calls = [tensors(steps, total, batch=batch) for steps, total, batch in ((5, 12, 2), (1, 9, 3), (4, 4, 1))]
    wider = [(query, key, torch.cat([value, value * 2], dim=-1)) for query, key, value in calls]
    check(Attention(), *calls, target=target)
    check(Attention(), *wider, target=target)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_their_share(window: int | None) -> None:
    torch.manual_seed(0)
    check(
        Attention(window=window, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        tensors(5, 12),
        tensors(1, 9),
        tensors(40, 70),
        dynamic_axes=AXES,
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_beside_the_mask(window: int | None) -> None:
    torch.manual_seed(0)
    check(Attention(window=window, slope=-0.2), tensors(5, 12), tensors(1, 9), tensors(7, 7), dynamic_axes=AXES)


def test_an_argument_that_decides_the_result_is_not_passed_over() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with kvcache.explicit_attention(), pytest.raises(CaptureError, match="'head_mask'"):
        ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](nn.Identity(), *tensors(2, 2), None, head_mask=torch.ones(4))


def test_a_model_that_does_not_call_ours_runs_with_its_own() -> None:
    with kvcache.explicit_attention() as choice:
        assert choice.first_that_runs(lambda name: name) == "eager"  # nothing was called

        def build(name: str) -> str:
            if name == ATTENTION_NAME:
                raise CaptureError("no such name")
            return name

        assert choice.first_that_runs(build) == "eager"


def test_a_model_that_adds_its_masks_runs_with_its_own() -> None:
    """BigBird-Pegasus' encoder: a mask of ours is yes or no, and numbers are added to scores."""
    from transformers.masking_utils import bidirectional_mask_function

    tried: list[str] = []
    with kvcache.explicit_attention() as choice:

        def build(name: str) -> str:
            tried.append(name)
            if name == ATTENTION_NAME:
                options = {"allow_is_causal_skip": False, "mask_function": bidirectional_mask_function}
                mask = choice.mask(3, 3, **options)
                assert mask is not None
                _ = torch.zeros(1, 1, 3, 3) + mask
            return name

        assert choice.first_that_runs(build) == "eager"
    assert tried == [ATTENTION_NAME, "eager"]


def test_values_may_be_wider_than_keys() -> None:
    torch.manual_seed(0)
    query, key, _ = tensors(3, 6)
    check(Attention(), (query, key, torch.randn(1, 2, 6, 12)))


@pytest.mark.parametrize("window", [None, 3])
def test_spelled_out_where_the_target_wants_no_operator(window: int | None) -> None:
    torch.manual_seed(0)
    target = TractNNEF(check_io=False, dynamic_axes=AXES, reify_sdpa_operator=False)
    text = check(Attention(window=window), tensors(5, 12), tensors(7, 7), tensors(1, 40), target=target)
    assert "tract_transformers" not in text and "softmax" in text


def test_f32_attention_widens_f16_heads() -> None:
    torch.manual_seed(0)
    args = tuple(value.half() for value in tensors(3, 6))
    plain = check(Attention(), args, target=TractNNEF(check_io=False), atol=2e-3)
    wide = check(Attention(), args, target=TractNNEF(check_io=False, force_attention_inner_in_f32=True), atol=2e-3)
    assert 'to="f32"' not in plain
    assert wide.count('to="f32"') == 3


@given(
    steps=st.integers(1, 6),
    past=st.integers(0, 6),
    groups=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    causal=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_eager_definition_is_pytorchs(steps: int, past: int, groups: int, key_heads: int, causal: bool) -> None:
    query, key, value = tensors(steps, past + steps, heads=groups * key_heads, key_heads=key_heads)
    mask = torch.ones(steps, past + steps, dtype=torch.bool).tril(past) if causal else None
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    answer = torch.ops.t2n.attention(query, key, value, None, 0.3, causal, None)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


def test_transformers_knows_our_attention_only_inside_the_block() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS))
    with kvcache.explicit_attention():
        assert ATTENTION_NAME in ALL_ATTENTION_FUNCTIONS
        assert ATTENTION_NAME in ALL_MASK_ATTENTION_FUNCTIONS
    with pytest.raises(ZeroDivisionError), kvcache.explicit_attention():
        raise ZeroDivisionError
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)) == before


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_window_shorter_than_the_engines_tiles(softcap: float | None) -> None:
    """tract's flash kernel works on tiles of 32 keys: a tile that a query may not see at all must not give NaN."""
    torch.manual_seed(0)
    check(
        Attention(window=5, softcap=softcap),
        tensors(5, 12),
        tensors(70, 70),
        tensors(40, 130),
        tensors(1, 200),
        dynamic_axes=AXES,
    )


def test_scores_are_scaled_in_the_queries_and_softmax_stays_plain() -> None:
    torch.manual_seed(0)
    target = TractNNEF(check_io=False, dynamic_axes=AXES, attention_as_products=True)
    text = check(Attention(), tensors(5, 12), tensors(1, 9), target=target)
    assert forms_of(read_outline(text)) == {AttentionForm.PLAIN_SOFTMAX: 1}
    scores = text.index("einsum")
    assert text.index(" mul(") < scores and " mul(" not in text[scores:]
