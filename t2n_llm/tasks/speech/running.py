"""The archives of a speech model in an engine: a text becomes frames, and frames become a waveform.

In: archives and the plan that connects them. Out: f32 [samples]. `t2n-llm generate` and the check run the same loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from generic_export.errors import ArchiveError, OptionError
from generic_export.read.outline import read_outline
from generic_export.read.reading import read_graph_text, signature_of
from t2n_llm.check.archive_sessions import NamedArchive, open_archive_session, open_turns
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.runner import empty_shape
from t2n_llm.tasks.speech.arrays import Draws, frames_of_tokens, given_to
from t2n_llm.tasks.speech.frames_of_codes import CodeMaker, chosen_by
from t2n_llm.tasks.speech.plan import (
    CODE,
    CODES,
    DURATIONS,
    FRAME,
    FRAMES,
    IDS,
    LENGTH,
    RECORDING,
    ROWS,
    SPECTROGRAM,
    STATE,
    STEP,
    STOP,
    TEXT,
    TOKENS,
    VOICE,
    WAVEFORM,
    Codes,
    SpeechPlan,
    Steps,
)
from t2n_llm.tasks.speech.step_archive import StepArchive


@dataclass(frozen=True)
class Forced:
    """What the check takes from PyTorch where the archives would go on with what they made themselves.

    Attributes:
        durations: f32 [1, S]; None for frames that are made step by step.
        frames: f32 [1, F, D], for these.
        codes: i64 [1, F, K], for frames of codes.
    """

    durations: np.ndarray | None = None
    frames: np.ndarray | None = None
    codes: np.ndarray | None = None


@dataclass(frozen=True)
class SpeechModel:
    """All archives of a speech model.

    Attributes:
        plan: how they connect.
        archives: by role, all but those of steps.
        steps: these.
    """

    plan: SpeechPlan
    archives: Mapping[str, NamedArchive]
    steps: Mapping[str, StepArchive] = field(default_factory=dict)

    def spoken(
        self,
        ids: np.ndarray,
        speaker: np.ndarray | None,
        draws: Draws,
        forced: Forced | None = None,
        words: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Return everything that the archives make of a text, by name; `waveform` is f32 [1, samples].

        Args:
            ids: i64 [1, S].
            speaker: see `plan.Speaker`.
            draws: for noise.
            forced: None lets the archives go on with their own values.
            words: of the text; None for many.

        Raises:
            OptionError: the text takes more frames than the model has positions for, or none.
            EngineError: the engine failed.
        """
        known = {IDS: ids}
        known |= self._run(TEXT, known, speaker, draws, {TOKENS: ids.shape[1]})
        if self.plan.codes is not None:
            known |= self._coded(self.plan.codes, known, draws, forced or Forced())
        elif self.plan.steps is not None:
            known |= self._stepped(self.plan.steps, known, speaker, draws, forced or Forced(), words)
        else:
            known |= {FRAMES: self._repeated(known, forced or Forced())}
        sizes = {LENGTH: known[FRAMES if self.plan.codes is None else CODES].shape[1]}
        if not sizes[LENGTH]:
            raise OptionError(
                "the model ended the speech before its first frame.", "Use another text, or another --seed."
            )
        if self.plan.most_frames is not None and sizes[LENGTH] > self.plan.most_frames:
            raise OptionError(
                f"the text takes {sizes[LENGTH]} frames, and the model has positions for {self.plan.most_frames}.",
                "Speak one sentence at a time.",
            )
        for role in (SPECTROGRAM, WAVEFORM):
            if role in self.archives:
                known |= self._run(role, known, speaker, draws, sizes)
        return known

    def heard(self, recording: np.ndarray) -> dict[str, np.ndarray]:
        """Return the vectors of a voice by name.

        Args:
            recording: f32 [1, V, frame].

        Raises:
            EngineError: the engine failed.
        """
        return self.archives[VOICE].run({RECORDING: recording})

    def _run(
        self,
        role: str,
        known: Mapping[str, np.ndarray],
        speaker: np.ndarray | None,
        draws: Draws,
        sizes: Mapping[str, int],
    ) -> dict[str, np.ndarray]:
        archive = self.archives[role]
        return archive.run(given_to(archive.inputs, self.plan, known, speaker, draws, sizes))

    def _repeated(self, known: Mapping[str, np.ndarray], forced: Forced) -> np.ndarray:
        """Return frames [1, F, D]: each row of a text as often as its duration says."""
        if self.plan.durations is None:
            raise ArchiveError("the plan of a speech model has neither durations nor steps.", "Export the model again.")
        durations = known[DURATIONS] if forced.durations is None else forced.durations
        return np.repeat(known[ROWS], frames_of_tokens(self.plan.durations, durations[0]), axis=1)

    def _stepped(
        self,
        steps: Steps,
        known: Mapping[str, np.ndarray],
        speaker: np.ndarray | None,
        draws: Draws,
        forced: Forced,
        words: int | None,
    ) -> dict[str, np.ndarray]:
        """Return frames [1, F, D] and `stop` [steps]; a step reads the last frame, and the states after it."""
        archive = self._step(STEP)
        varying = (FRAME, *self.plan.noise)
        run = archive.about(given_to((), self.plan, known, speaker, draws, {}), varying)
        frame, made, stops = known.get(FRAME), list[np.ndarray](), list[float]()
        if frame is None:
            frame = np.zeros((1, 1, steps.width), np.float32)
        tokens = known[IDS].shape[1]
        while not made or not self._ended(steps.count(stops, tokens, words), made, forced):
            out = run(given_to(archive.inputs, self.plan, {FRAME: frame}, None, draws, {}))
            made.append(out[FRAMES])
            stops.append(float(out[STOP][0]))
            last = sum(frames.shape[1] for frames in made)
            source = out[FRAMES] if forced.frames is None else forced.frames[:, :last]
            frame = source[:, -1:]
        return {FRAMES: np.concatenate(made, axis=1), STOP: np.array(stops, np.float32)}

    def _coded(
        self, rule: Codes, known: Mapping[str, np.ndarray], draws: Draws, forced: Forced
    ) -> dict[str, np.ndarray]:
        """Return codes i64 [1, F, K] and the logits [F * K, V] that they were chosen of."""
        maker = CodeMaker(rule, self._step(STEP), self._step(CODE))
        codes = forced.codes
        if codes is None:
            return maker.made(known, chosen_by(rule, draws.seed), rule.most_steps)
        return maker.made(known, lambda number, place, _: int(codes[0, number, place]), codes.shape[1])

    def _step(self, role: str) -> StepArchive:
        if role not in self.steps:
            raise ArchiveError(f"a speech model has steps, and no archive {role!r}.", "Export the model again.")
        return self.steps[role]

    @staticmethod
    def _ended(count: int, made: list[np.ndarray], forced: Forced) -> bool:
        if forced.frames is not None:
            return sum(frames.shape[1] for frames in made) >= forced.frames.shape[1]
        return len(made) >= count


@contextmanager
def open_speech(
    archives: Mapping[str, Path], plan: SpeechPlan, engine: EngineOptions | None = None
) -> Iterator[SpeechModel]:
    """Yield a speech model ready to be asked, and stop its engine after the block.

    Args:
        archives: by role.
        plan: how they connect.
        engine: which one; None takes the pip-installed one.

    Raises:
        EngineError: the engine is not installed, or refuses an archive.
    """
    with ExitStack() as stack:
        opened, steps = {}, {}
        for role, path in archives.items():
            names = signature_of(read_graph_text(path))
            inputs, outputs = tuple(names.inputs), tuple(names.outputs)
            if role in (STEP, CODE):
                steps[role] = StepArchive(
                    stack.enter_context(open_turns(path, engine)), inputs, outputs, _first_states(path)
                )
            else:
                opened[role] = NamedArchive(stack.enter_context(open_archive_session(path, engine)), inputs, outputs)
        yield SpeechModel(plan, opened, steps)


def _first_states(archive: Path) -> tuple[np.ndarray, ...]:
    """Return the states of an archive before the first step: without a position."""
    externals = read_outline(read_graph_text(archive)).externals
    return tuple(np.zeros(empty_shape(each.shape), np.float32) for each in externals if each.name.startswith(STATE))


__all__ = ["Forced", "SpeechModel", "open_speech"]
