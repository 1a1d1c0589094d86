"""Which keys are looked at, beside what transformers' own loops choose, at every length and from every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.attention.families import explicit_attention_families
from kvcache.forms import state_form
from kvcache.states.tensors import Slot
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT, TEXT_GENERATION
from t2n_llm.zoo.tiny_model import build_tiny_model

FAMILIES = {
    "minimax_m3_vl_text": TEXT_GENERATION,
    "qwen4_exp_text": TEXT_GENERATION,
    "glm5_next": IMAGE_TEXT_TO_TEXT,  # transformers has no class for its text alone
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny_model(request.param, task=FAMILIES[request.param])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 29])
def test_one_pass_says_the_same(model: Any, length: int) -> None:
    ids = torch.randint(10, 150, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with explicit_attention_families():
            assert torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-5)


def test_chunks_say_the_same(model: Any) -> None:
    """Blocks of 4, of which 2 are chosen: calls end within blocks, and at their ends."""
    ids = torch.randint(10, 150, (1, 31), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        conversation = state_form(model).conversation(model, windowed=False)
        with explicit_attention_families():
            parts = [conversation.answer(part) for part in ids.split([5, 1, 1, 1, 9, 3, 11], 1)]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-5)


def test_no_tokens_before_a_text_are_a_state_of_zeros() -> None:
    """Qwen4-exp keeps ids for its n-grams; nothing before the text is the end of another one."""
    model = build_tiny_model("qwen4_exp_text")
    form, ids = state_form(model), torch.tensor([[11, 12, 13]])
    slot = Slot("conv_state", 0, 2)
    with torch.no_grad():
        expected, states = form.run(model, None, input_ids=ids)
        zeros = {key: torch.zeros_like(value) for key, value in states.items() if not key.grows}
        none = {key: _cut(key, value) for key, value in states.items() if key.grows}
        logits, again = form.run(model, {**zeros, **none}, input_ids=ids)
        conversation = form.conversation(model, windowed=False)
        conversation.answer(ids)
    assert torch.allclose(logits, expected, atol=1e-6)
    assert again[slot].tolist() == [[12 - model.config.eos_token_id, 13 - model.config.eos_token_id]]
    assert torch.equal(conversation.states()[slot], again[slot])


def _cut(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    axis = {"indexer_position": 2, "indexer_key": 1}.get(slot.kind, 2)
    return tensor.narrow(axis, 0, 0)
