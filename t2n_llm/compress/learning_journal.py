"""How far the learning at the end has come, kept on disk: one that was killed goes on behind the last judgement that was kept.

In: the folder in which blocks are written. Out: two files there. What the model wrote, and the effort that was left for learning
then; and the course of learning: every number that decides how it goes on, so that it ends as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from t2n_llm.compress.effort import Effort
from t2n_llm.compress.kept import KeptState

WRITTEN_NAME = "written.safetensors"
COURSE_NAME = "learning.safetensors"
_WRITTEN = "written"


@dataclass(frozen=True)
class Progressed:
    """The numbers of a course.

    Attributes:
        step: steps made.
        seconds: that they took, and what came before them.
        before, lowest: mean KL of the first state, and of the best one that was judged.
        kept: the step of that one.
        due: the judgement that is next, counted from 1.
        judgements: how many there are.
        averaged: steps in the average.
    """

    step: int
    seconds: float
    before: float
    lowest: float
    kept: int
    due: int
    judgements: int
    averaged: int


@dataclass(frozen=True)
class CourseStage:
    """A course of learning behind a judgement; tensors are in one order, that of what is learned.

    Attributes:
        numbers: of it.
        moved: what is learned, as it is.
        averages: over the last steps.
        best: averages of the best state that was judged.
        slopes, squares: Adam's means of slopes and of their squares; empty where there was no slope.
    """

    numbers: Progressed
    moved: Sequence[torch.Tensor]
    averages: Sequence[torch.Tensor]
    best: Sequence[torch.Tensor]
    slopes: Sequence[torch.Tensor]
    squares: Sequence[torch.Tensor]


_TENSORS = tuple(field.name for field in fields(CourseStage) if field.name != "numbers")


@dataclass(frozen=True)
class LearningJournal:
    """Keeps what a model wrote and how its learning goes.

    Attributes:
        folder: where blocks are written.
        identity: text that two learnings share when nothing that decides what they make is different.
    """

    folder: Path
    identity: str

    @cached_property
    def _written(self) -> KeptState:
        return KeptState(self.folder / WRITTEN_NAME, self.identity)

    @cached_property
    def _course(self) -> KeptState:
        return KeptState(self.folder / COURSE_NAME, self.identity)

    def recalled_texts(self) -> tuple[torch.Tensor, Effort] | None:
        """Return what the model wrote, int64 [m, M], and the effort that was left then; forget another's."""
        found = self._written.recalled(lambda left, tensors: (tensors[_WRITTEN], Effort(**left)))
        if found is None:
            self._course.forget()  # of other texts
        return found

    def keep_texts(self, written: torch.Tensor, left: Effort) -> None:
        """Keep what the model wrote, and the effort that is left."""
        self._written.write(asdict(left), {_WRITTEN: written.contiguous()})

    def recalled_course(self, shapes: Sequence[torch.Size]) -> CourseStage | None:
        """Return the last course that was kept, of tensors of these shapes; forget any other."""

        def stage(numbers: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CourseStage | None:
            series = {name: [tensors[f"{name}.{index}"] for index in range(len(shapes))] for name in _TENSORS}
            fits = [each.shape for each in series["moved"]] == list(shapes)
            return CourseStage(Progressed(**numbers), **series) if fits else None

        return self._course.recalled(stage)

    def keep_course(self, stage: CourseStage) -> None:
        """Keep a course, unless one was kept a moment ago."""
        if not self._course.is_due:
            return
        tensors = {
            f"{name}.{index}": each.detach().contiguous()
            for name in _TENSORS
            for index, each in enumerate(getattr(stage, name))
        }
        self._course.write(asdict(stage.numbers), tensors)


__all__ = ["COURSE_NAME", "WRITTEN_NAME", "CourseStage", "LearningJournal", "Progressed"]
