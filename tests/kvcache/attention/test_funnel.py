"""Relative positions of Funnel, beside transformers' own, at lengths that those take."""

from __future__ import annotations

import pytest
import torch

from kvcache.attention.operator import explicit_attention
from t2n_llm.zoo.tiny_model import build_tiny_model


@pytest.mark.parametrize("length", [5, 8, 13, 29])
@pytest.mark.parametrize("attention", ["relative_shift", "factorized"])
@pytest.mark.parametrize(("separate", "truncate"), [(True, True), (True, False), (False, False)])
def test_one_pass_says_the_same(length: int, attention: str, separate: bool, truncate: bool) -> None:
    model = build_tiny_model("funnel", task="fill-mask").base_model
    model.config.attention_type = attention
    model.config.separate_cls, model.config.truncate_seq = separate, truncate
    ids = torch.randint(10, 150, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with explicit_attention():
            assert torch.allclose(model(ids).last_hidden_state, expected, atol=1e-5)
