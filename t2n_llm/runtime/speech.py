"""Speech of a text, through the archives of a speech model in tract.

In: an export folder and a text. Out: a waveform. The tokenizer is Python's, and noise comes from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.devices import check_device
from generic_export.errors import OptionError
from t2n_llm.check.options import EngineOptions
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.manifest_form import require_said
from t2n_llm.runtime.chat.template import ChatTemplate
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.media.sound import read_waveform
from t2n_llm.tasks.speech.arrays import Draws
from t2n_llm.tasks.speech.plan import TEXT, WAVEFORM, Speaker, SpeechPlan
from t2n_llm.tasks.speech.running import SpeechModel, open_speech

_SOUND = ".wav"
_SAID = ("speech.sampling_rate", f"archives.{TEXT}", f"archives.{WAVEFORM}")


@dataclass(frozen=True)
class SpeakingModel:
    """An export folder of a speech model.

    Attributes:
        folder: it.
        plan: how its archives connect.
        archives: by role.
        tokenizer: of the text.
        device: what tract computes on.
    """

    folder: Path
    plan: SpeechPlan
    archives: Mapping[str, Path]
    tokenizer: Any
    device: str = "cpu"

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> SpeakingModel:
        """Open an export folder.

        Args:
            folder: made by `t2n-llm export --task text-to-audio`.
            device: what tract computes on: "cpu", "cuda" or "metal".

        Raises:
            OptionError: an unknown device.
            ArchiveError: it is no export folder, or of another task.
            MissingTokenizerError: it carries no tokenizer.
        """
        check_device(device)
        manifest = read_manifest(folder)
        require_said(folder, manifest, _SAID)
        return SpeakingModel(
            folder=folder,
            plan=SpeechPlan.of_record(manifest["speech"]),  # type: ignore[arg-type]
            archives={role: folder / part["archive"] for role, part in manifest["archives"].items()},
            tokenizer=load_tokenizer(folder),
            device=device,
        )

    def spoken(self, text: str, *, speaker: str | None = None, seed: int = 0) -> np.ndarray:
        """Return the waveform f32 [samples] of a text, at `plan.sampling_rate`.

        Args:
            text: what is said.
            speaker: number of a speaker, an .npy file with a vector or vectors, or a WAV file with a voice, if the export has an
                archive for it; None for the first speaker.
            seed: of the noise; the same seed gives the same waveform.

        Raises:
            OptionError: the text is empty or too long, or there is no such speaker.
            EngineError: the engine failed.
        """
        numbered = self.plan.template is not None and self.plan.template.numbered
        ids, words = self._read(text, speaker if numbered else None)
        most = self.plan.most_tokens
        if not ids.size:
            raise OptionError("the text has no tokens.", "Use a text with letters that the model knows.")
        if most is not None and ids.size > most:
            raise OptionError(
                f"the text has {ids.size} tokens, and the model reads at most {most}.", "Speak one sentence at a time."
            )
        with open_speech(self.archives, self.plan, EngineOptions(device=self.device)) as model:
            voice = self._voice(model, None if numbered else speaker)
            waveform: np.ndarray = model.spoken(ids, voice, Draws(seed), words=words)[WAVEFORM][0]
        return waveform

    def _voice(self, model: SpeechModel, speaker: str | None) -> np.ndarray | None:
        frame = self.plan.speaker.frame if self.plan.speaker is not None else None
        if frame is None or speaker is None or not speaker.lower().endswith(_SOUND):
            return voice_of(self.plan.speaker, speaker)
        (voice,) = model.heard(self._recording(speaker, frame)).values()
        return voice

    def _recording(self, file: str, frame: int) -> np.ndarray:
        """Return a recording f32 [1, V, frame] as transformers' processor prepares it: it ends on a short pause."""
        from transformers import PocketTTSFeatureExtractor

        rate = self.plan.sampling_rate
        prepare = PocketTTSFeatureExtractor(sampling_rate=rate, frame_size=frame, pad_to_multiple_of=frame)
        made = prepare(read_waveform(file, rate), sampling_rate=rate)["input_values"]
        return np.asarray(made, np.float32).reshape(1, -1, frame)

    def _read(self, text: str, speaker: str | None) -> tuple[np.ndarray, int]:
        """Return the tokens i64 [1, S] of a text, and how many words it has."""
        template = self.plan.template
        if speaker is not None and not speaker.isdecimal():
            raise OptionError(
                f"--speaker {speaker}: the speakers of this model are numbers.", "Use a number, such as 0."
            )
        if template is None or not getattr(self.tokenizer, "chat_template", None):
            return np.array([self.tokenizer(text)["input_ids"]], np.int64), len(text.split())
        message = {"role": speaker or template.role, "content": [{"type": "text", "text": text}]}
        written = ChatTemplate.of(self.tokenizer, self.folder).written([message])
        ids = [token for token in written.ids if token not in template.left_out]
        return np.array([ids], np.int64), len(self.tokenizer.decode(ids, skip_special_tokens=True).split())


def voice_of(speaker: Speaker | None, given: str | None) -> np.ndarray | None:
    """Return the input that says whose voice it is; None for a model with one voice.

    Args:
        speaker: what the model takes.
        given: a number, or an .npy file.

    Raises:
        OptionError: the model takes none, another kind, or there is no such speaker.
    """
    if speaker is None:
        if given is not None:
            raise OptionError("the model has one voice.", "Omit --speaker.")
        return None
    if speaker.width is not None:
        return _vectors(speaker.width, given, rows=speaker.rows, recorded=speaker.frame is not None)
    count = speaker.count or 1
    number = int(given) if given is not None and given.isdecimal() else 0 if given is None else -1
    if not 0 <= number < count:
        raise OptionError(f"--speaker {given}: the model has {count} speakers.", f"Use a number from 0 to {count - 1}.")
    return np.array([number], np.int64)


def _vectors(width: int, given: str | None, *, rows: bool, recorded: bool) -> np.ndarray:
    """Return a vector f32 [1, width], or [1, V, width] with rows."""
    wanted = f"rows of {width} floats" if rows else f"{width} floats"
    example = (
        "the latents that the model's audio tokenizer makes of a voice"
        if rows
        else "an x-vector of the model's data set"
    )
    hint = (
        f"Pass --speaker FILE.npy with {wanted}, such as {example}{'; or a recording, FILE.wav' if recorded else ''}."
    )
    if given is None:
        raise OptionError("the model speaks with the voice of a file, and none was given.", hint)
    try:
        vector = np.load(given, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"--speaker {given}: cannot be read as an .npy file.", hint) from error
    fits = isinstance(vector, np.ndarray) and vector.size > 0 and vector.dtype.kind == "f"
    if not fits or (vector.shape[-1] != width if rows else vector.size != width):
        raise OptionError(f"--speaker {given}: it does not hold {wanted}.", hint)
    return vector.astype(np.float32).reshape(1, *((-1,) if rows else ()), width)


__all__ = ["SpeakingModel", "voice_of"]
