"""Models that call their cache by any of its names: as transformers does, or as older code does under any release."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import state_form
from kvcache.compat import CACHE_NAMES, cache_in, cache_keyword, cache_of, takes_cache
from t2n_llm.zoo.tiny_model import build_tiny_model


class _Renamed(torch.nn.Module):
    """A model behind a forward of its own, as a checkpoint's own code may have it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def run(self, input_ids: torch.Tensor, given: Any, **options: Any) -> Any:
        return self.model(input_ids=input_ids, **{cache_keyword(self.model.forward): given}, **options)


class _Newest(_Renamed):
    def forward(self, input_ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        return self.run(input_ids, cache, **options)


class _Usual(_Renamed):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        return self.run(input_ids, past_key_values, **options)


class _Recurrent(_Renamed):
    def forward(self, input_ids: torch.Tensor, cache_params: Any = None, **options: Any) -> Any:
        return self.run(input_ids, cache_params, **options)


@pytest.mark.parametrize(("kind", "name"), zip((_Newest, _Usual, _Recurrent), CACHE_NAMES, strict=True))
def test_a_conversation_whatever_the_forward_calls_the_cache(kind: type[_Renamed], name: str) -> None:
    model = kind(build_tiny_model("llama"))
    assert cache_keyword(model.forward) == name
    ids = torch.arange(3, 12)[None]
    form = state_form(model)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        _, states = form.run(model, None, input_ids=ids[:, :5])
        after, _ = form.run(model, states, input_ids=ids[:, 5:])
        conversation = form.conversation(model, windowed=False)
        said = [conversation.answer(part) for part in ids.split(4, dim=1)]
        answer = model(input_ids=ids, use_cache=True)
    torch.testing.assert_close(after, whole[:, 5:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(said, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert cache_of(answer).get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_stand_in_is_handed_the_cache_by_any_name(name: str) -> None:
    @takes_cache
    def forward(self: object, hidden: int, cache: object = None, **others: object) -> tuple[object, ...]:
        return hidden, cache, others

    assert forward(None, 1, **{name: "kept", "mask": 2}) == (1, "kept", {"mask": 2})
    assert forward(None, 1, "kept") == (1, "kept", {})
    assert cache_keyword(forward) == "cache"


def test_a_call_and_an_answer_without_a_cache() -> None:
    assert cache_in({"input_ids": 1, "past_key_values": None}) is None
    assert cache_of((torch.zeros(1),)) is None
