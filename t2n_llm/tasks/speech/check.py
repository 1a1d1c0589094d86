"""Texts of two lengths, spoken by the archives and by transformers' own model in f32 with the same random numbers.

In: a checkpoint, and archives in an engine. Out: a `ValidationReport`. Durations are compared before they are rounded, and the
engine goes on with PyTorch's: two that differ by a rounding error may round to different numbers of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t2n_llm.check.agreement import CheckResult, Tolerance, ValidationReport, compare_values
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.reference import CHECK_TEXT
from t2n_llm.tasks.speech.arrays import Draws, typical_recording, typical_speaker
from t2n_llm.tasks.speech.family import SpeechFamily, Utterance, text_of
from t2n_llm.tasks.speech.plan import CODES, DURATIONS, FRAMES, STATE, TEXT, SpeechPlan
from t2n_llm.tasks.speech.running import Forced, open_speech

_LENGTHS = (7, 21)
_KEPT = ("cross_", STATE)  # how the names begin of keys and values that the text's archive makes
_SMALLEST_SCALE = 0.1  # of waveforms that are nearly silent


@dataclass(frozen=True)
class SpokenText:
    """A text of the check.

    Attributes:
        ids: i64 [1, S].
        seed: of what is drawn.
    """

    ids: np.ndarray
    seed: int

    @property
    def name(self) -> str:
        """What is special about it."""
        return f"a text of {self.ids.shape[1]} tokens"


def plan_texts(family: SpeechFamily, tokenizer: Any | None) -> tuple[SpokenText, ...]:
    """Choose texts of two lengths: of words where there is a tokenizer, else random ids.

    Args:
        family: of the model.
        tokenizer: of the model, or None.
    """
    generator = np.random.default_rng(0)
    if tokenizer is not None:
        whole = np.array([tokenizer(CHECK_TEXT)["input_ids"]], np.int64)
    else:
        tokens = family.text_tokens
        whole = generator.integers(tokens.start, tokens.stop, size=(1, max(_LENGTHS)))
    return tuple(SpokenText(whole[:, :length], seed) for seed, length in enumerate(_LENGTHS))


def run_speech_reference(family: SpeechFamily, model: Any, texts: Sequence[SpokenText]) -> list[Utterance]:
    """Return what PyTorch makes of texts.

    Args:
        family: of the model.
        model: of transformers, in f32.
        texts: what is spoken.
    """
    speaker = typical_speaker(family.plan)
    with torch.no_grad():
        return [_uttered(family, model, text, speaker) for text in texts]


def _uttered(family: SpeechFamily, model: Any, text: SpokenText, speaker: np.ndarray | None) -> Utterance:
    voice = torch.from_numpy(speaker) if speaker is not None else None
    spoken = family.spoken(model, torch.from_numpy(text.ids), voice, Draws(text.seed))
    recording = typical_recording(family.plan, text.seed)
    heard = {} if recording is None else family.heard(recording)
    return replace(spoken, made={**text_of(family, model, text.ids, speaker, text.seed), **spoken.made, **heard})


def check_speech(
    archives: Mapping[str, Path],
    plan: SpeechPlan,
    dtype: str,
    texts: Sequence[SpokenText],
    expected: Sequence[Utterance],
    *,
    engine: EngineOptions | None = None,
    tolerance: Tolerance | None = None,
    on_text: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Compare what the archives make of texts.

    Args:
        archives: by role.
        plan: how they connect.
        dtype: `f32` or `f16`, of the archives.
        texts, expected: what is spoken, and what PyTorch makes of it.
        engine: which one; None takes the pip-installed one.
        tolerance: None takes the element type's.
        on_text: told the name of each text before it runs.

    Raises:
        EngineError: the engine refused an archive, or died.
    """
    tolerance, speaker = tolerance or Tolerance.for_dtype(dtype), typical_speaker(plan)
    checks: list[CheckResult] = []
    with open_speech(archives, plan, engine) as model:
        for text, wanted in zip(texts, expected, strict=True):
            if on_text is not None:
                on_text(text.name)
            forced = Forced(*(wanted.made.get(name) for name in (DURATIONS, FRAMES, CODES)))
            got = model.spoken(text.ids, speaker, Draws(text.seed), forced)
            recording = typical_recording(plan, text.seed)
            if recording is not None:
                got |= model.heard(recording)
            checks += [_compared(text, names, got, wanted.made, tolerance) for names in _groups(wanted.made)]
        asked = model.archives[TEXT].asked
        return ValidationReport(asked.engine_name, asked.engine_version, dtype, tolerance, tuple(checks))


def _groups(made: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return what is compared in one check each: keys and values together, anything else by itself; codes are given."""
    kept = [name for name in made if name.startswith(_KEPT)]
    return [*([kept] if kept else []), *([name] for name in made if name not in kept and name != CODES)]


def _compared(
    text: SpokenText,
    names: Sequence[str],
    got: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    tolerance: Tolerance,
) -> CheckResult:
    steps = [
        compare_values(step, got[name], wanted[name], smallest_scale=_SMALLEST_SCALE) for step, name in enumerate(names)
    ]
    what = names[0] if len(names) == 1 else next(f"{start}*" for start in _KEPT if names[0].startswith(start))
    return CheckResult.judged(f"{what} of {text.ids.shape[1]} tokens", steps, tolerance)


__all__ = ["SpokenText", "check_speech", "plan_texts", "run_speech_reference"]
