"""Beam search: several texts followed at a time, the best one given, as transformers' `generate(num_beams=...)` does.

In: a session of a decoder that takes states and gives them back. Out: the tokens of the best text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from generic_export.inference_target.tract.engines.engine import EngineSession
from t2n_llm.tasks.seq2seq.token_rules import TokenRules


@dataclass(frozen=True)
class _Beam:
    """A text on its way.

    Attributes:
        said: its tokens after the start.
        score: the sum of their logarithms of probability.
        log_probabilities: [vocab] of the next token.
        states: of the decoder after it.
    """

    said: tuple[int, ...]
    score: float
    log_probabilities: np.ndarray
    states: Sequence[np.ndarray]


@dataclass(frozen=True)
class _Ended:
    """A whole text and its score, which is that of its tokens over its length to a power."""

    said: tuple[int, ...]
    score: float


def best_text(
    session: EngineSession, states: Sequence[np.ndarray], rules: TokenRules, beams: int, most: int
) -> tuple[int, ...]:
    """Return the tokens of the best text, without the one that ends it.

    Args:
        session: `[input_ids, *states]` in, `[logits, *states]` out.
        states: before any token.
        rules: which token may come next, and how lengths count.
        beams: texts that are followed.
        most: tokens of a text.
    """
    running = [_read(session, _Beam((), 0.0, np.zeros(0), states), rules.start)]
    ended: list[_Ended] = []
    for length in range(1, most + 1):
        chosen = _best_next(running, rules, beams)
        last = length == most
        stops = [last or token in rules.ends for _, _, token in chosen]
        full = len(ended) >= beams and rules.early_stopping
        whole = [
            _Ended((*beam.said, token), score / length**rules.length_penalty)
            for (score, beam, token), stop in list(zip(chosen, stops, strict=True))[:beams]
            if stop and not full
        ]
        ended = sorted([*ended, *whole], key=lambda text: -text.score)[:beams]
        going = [each for each, stop in zip(chosen, stops, strict=True) if not stop][:beams]
        if not going or _decided(ended, going[0][0], length, rules, beams):
            break
        running = [
            _read(session, _Beam((*beam.said, token), score, beam.log_probabilities, beam.states), [token])
            for score, beam, token in going
        ]
    best = ended[0].said if ended else running[0].said
    return best[:-1] if best and best[-1] in rules.ends else best


def _best_next(running: Sequence[_Beam], rules: TokenRules, beams: int) -> list[tuple[float, _Beam, int]]:
    """Return the best continuations, with their scores: enough of them for `beams` that go on."""
    count = max(2, 1 + len(rules.ends)) * beams
    candidates: list[tuple[float, _Beam, int]] = []
    for beam in running:
        scores = beam.score + rules.applied(beam.log_probabilities, beam.said)
        best = np.argsort(-scores, kind="stable")[:count]
        candidates += [(float(scores[token]), beam, int(token)) for token in best]
    return sorted(candidates, key=lambda each: -each[0])[:count]


def _decided(ended: Sequence[_Ended], best_running: float, length: int, rules: TokenRules, beams: int) -> bool:
    """Say whether no text that goes on can be better than the worst of those that ended."""
    if len(ended) < beams:
        return False
    return rules.early_stopping or best_running / length**rules.length_penalty <= ended[-1].score


def _read(session: EngineSession, beam: _Beam, tokens: Sequence[int]) -> _Beam:
    """Let a beam's decoder read its newest tokens."""
    logits, *states = session.run([np.array([list(tokens)], np.int64), *beam.states])
    row = logits[0, -1].astype(np.float64)
    shifted = row - row.max()
    return _Beam(beam.said, beam.score, shifted - np.log(np.exp(shifted).sum()), states)


__all__ = ["best_text"]
