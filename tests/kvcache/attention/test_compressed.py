"""DeepSeek-V4's entries made anew at every call, beside transformers' own caches; windows close within calls and at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache.attention.families import explicit_attention_families
from kvcache.forms import state_form
from kvcache.states.tensors import Slot
from t2n_llm.zoo.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("deepseek_v4")


@pytest.mark.parametrize("parts", [[1], [3], [4], [6], [31], [5, 1, 1, 1, 9, 1, 13], [1] * 13])
def test_it_says_what_one_pass_of_transformers_says(model: Any, parts: Sequence[int]) -> None:
    ids = torch.randint(10, 150, (2, sum(parts)), generator=torch.Generator().manual_seed(len(parts)))
    form, past, answers = state_form(model), None, []
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with explicit_attention_families():
            for part in ids.split(list(parts), 1):
                logits, past = form.run(model, past, input_ids=part)
                answers.append(logits)
    assert torch.allclose(torch.cat(answers, 1), expected, atol=2e-5)


def test_its_reference_keeps_what_the_graph_keeps(model: Any) -> None:
    ids = torch.arange(10, 27)[None]
    form = state_form(model)
    conversation = form.conversation(model, windowed=True)
    with torch.no_grad():
        own = torch.cat([conversation.answer(part) for part in ids.split([6, 1, 10], 1)], 1)
        with explicit_attention_families():
            logits, states = form.run(model, None, input_ids=ids)
    assert torch.allclose(own, logits, atol=2e-5)
    kept = conversation.states()
    assert kept.keys() == states.keys()
    assert all(torch.allclose(kept[slot], states[slot], atol=1e-5) for slot in states)
    assert kept[Slot("compressor_input", 0)].shape == (1, 17, 2 * model.config.head_dim)


def test_the_experts_of_a_token_differ(model: Any) -> None:
    """A tiny model whose first layers are told the same expert twice would say nothing of the second one."""
    table = next(module.tid2eid for module in model.modules() if hasattr(module, "tid2eid"))
    assert (table[:, 0] != table[:, 1]).all()
    assert len(table.unique()) == model.config.num_local_experts
