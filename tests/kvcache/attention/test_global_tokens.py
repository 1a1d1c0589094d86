"""Windows, and tokens that all others look at, beside what transformers' own chunks say, at every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.attention.operator import explicit_attention
from t2n_llm.source.small_sizes import WINDOW
from t2n_llm.zoo.tiny_model import build_tiny_model

MODELS = {"longformer": "fill-mask", "led": "question-answering"}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny_model(request.param, task=MODELS[request.param]).base_model


def _said(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        answer = model(**given)
    said = answer.get("encoder_last_hidden_state")
    return answer.last_hidden_state if said is None else said  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [1, 5, 2 * WINDOW, 29])
@pytest.mark.parametrize("marked", [(), (0,), (0, 2, 28)])
def test_one_pass_says_the_same(model: Any, length: int, marked: tuple[int, ...]) -> None:
    ids = torch.randint(10, 150, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, length // 2 + 1 :] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if marked:
        given["global_attention_mask"] = torch.tensor([[int(place in marked) for place in range(length)]] * 2)
    expected = _said(model, given)
    with explicit_attention():
        ours = _said(model, given)
    assert torch.allclose(ours[mask == 1], expected[mask == 1], atol=1e-5)
    # Windows of half a text are narrow enough to be seen.
    assert model.config.attention_window in (2 * WINDOW, [2 * WINDOW] * 3)
