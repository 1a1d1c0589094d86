"""Frames of codes, made in an engine: the first code of a frame by one archive, the others one after another by another one.

In: what the text's archive made. Out: codes, and the logits that they were chosen of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.rules import Said
from t2n_llm.tasks.speech.plan import CODE, CODES, LOGITS, Codes
from t2n_llm.tasks.speech.step_archive import StepArchive

Choose = Callable[[int, int, np.ndarray], int]
"""The code of a place, from the number of the frame, the place and the logits [V]."""

_NOTHING = Said((), 0)


@dataclass(frozen=True)
class CodeMaker:
    """The two archives that make codes.

    Attributes:
        rule: how.
        step: reads a frame.
        code: reads a code.
    """

    rule: Codes
    step: StepArchive
    code: StepArchive

    def made(self, told: Mapping[str, np.ndarray], choose: Choose, most: int) -> dict[str, np.ndarray]:
        """Return frames i64 [1, F, K], and the logits [F * K, V] that they were chosen of.

        Args:
            told: what the text's archive made, by name.
            choose: of a code.
            most: frames.

        Raises:
            EngineError: the engine failed.
        """
        read = self.step.about(told, (CODES,))
        frames, logits = list[list[int]](), list[np.ndarray]()
        while len(frames) < most:
            codes, scores = self._frame(told, len(frames), choose)
            ended = all(code == self.rule.end for code in codes[:-1])
            if not ended or codes[-1] != self.rule.end:  # a frame of ends alone is not heard
                frames.append(codes)
                logits += scores
            if ended or len(frames) == most:
                break
            told = read({CODES: np.array([[codes]], np.int64)})
        count, width = self.rule.count, told[LOGITS].shape[-1]
        return {
            CODES: np.array(frames, np.int64).reshape(1, -1, count),
            LOGITS: np.array(logits, np.float32).reshape(-1, width),
        }

    def _frame(self, told: Mapping[str, np.ndarray], number: int, choose: Choose) -> tuple[list[int], list[np.ndarray]]:
        """Return the codes of a frame, and the logits [V] of each."""
        logits = [told[LOGITS][0]]
        codes = [choose(number, 0, logits[0])]
        read = self.code.about(told, (CODE,))
        for place in range(1, self.rule.count):
            logits.append(read({CODE: np.array([[codes[-1]]], np.int64)})[LOGITS][0])
            codes.append(choose(number, place, logits[-1]))
        return codes, logits


def chosen_by(rule: Codes, seed: int) -> Choose:
    """Return what chooses codes as a model's settings say.

    Args:
        rule: has the settings.
        seed: of the draws.
    """
    first, others = (
        TokenChoice.of(settings, sampled=bool(settings.get("do_sample", False)))
        for settings in (rule.first, rule.others)
    )
    random = np.random.default_rng(seed)
    return lambda _, place, logits: (others if place else first).next_token(logits, _NOTHING, random)


__all__ = ["Choose", "CodeMaker", "chosen_by"]
