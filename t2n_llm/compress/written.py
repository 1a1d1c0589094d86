"""Text that a model writes itself: to be calibrated on without any other, and to learn from when it has read what it was given.

In: a model. Out: token ids, int64 [n, L], sampled from its own predictions: text of the kind that it will read when it generates
(LLM-QAT, arXiv:2305.17888).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from generic_export.interrupts import asking
from kvcache.compat import cache_keyword, cache_of
from t2n_llm.compress.effort import Effort
from t2n_llm.compress.progress import WritingProgress
from t2n_llm.source.hub import ModelSource, opening_ids
from t2n_llm.weights.f32_model import load_f32
from t2n_llm.weights.placement import Placement, plan_residency

_BATCH = 32  # texts written at once: the weights are read once for all of them
_SHORTER = 2  # than the given texts: a step of writing costs more, the more of a text there is
_BEGUN = 8  # one token in so many of a text is read, the rest is written
_TIME_SHARE = 0.25  # of a time that is given, for writing


@dataclass(frozen=True)
class Writer:
    """A model that writes.

    Attributes:
        model: whole and in memory, f32.
        generator: draws the tokens.
        opening: int64 [B], what every text begins with.
    """

    model: Any
    generator: torch.Generator
    opening: torch.Tensor

    @staticmethod
    def of(source: ModelSource, seed: int) -> Writer:
        """Load a model.

        Args:
            source: the model.
            seed: the same seed gives the same texts.

        Raises:
            NotEnoughMemoryError: the model does not fit.
        """
        opening = opening_ids(source.tokenizer()) if source.has_tokenizer() else []
        return Writer(_load(source), torch.Generator().manual_seed(seed), torch.tensor(opening, dtype=torch.int64))

    def anything(self, count: int, length: int) -> torch.Tensor:
        """Write `count` texts [count, length] that begin with any token."""
        vocabulary = self.model.config.get_text_config().vocab_size
        begun = self._opened(torch.randint(vocabulary, (count, 1), generator=self.generator))
        return torch.cat([self._continued(part, length) for part in begun.split(_BATCH)])

    def continuations(self, texts: torch.Tensor, until: float = math.inf) -> Iterator[torch.Tensor]:
        """Write texts that begin as some place of the given texts goes on.

        Args:
            texts: int64 [m, L].
            until: when to stop, by `time.monotonic`; what is not finished by then is thrown away.

        Yields:
            int64 [n, L / 2], some at a time, without end.
        """
        count, given = texts.shape
        length = max(1, given // _SHORTER)
        begun = max(1, length // _BEGUN - len(self.opening))
        for first in itertools.count(0, _BATCH):
            rows = [texts[place % count] for place in range(first, first + _BATCH)]
            starts = torch.randint(given - begun + 1, (_BATCH,), generator=self.generator).tolist()
            prompts = torch.stack([row[start : start + begun] for row, start in zip(rows, starts, strict=True)])
            written = self._continued(self._opened(prompts), length, until)
            if written.shape[1] < length:
                return
            yield written

    def _opened(self, texts: torch.Tensor) -> torch.Tensor:
        """Return texts [n, P] behind what every text begins with."""
        return torch.cat([self.opening.expand(len(texts), -1), texts], dim=1)

    @torch.no_grad()
    def _continued(self, prompts: torch.Tensor, length: int, until: float = math.inf) -> torch.Tensor:
        """Return texts [n, length] that begin as given [n, P]; shorter ones where the time is up."""
        ids, past, step, keyword = prompts, None, prompts, cache_keyword(self.model.forward)
        for _ in asking(range(length - prompts.shape[1])):
            result = self.model(input_ids=step, use_cache=True, logits_to_keep=1, **{keyword: past})
            past = cache_of(result)
            probabilities = result.logits[:, -1].to(torch.float32).softmax(dim=-1)
            step = torch.multinomial(probabilities, 1, generator=self.generator)
            ids = torch.cat([ids, step], dim=1)
            if time.monotonic() > until:
                break
        return ids


def generated_ids(source: ModelSource, *, sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Sample sequences from the model: first tokens at random, then what it continues with.

    Args:
        source: the model, loaded whole for this.
        sequences: how many.
        length: tokens in each.
        seed: the same seed gives the same tokens.

    Raises:
        NotEnoughMemoryError: the model does not fit.
    """
    return Writer.of(source, seed).anything(sequences, length)


def continued_ids(
    source: ModelSource,
    texts: torch.Tensor,
    effort: Effort,
    wanted: int,
    progress: Callable[[WritingProgress], None] = lambda _: None,
) -> torch.Tensor:
    """Have a model go on where texts stop being given.

    Args:
        source: the model, loaded whole for this.
        texts: int64 [m, L].
        effort: whose seed decides what is written, and whose time, if it has one, how much.
        wanted: no more texts than these are written.
        progress: told whenever some are.

    Returns:
        int64 [n, L / 2].

    Raises:
        NotEnoughMemoryError: the model does not fit.
    """
    if wanted <= 0:
        return texts[:0]
    until = math.inf if effort.seconds is None else time.monotonic() + _TIME_SHARE * effort.seconds
    written: list[torch.Tensor] = []
    for batch in Writer.of(source, effort.seed).continuations(texts, until):
        written.append(batch)
        progress(WritingProgress(min(len(written) * _BATCH, wanted), wanted))
        if len(written) * _BATCH >= wanted:
            break
    return torch.cat(written)[:wanted] if written else texts[:0]


def _load(source: ModelSource) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        skeleton = AutoModelForCausalLM.from_config(source.config, trust_remote_code=source.trust_remote_code)
    plan_residency(skeleton, Placement("cpu"))
    return load_f32(source.weights, source.trust_remote_code)


__all__ = ["Writer", "continued_ids", "generated_ids"]
