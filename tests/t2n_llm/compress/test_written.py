"""What a model writes itself: it goes on as it would, from where it is told to, and a seed decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from t2n_llm.compress import written
from t2n_llm.compress.effort import Effort
from t2n_llm.compress.written import Writer, continued_ids
from t2n_llm.source.hub import ModelSource, open_source
from tests.t2n_llm.compress.test_calibrate import load, text_ids
from tests.trained_model import REAL_MODEL

TEXTS = text_ids("calib.txt", sequences=3)[:, :64]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source(str(REAL_MODEL))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_BATCH", 4)


def _places(texts: torch.Tensor, begun: torch.Tensor) -> Iterator[int]:
    windows = texts.unfold(1, len(begun), 1)
    yield from (windows == begun).all(dim=-1).nonzero()[:, 0].tolist()


def test_each_begins_as_one_of_the_given_texts_goes_on(source: ModelSource) -> None:
    found = continued_ids(source, TEXTS, Effort(passes=1), 6)
    assert found.shape == (6, 32)
    assert found[:, 0].eq(source.config.bos_token_id).all()  # as the tokenizer begins every text
    for index, row in enumerate(found):
        assert index % 3 in _places(TEXTS, row[1:4])  # in turn
    assert not any(torch.equal(row, text) for row in found for text in TEXTS[:, :32])


def test_a_seed_decides(source: ModelSource) -> None:
    first, again, other = (continued_ids(source, TEXTS, Effort(passes=1, seed=seed), 4) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_nothing_wanted_is_nothing_written(source: ModelSource) -> None:
    assert continued_ids(source, TEXTS, Effort(passes=1), 0).shape[0] == 0


def test_a_time_ends_it(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    assert continued_ids(source, TEXTS, Effort(seconds=0.001), 1000).shape[0] == 0  # not one batch was finished
    now = itertools.count()
    monkeypatch.setattr(written.time, "monotonic", lambda: next(now))  # a second for each token
    found = continued_ids(source, TEXTS, Effort(seconds=4 * 70), 1000)
    assert found.shape == (8, 32)  # 28 tokens a batch: two were finished, and the third was thrown away


def test_it_is_text_that_the_model_expects(source: ModelSource) -> None:
    """Its own tokens surprise a model as much as it is unsure, no more: the mean of -log p is near the entropy."""
    batch = next(islice(Writer.of(source, 0).continuations(TEXTS), 1, None))
    with torch.no_grad():
        said = load(REAL_MODEL)(batch).logits[:, 3:-1].log_softmax(-1)
    surprise = -said.gather(-1, batch[:, 4:].unsqueeze(-1)).mean()
    entropy = -(said.exp() * said).sum(-1).mean()
    assert abs(float(surprise - entropy)) < 0.5  # 112 tokens, each off by 2 or so
