"""A learning under way: what Adam moves, the average of it, and the best average that was judged.

In: tensors with their steps, or a stage that was kept of the same. Out: the same tensors, moved; stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from t2n_llm.compress.learning_journal import CourseStage, Progressed
from t2n_llm.compress.pace import Mean

_BETAS = (0.9, 0.99)
_STEP, _SLOPES, _SQUARES = "step", "exp_avg", "exp_avg_sq"  # Adam's own names


@dataclass
class Course:
    """Tensors that are learned.

    Attributes:
        optimizer: Adam, over groups of them.
        mean: of them, over the last steps.
        best: the averages that were judged best; the tensors as they were, until one is better.
        before, lowest: mean KL of the first state, and of the best.
        judgements: how many there are to be.
        kept: the step of the best state.
        step: steps made.
        due: the judgement that is next, counted from 1.
    """

    optimizer: torch.optim.Optimizer
    mean: Mean
    best: list[torch.Tensor]
    before: float
    lowest: float
    judgements: int
    kept: int = 0
    step: int = 0
    due: int = 1
    _sizes: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = [group["lr"] for group in self.optimizer.param_groups]

    @staticmethod
    def begun(groups: Sequence[dict[str, Any]], before: float, judgements: int) -> Course:
        """Begin with tensors as they are.

        Args:
            groups: of tensors, as `torch.optim` takes them: `params`, and `lr`, their step.
            before: mean KL of this state.
            judgements: how many there are to be.
        """
        mean = Mean.of(group["params"] for group in groups)
        optimizer = torch.optim.Adam(groups, betas=_BETAS, foreach=False)
        return Course(optimizer, mean, _copies(mean.averaged), before, before, judgements)

    @staticmethod
    def gone_on(groups: Sequence[dict[str, Any]], stage: CourseStage) -> Course:
        """Put tensors into the state of a stage."""
        numbers = stage.numbers
        course = Course.begun(groups, numbers.before, numbers.judgements)
        course.lowest, course.kept, course.due = numbers.lowest, numbers.kept, numbers.due
        course.step, course.mean.steps = numbers.step, numbers.averaged
        course.best, course.mean.averaged = list(stage.best), list(stage.averages)
        with torch.no_grad():
            for tensor, moved, slopes, squares in zip(
                course.mean.learned, stage.moved, stage.slopes, stage.squares, strict=True
            ):
                tensor.copy_(moved)
                if slopes.numel():
                    steps = torch.tensor(float(numbers.step))
                    course.optimizer.state[tensor] = {_STEP: steps, _SLOPES: slopes, _SQUARES: squares}
        return course

    def stage(self, seconds: float) -> CourseStage:
        """Return the state, to be kept before the next step; `seconds` that it took are kept with it."""
        known = [self.optimizer.state.get(tensor, {}) for tensor in self.mean.learned]
        return CourseStage(
            Progressed(
                self.step, seconds, self.before, self.lowest, self.kept, self.due, self.judgements, self.mean.steps
            ),
            moved=[tensor.detach() for tensor in self.mean.learned],
            averages=self.mean.averaged,
            best=self.best,
            slopes=[state.get(_SLOPES, torch.empty(0)) for state in known],
            squares=[state.get(_SQUARES, torch.empty(0)) for state in known],
        )

    def move(self, pace: float, slope: Callable[[torch.optim.Optimizer], None]) -> None:
        """Make a step, a share of its whole size; `slope` finds the gradients and has the optimizer step."""
        for group, size in zip(self.optimizer.param_groups, self._sizes, strict=True):
            group["lr"] = size * pace
        slope(self.optimizer)
        self.step += 1
        self.mean.add()

    def is_due(self, share: float) -> bool:
        """Say whether to judge after a share of all that is to be learned; then the next judgement is due later."""
        if share * self.judgements < self.due:
            return False
        self.due = int(share * self.judgements) + 1
        return True

    def judged(self, divergence: float) -> None:
        """Keep the averages, if they are the best so far."""
        if divergence < self.lowest:
            self.lowest, self.kept, self.best = divergence, self.step, _copies(self.mean.averaged)

    @contextmanager
    def at_best(self) -> Iterator[None]:
        """Give the tensors their best values for a `with` block."""
        with self.mean.given(self.best):
            yield


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


__all__ = ["Course"]
