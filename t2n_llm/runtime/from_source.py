"""Text of a source: a text to translate, a recording, a picture, through the archives of an encoder-decoder in tract.

In: an export folder and a source. Out: pieces of text as they are decided. The tokenizer is Python's; so are features of sound and
pixels where the export has no front end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from generic_export.devices import check_device
from generic_export.errors import ArchiveError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.archive_sessions import WheelArchiveSession
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.manifest_form import require_said
from t2n_llm.runtime.beams import best_text
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.runtime.sampling.rules import Said
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.runtime.sampling.text import text_pieces, until_stop
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.media.encoder_input import EncoderInput
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION, TEXT_TO_TEXT, recorded_task
from t2n_llm.tasks.seq2seq.model import DECODER, ENCODER
from t2n_llm.tasks.seq2seq.running import EncoderArchive
from t2n_llm.tasks.seq2seq.sources import LENGTH
from t2n_llm.tasks.seq2seq.token_rules import TokenRules, languages_of

_IDS = "input_ids"
_PARTS = (f"archives.{ENCODER}", f"archives.{DECODER}")
_WINDOW_SECONDS = 30  # where no front end says: Whisper's
_LEAST_SECONDS = 0.1  # of a window's end: what is shorter is not heard again


@dataclass(frozen=True)
class GenerationOptions:
    """What a user asks for beside the source.

    Attributes:
        max_new_tokens: most tokens of a text, or of a window of sound.
        sampling: how the next token is chosen.
        beams: texts that are followed at a time, without sampling; None for what the model's own settings say, or one text where
            the engine keeps the cache.
        language, purpose, timestamps: see `TokenRules.told`.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    beams: int | None = None
    language: str | None = None
    purpose: str | None = None
    timestamps: bool = False

    @property
    def about_speech(self) -> bool:
        """Whether something is asked that only speech has."""
        return self.language is not None or self.purpose is not None or self.timestamps


@dataclass(frozen=True)
class SourceModel:
    """An export folder of an encoder-decoder.

    Attributes:
        folder: it.
        task: what it was exported for.
        archives: by role.
        tokenizer: of the decoder; the encoder's too where that reads text.
        settings: of generation, by transformers' names.
        rules: which token may come next.
        sources: the encoder's inputs, and their shapes.
        senses: how the one comes to be that is no text.
        gives_states: whether the decoder is given its cache; else the engine keeps it.
        device: what tract computes on.
    """

    folder: Path
    task: str
    archives: Mapping[str, Path]
    tokenizer: Any
    settings: Mapping[str, Any]
    rules: TokenRules
    sources: Mapping[str, Sequence[int | str]]
    senses: EncoderInput
    gives_states: bool = True
    device: str = "cpu"

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> SourceModel:
        """Open an export folder.

        Args:
            folder: made by `t2n-llm export`, for one of `tasks.names.WITH_SOURCES`.
            device: what tract computes on: "cpu", "cuda" or "metal".

        Raises:
            OptionError: an unknown device.
            ArchiveError: it is no export folder.
            MissingTokenizerError: it carries no tokenizer.
        """
        check_device(device)
        manifest = read_manifest(folder)
        require_said(
            folder, manifest, ["encoder_decoder.encoder_inputs", "encoder_decoder.decoder_start_token_id", *_PARTS]
        )
        connection = manifest["encoder_decoder"]
        settings = generation_settings(folder)
        sources = {name: each["shape"] for name, each in connection["encoder_inputs"].items()}
        sensed = next((name for name in sources if name != _IDS), _IDS)
        return SourceModel(
            folder=folder,
            task=recorded_task(manifest),
            archives={role: folder / part["archive"] for role, part in manifest["archives"].items()},
            tokenizer=load_tokenizer(folder),
            settings=settings,
            rules=TokenRules.of(settings, connection["decoder_start_token_id"]),
            sources=sources,
            senses=EncoderInput.of(folder, manifest, sensed),
            gives_states=bool(manifest["graph"].get("states")),
            device=device,
        )

    def text_of(
        self,
        options: GenerationOptions,
        *,
        text: str | None = None,
        audio: Path | None = None,
        image: Path | None = None,
    ) -> Iterator[str]:
        """Yield pieces of the text that is made of a source, as they are decided.

        Args:
            options: what is asked for.
            text, audio, image: the source; the one that the model's task is about.

        Raises:
            OptionError: there is no such source, or the model reads another kind.
            EngineError: the engine failed.
        """
        self._refuse(options, {"a text": text, "--audio FILE.wav": audio, "--image FILE": image})
        choice = options.sampling.choice(self.settings)
        model = replace(self, rules=replace(self.rules, rules=choice.rules))
        with _Running(model, replace(choice, rules=())) as running:
            if audio is not None:
                pieces = running.transcribe(self.senses.waveform(audio), options)
            else:
                pieces = running.generate_for(text, image, options)
            yield from until_stop(pieces, choice.stops, lambda stop: None)

    def _refuse(self, options: GenerationOptions, given: Mapping[str, object]) -> None:
        """Refuse a source that the model does not read, one too few, and options that it has no meaning for."""
        made = {TEXT_TO_TEXT: "a text", SPEECH_RECOGNITION: "--audio FILE.wav", IMAGE_TO_TEXT: "--image FILE"}
        others = [name for name in self.sources if name not in (_IDS, self.senses.name)]
        if others:
            raise OptionError(
                f"{self.folder}: its encoder also needs {others[0]!r}, which generate does not provide.",
                "Run the archives from your own program; export.json lists their inputs.",
            )
        wanted = [made[self.task], *(["a text"] if self.task != TEXT_TO_TEXT and _IDS in self.sources else [])]
        if {kind for kind, value in given.items() if value is not None} != set(wanted):
            raise OptionError(f"{self.folder} was exported for {self.task}.", f"It takes {' and '.join(wanted)} only.")
        if self.task != SPEECH_RECOGNITION and options.about_speech:
            raise OptionError(
                f"{self.folder} does not transcribe speech.", "Omit --language, --translate and --timestamps."
            )


class _Running:
    """The archives in the engine, and how a token is chosen of what the model's rules leave."""

    def __init__(self, model: SourceModel, choice: TokenChoice) -> None:
        self._model, self._choice = model, choice
        self._stack = ExitStack()

    def __enter__(self) -> _Running:
        model, engine = self._model, TractWheel(device=self._model.device)
        self._encoder = self._stack.enter_context(engine.load(model.archives[ENCODER]))
        self._decoder = self._stack.enter_context(WheelRunner(model.archives[DECODER], engine))
        self._senses = self._stack.enter_context(model.senses.opened())
        self._reader = EncoderArchive.of(model.archives[ENCODER], WheelArchiveSession(engine, self._encoder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- sources ---

    def generate_for(self, text: str | None, image: Path | None, options: GenerationOptions) -> Iterator[str]:
        """Yield the text made of a text, of a picture, or of both."""
        given: dict[str, np.ndarray] = {}
        if text is not None:
            given[_IDS] = np.array([self._model.tokenizer(text)["input_ids"]], np.int64)
            if not given[_IDS].size:
                raise OptionError("the text has no tokens.", "Use a text with at least one token.")
        if image is not None:
            given[self._model.senses.name] = self._senses.from_image(image)
        decode = partial(self._model.tokenizer.decode, skip_special_tokens=True)
        yield from text_pieces(decode, self._tokens(self._reader.read(given), self._model.rules, options))

    def transcribe(self, waveform: np.ndarray, options: GenerationOptions) -> Iterator[str]:
        """Yield the text of a recording, window after window where the model hears windows of one length."""
        window = self._window()
        at = 0
        while at < len(waveform):
            piece = waveform[at:] if window is None else waveform[at : at + window]
            whole = window is None or at + window >= len(waveform)
            said: list[int] = []
            told = self._reader.read({self._model.senses.name: self._senses.from_waveform(piece)})
            rules = self._rules(told, options, timestamps=options.timestamps or not whole)
            tokens = _noted(self._tokens(told, rules, options), said)
            yield from text_pieces(self._shown(rules, options, at), tokens)
            at += len(piece) if whole else self._heard_until(rules, said, len(piece))

    def _heard_until(self, rules: TokenRules, said: Sequence[int], samples: int) -> int:
        """Return where the next window begins: after what was said to its end, at the last time that was told."""
        times = rules.timestamps
        if times is None:
            return samples
        told = [token for token in said if token >= times.begin]
        open_end = not said or said[-1] < times.begin  # the last sentence is cut off: heard again from where it began
        if len(told) < 2 or (open_end and len(told) < 3):
            return samples
        until = int(times.seconds(told[-1]) * self._model.senses.sampling_rate)
        return until if until > _LEAST_SECONDS * self._model.senses.sampling_rate else samples

    def _window(self) -> int | None:
        """Return how many samples the model hears at once; None for as many as there are."""
        senses = self._model.senses
        if LENGTH in self._model.sources[senses.name]:
            return None
        return senses.samples or _WINDOW_SECONDS * senses.sampling_rate

    # --- tokens ---

    def _rules(self, told: Mapping[str, np.ndarray], options: GenerationOptions, *, timestamps: bool) -> TokenRules:
        model = self._model
        can_tell = model.settings.get("no_timestamps_token_id") is not None
        languages = languages_of(model.settings)
        language = options.language
        if language is None and languages:
            logits = self._decoder.about(told).open_session().run([np.array([model.rules.start[:1]], np.int64)])[0]
            language = max(languages, key=lambda name: float(logits[0, -1, languages[name]]))
        wanted = timestamps if can_tell else options.timestamps
        return model.rules.told(model.settings, language, options.purpose, timestamps=wanted)

    def _shown(self, rules: TokenRules, options: GenerationOptions, at: int) -> _Shown:
        return _Shown(self._model.tokenizer, rules, options.timestamps, at / self._model.senses.sampling_rate)

    def _tokens(self, told: Mapping[str, np.ndarray], rules: TokenRules, options: GenerationOptions) -> Iterator[int]:
        own = rules.beams if self._model.gives_states else 1
        beams = own if options.beams is None else options.beams
        if beams > 1 and not self._choice.samples:
            session, states = self._decoder.about(told).open_explicit()
            yield from best_text(session, states, rules, beams, options.max_new_tokens)
            return
        session = self._decoder.about(told).open_session()
        random = self._choice.random()
        said: list[int] = []
        pending: Sequence[int] = rules.start
        for _ in range(options.max_new_tokens):
            logits = session.run([np.array([pending], np.int64)])[0][0, -1]
            whole = Said((*rules.start, *said), len(rules.start))
            token = self._choice.next_token(rules.applied(logits, said), whole, random)
            if token in rules.ends:
                return
            yield token
            said.append(token)
            pending = [token]


@dataclass(frozen=True)
class _Shown:
    """Makes tokens text, times among them where they are wanted.

    Attributes:
        tokenizer: of the model.
        rules: of the window.
        timestamps: whether times are shown.
        start: of the window in the recording, in seconds.
    """

    tokenizer: Any
    rules: TokenRules
    timestamps: bool
    start: float

    def __call__(self, tokens: Sequence[int]) -> str:
        times = self.rules.timestamps
        if times is None:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        text, plain = "", list[int]()
        for token in tokens:
            if token < times.begin:
                plain.append(token)
                continue
            text += self.tokenizer.decode(plain, skip_special_tokens=True)
            second = f"[{self.start + times.seconds(token):.2f}]"
            text += (f" {second}\n" if plain else second) if self.timestamps else ""  # after words a sentence ends
            plain = []
        return text + str(self.tokenizer.decode(plain, skip_special_tokens=True))


def _noted(tokens: Iterator[int], said: list[int]) -> Iterator[int]:
    """Pass tokens on, and note them."""
    for token in tokens:
        said.append(token)
        yield token


def text_of_frames(folder: Path, recording: Path, *, device: str = "cpu") -> str:
    """Return the text of a recording.

    Args:
        folder: made by `t2n-llm export --task ctc`.
        recording: a WAV file.
        device: what tract computes on: "cpu", "cuda" or "metal".

    Raises:
        OptionError: the recording cannot be read, an unknown device, or nothing says what sound the model hears.
        MissingTokenizerError: the folder carries no tokenizer.
        EngineError: the engine failed.
    """
    check_device(device)
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder)
    require_said(folder, manifest, ["graph.inputs"])
    if not manifest["graph"]["inputs"]:
        raise ArchiveError(f"{folder}: its export.json lists no input.", "Export the model again.")
    senses, engine = EncoderInput.of(folder, manifest, manifest["graph"]["inputs"][0]), TractWheel(device=device)
    waveform = senses.waveform(recording)
    with senses.opened() as reader, engine.load(archive_in(folder, manifest)) as model:
        (logits,) = WheelArchiveSession(engine, model).answer([reader.from_waveform(waveform)])
    return spoken(logits[0].argmax(-1).tolist(), tokenizer)


def spoken(tokens: Sequence[int], tokenizer: Any) -> str:
    """Return the text of the best token of each frame.

    Args:
        tokens: one a frame.
        tokenizer: of the model; its padding token is the blank.
    """
    said = [token for token, _ in groupby(tokens) if token != tokenizer.pad_token_id]
    # Letters that a blank stood between stay two: a tokenizer that joins repeats must not do so again.
    apart = {"group_tokens": False} if hasattr(tokenizer, "word_delimiter_token") else {}
    return str(tokenizer.decode(said, skip_special_tokens=True, **apart))


__all__ = ["GenerationOptions", "SourceModel", "spoken", "text_of_frames"]
