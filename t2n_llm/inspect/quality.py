"""How far one language model's predictions are from another's: divergence, agreement and perplexity over a text.

In: windows of tokens, and logits of two models for each. Out: a `Quality`. Logits come from PyTorch or from an archive in
the engine, window by window, so that two windows of logits are all that is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from generic_export.errors import EngineRunError, OptionError
from t2n_llm.check.runner import Runner, Turn
from t2n_llm.compress.text import evenly_cut
from t2n_llm.source.hub import opening_ids

_ROWS = 32  # compared at a time: vocabularies are wide
_TAIL = 0.99


@dataclass(frozen=True)
class Quality:
    """A model compared with the one it was made from, over the scored tokens of a text.

    Attributes:
        positions: scored tokens.
        mean_kl_divergence, p99_kl_divergence, max_kl_divergence: KL(reference || model) of the next-token distributions,
            in nats: mean, 99th percentile and worst token.
        same_top1_share: share of positions where both prefer the same token.
        perplexity, reference_perplexity: of the text's own tokens.
    """

    positions: int
    mean_kl_divergence: float
    p99_kl_divergence: float
    max_kl_divergence: float
    same_top1_share: float
    perplexity: float
    reference_perplexity: float


# Turns a window of token ids into the logits after each of them but the last, float [W - 1, vocab].
Predict = Callable[[Turn], torch.Tensor]


def windows_of_text(tokenizer: Any, text: str, count: int, length: int) -> list[list[int]]:
    """Cut windows out of a text, each begun as the tokenizer begins a text; as `windows_of`."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return windows_of(ids, count, length, opening_ids(tokenizer))


def windows_of(ids: Sequence[int], count: int, length: int, opening: Sequence[int] = ()) -> list[list[int]]:
    """Cut windows out of a text, evenly spread over it and without overlap.

    Args:
        ids: the text's tokens.
        count: at most so many windows.
        length: tokens in each.
        opening: tokens that each window begins with, part of its length.

    Raises:
        OptionError: the text is shorter than one window, or a window has no token to predict.
    """
    if length < 2 or count < 1:
        raise OptionError(f"{count} windows of {length} tokens leave nothing to score.", "Take windows of 2 or more.")
    windows = evenly_cut(ids, count, length, opening)
    if not windows:
        raise OptionError(f"the text has {len(ids)} tokens, a window takes {length}.", "Give a longer text.")
    return windows


def compare_windows(
    windows: Sequence[Turn], reference: Predict, model: Predict, on_window: Callable[[int], None] | None = None
) -> Quality:
    """Compare two models on every window.

    Args:
        windows: token ids; the first token of each is not scored.
        reference: the model to come close to.
        model: the one that is judged.
        on_window: told the number of windows done.

    Raises:
        EngineRunError: the model gave values that are not finite.
    """
    tally = _Tally()
    for index, window in enumerate(windows):
        tally.add(window, reference(window), model(window))
        if on_window is not None:
            on_window(index + 1)
    return tally.quality()


class _Tally:
    """What is summed up over positions."""

    def __init__(self) -> None:
        self._divergence: list[torch.Tensor] = []
        self._same = 0
        self._surprise = 0.0
        self._reference_surprise = 0.0

    def add(self, window: Turn, reference: torch.Tensor, model: torch.Tensor) -> None:
        targets = torch.tensor(list(window[1:])).unsqueeze(1)
        for start in range(0, len(targets), _ROWS):
            piece = slice(start, start + _ROWS)
            self._add_rows(targets[piece], reference[piece].float(), model[piece].float())

    def _add_rows(self, targets: torch.Tensor, reference: torch.Tensor, model: torch.Tensor) -> None:
        if not bool(model.isfinite().all()):
            raise EngineRunError(
                "the archive gave logits that are not finite.", "Run t2n-llm validate on it; f16 may overflow."
            )
        expected, actual = reference.log_softmax(-1), model.log_softmax(-1)
        self._divergence.append((expected.exp() * (expected - actual)).sum(-1, dtype=torch.float64))
        self._same += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        self._surprise -= float(actual.gather(1, targets).sum(dtype=torch.float64))
        self._reference_surprise -= float(expected.gather(1, targets).sum(dtype=torch.float64))

    def quality(self) -> Quality:
        divergence = torch.cat(self._divergence)
        count = len(divergence)
        return Quality(
            positions=count,
            mean_kl_divergence=float(divergence.mean()),
            p99_kl_divergence=float(divergence.quantile(_TAIL)),
            max_kl_divergence=float(divergence.max()),
            same_top1_share=self._same / count,
            perplexity=float(np.exp(self._surprise / count)),
            reference_perplexity=float(np.exp(self._reference_surprise / count)),
        )


@dataclass(frozen=True)
class ArchiveReading:
    """How the logits of a whole window are got out of an archive.

    Attributes:
        turn: tokens in one run, as many as it gives logits for; 0 for the whole window.
    """

    turn: int

    def runs(self, window: int) -> int:
        """Return how many runs of the engine a window takes."""
        return -(-(window - 1) // self.turn) if self.turn else 1

    def describe(self, window: int) -> str:
        """Say how, and what it costs."""
        if not self.turn:
            return f"one run of the engine for each window of {window} tokens"
        return (
            f"{self.runs(window)} runs for each window of {window} tokens, as the archive keeps the logits of "
            f"{self.turn} position{'s' if self.turn > 1 else ''} a run (--num-logits-to-keep 0 would make it one)"
        )

    def predict(self, runner: Runner, window: Turn) -> torch.Tensor:
        """Return the logits after each token of a window but the last, float32 [W - 1, vocab]."""
        asked = window[:-1]
        turns = (
            [asked[start : start + self.turn] for start in range(0, len(asked), self.turn)] if self.turn else [asked]
        )
        rows = runner.run_turns(turns, stateful=bool(self.turn))
        kept = [row[-len(turn) :] for row, turn in zip(rows, turns, strict=True)]
        return torch.from_numpy(np.concatenate(kept).astype(np.float32))


def torch_predict(model: torch.nn.Module) -> Predict:
    """Return the predictions of a transformers model."""

    @torch.no_grad()
    def predict(window: Turn) -> torch.Tensor:
        device = next(model.parameters()).device
        ids = torch.tensor([list(window[:-1])], device=device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits.float().cpu()

    return predict


def engine_predict(runner: Runner, reading: ArchiveReading) -> Predict:
    """Return the predictions of an archive."""
    return lambda window: reading.predict(runner, window)
