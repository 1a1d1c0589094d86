"""An archive of a speech model that runs one step after another, its states fed back, in an engine.

In: an archive that is loaded. Out: a function from the inputs of a step to its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from t2n_llm.check.archive_sessions import OpenTurns


@dataclass(frozen=True)
class StepArchive:
    """The archive of a step in an engine.

    Attributes:
        begin: begins the steps of a text.
        inputs, outputs: of its graph, in order; the states are the last ones.
        states: before the first step.
    """

    begin: OpenTurns
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[np.ndarray, ...]

    def about(
        self, told: Mapping[str, np.ndarray], varying: Collection[str]
    ) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        """Return a function from the inputs of a step by name to its outputs, without the states.

        Args:
            told: what all steps of a text have, by name, the states that the text's archive made, and others.
            varying: names of the inputs that each step is given.
        """
        first = len(self.inputs) - len(self.states)
        named, kept = self.inputs[:first], self.inputs[first:]
        given = [name for name in named if name in varying]
        states = [told.get(name, empty) for name, empty in zip(kept, self.states, strict=True)]
        turn = self.begin({name: told[name] for name in named if name not in varying}, states)
        return lambda known: dict(zip(self.outputs, turn([known[name] for name in given]), strict=False))


__all__ = ["StepArchive"]
