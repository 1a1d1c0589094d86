"""Text of a source: a text to translate, a recording, a picture, through the archives of an encoder-decoder in tract.

In: an export folder and a source. Out: pieces of text as they are decided. The tokenizer is Python's; so are features of sound and
pixels where the export has no front end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.measure import check_device
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.answers import Answerer, WheelAnswerer
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.folder import MANIFEST_NAME, read_manifest
from t2n_llm.measure.beams import best_text
from t2n_llm.measure.generate import Sampling, choose_token, text_pieces
from t2n_llm.measure.sources.picture import read_image
from t2n_llm.measure.sources.sound import read_waveform
from t2n_llm.measure.token_rules import TokenRules, languages_of
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.frontends.frontend import FRONTEND
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION, TEXT_TO_TEXT, recorded_task
from t2n_llm.tasks.seq2seq.model import DECODER, ENCODER
from t2n_llm.tasks.seq2seq.running import EncoderArchive

TASKS_WITH_SOURCES = (TEXT_TO_TEXT, SPEECH_RECOGNITION, IMAGE_TO_TEXT)
_SETTINGS = ("config.json", "generation_config.json")  # the second one has the last word
_WAVEFORM = "waveform"
_LEAST_SECONDS = 0.1  # of a window's end: what is shorter is not heard again


def makes_text_of_sources(folder: Path) -> bool:
    """Say whether an export folder is an encoder-decoder's."""
    return (folder / MANIFEST_NAME).is_file() and recorded_task(read_manifest(folder)) in TASKS_WITH_SOURCES


@dataclass(frozen=True)
class Wishes:
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
        source: the encoder's first input, and its shape.
        frontend: what `export.json` says of the front end; None where there is none.
        gives_states: whether the decoder is given its cache; else the engine keeps it.
        device: what tract computes on.
    """

    folder: Path
    task: str
    archives: Mapping[str, Path]
    tokenizer: Any
    settings: Mapping[str, Any]
    rules: TokenRules
    source: tuple[str, Sequence[int | str]]
    frontend: Mapping[str, Any] | None
    gives_states: bool = True
    device: str = "cpu"

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> SourceModel:
        """Open an export folder.

        Args:
            folder: made by `t2n-llm export`, for one of `TASKS_WITH_SOURCES`.
            device: what tract computes on: "cpu", "cuda" or "metal".

        Raises:
            OptionError: an unknown device.
            ArchiveError: it is no export folder.
            MissingTokenizerError: it carries no tokenizer.
        """
        check_device(device)
        manifest = read_manifest(folder)
        connection = manifest["encoder_decoder"]
        settings: dict[str, Any] = {}
        for name in _SETTINGS:
            if (folder / name).is_file():
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
        name, described = next(iter(connection["source"].items()))
        return SourceModel(
            folder=folder,
            task=recorded_task(manifest),
            archives={role: folder / part["archive"] for role, part in manifest["parts"].items()},
            tokenizer=load_tokenizer(folder),
            settings=settings,
            rules=TokenRules.of(settings, int(connection["decoder_start_token_id"])),
            source=(name, described["shape"]),
            frontend=manifest.get(FRONTEND),
            gives_states=bool(manifest["graph"]["states"]),
            device=device,
        )

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sound that the model hears.

        Raises:
            OptionError: nothing says so.
        """
        if self.frontend is not None:
            return int(self.frontend["sampling_rate"])
        path = self.folder / "preprocessor_config.json"
        rate = json.loads(path.read_text(encoding="utf-8")).get("sampling_rate") if path.is_file() else None
        if rate is None:
            raise OptionError(
                f"{self.folder} does not say what sound its model hears.",
                "Export a checkpoint with its preprocessor_config.json.",
            )
        return int(rate)

    def text_of(
        self, wishes: Wishes, *, text: str | None = None, audio: Path | None = None, image: Path | None = None
    ) -> Iterator[str]:
        """Yield pieces of the text that is made of a source, as they are decided.

        Args:
            wishes: what is asked for.
            text, audio, image: the source; the one that the model's task is about.

        Raises:
            OptionError: there is no such source, or the model reads another kind.
            EngineError: the engine failed.
        """
        given = {TEXT_TO_TEXT: text, SPEECH_RECOGNITION: audio, IMAGE_TO_TEXT: image}
        if given[self.task] is None or sum(each is not None for each in given.values()) != 1:
            wanted = {TEXT_TO_TEXT: "a text", SPEECH_RECOGNITION: "--audio FILE.wav", IMAGE_TO_TEXT: "--image FILE"}
            raise OptionError(
                f"{self.folder} was exported for {self.task}.", f"Give {wanted[self.task]}, and nothing else."
            )
        with _Running(self) as running:
            if text is not None:
                yield from running.translated(text, wishes)
            elif audio is not None:
                yield from running.heard(read_waveform(audio, self.sampling_rate), wishes)
            elif image is not None:
                yield from running.seen(image, wishes)


class _Running:
    """The archives in the engine."""

    def __init__(self, model: SourceModel) -> None:
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> _Running:
        model, engine = self._model, TractWheel(device=self._model.device)
        self._encoder = self._stack.enter_context(engine.load(model.archives[ENCODER]))
        self._decoder = self._stack.enter_context(WheelRunner(model.archives[DECODER], engine))
        self._front: Answerer | None = None
        if model.frontend is not None:
            loaded = self._stack.enter_context(TractWheel().load(model.archives[FRONTEND]))
            self._front = WheelAnswerer(TractWheel(), loaded)
        names = [tuple(fact.name for fact in facts) for facts in (self._encoder.inputs, self._encoder.outputs)]
        self._reader = EncoderArchive(WheelAnswerer(engine, self._encoder), *names)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- sources ---

    def translated(self, text: str, wishes: Wishes) -> Iterator[str]:
        """Yield the text made of a text."""
        ids = [int(token) for token in self._model.tokenizer(text)["input_ids"]]
        if not ids:
            raise OptionError("the text has no token.", "Give some text.")
        told = self._reader.read({self._model.source[0]: np.array([ids], np.int64)})
        yield from self._text(told, self._model.rules, wishes)

    def seen(self, path: Path, wishes: Wishes) -> Iterator[str]:
        """Yield the text made of a picture."""
        told = self._reader.read({self._model.source[0]: self._pixels(path)})
        yield from self._text(told, self._model.rules, wishes)

    def heard(self, waveform: np.ndarray, wishes: Wishes) -> Iterator[str]:
        """Yield the text of a recording, window after window where the model hears windows of one length."""
        window = self._window()
        at = 0
        while at < len(waveform):
            piece = waveform[at:] if window is None else waveform[at : at + window]
            whole = window is None or at + window >= len(waveform)
            said: list[int] = []
            told = self._reader.read({self._model.source[0]: self._features(piece)})
            rules = self._rules(told, wishes, timestamps=wishes.timestamps or not whole)
            tokens = _noted(self._tokens(told, rules, wishes), said)
            yield from text_pieces(self._shown(rules, wishes, at), tokens)
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
        until = int(times.seconds(told[-1]) * self._model.sampling_rate)
        return until if until > _LEAST_SECONDS * self._model.sampling_rate else samples

    def _window(self) -> int | None:
        """Return how many samples the model hears at once; None for as many as there are."""
        if "T" in self._model.source[1]:
            return None
        front = self._model.frontend
        if front is not None and "samples" in front:
            return int(front["samples"])
        return 30 * self._model.sampling_rate

    def _features(self, waveform: np.ndarray) -> np.ndarray:
        if self._front is not None:
            return self._front.answer([waveform[None].astype(np.float32)])[0]
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(self._model.folder)
        made = extractor(waveform, sampling_rate=self._model.sampling_rate, return_tensors="np")
        return np.asarray(made[self._model.source[0]], np.float32)

    def _pixels(self, path: Path) -> np.ndarray:
        front, described = self._front, self._model.frontend
        if front is not None and described is not None:
            size = described.get("size")
            return front.answer([read_image(path, tuple(size) if size else None)[None]])[0]
        from transformers import AutoImageProcessor

        made = AutoImageProcessor.from_pretrained(self._model.folder)(read_image(path), return_tensors="np")
        return np.asarray(made[self._model.source[0]], np.float32)

    # --- tokens ---

    def _rules(self, told: Mapping[str, np.ndarray], wishes: Wishes, *, timestamps: bool) -> TokenRules:
        model = self._model
        can_tell = model.settings.get("no_timestamps_token_id") is not None
        languages = languages_of(model.settings)
        language = wishes.language
        if language is None and languages:
            logits = self._decoder.about(told).open_session().run([np.array([model.rules.start[:1]], np.int64)])[0]
            language = max(languages, key=lambda name: float(logits[0, -1, languages[name]]))
        wanted = timestamps if can_tell else wishes.timestamps
        return model.rules.told(model.settings, language, wishes.purpose, timestamps=wanted)

    def _shown(self, rules: TokenRules, wishes: Wishes, at: int) -> _Shown:
        return _Shown(self._model.tokenizer, rules, wishes.timestamps, at / self._model.sampling_rate)

    def _text(self, told: Mapping[str, np.ndarray], rules: TokenRules, wishes: Wishes) -> Iterator[str]:
        tokenizer = self._model.tokenizer
        yield from text_pieces(partial(tokenizer.decode, skip_special_tokens=True), self._tokens(told, rules, wishes))

    def _tokens(self, told: Mapping[str, np.ndarray], rules: TokenRules, wishes: Wishes) -> Iterator[int]:
        own = rules.beams if self._model.gives_states else 1
        beams = own if wishes.beams is None else wishes.beams
        if beams > 1 and wishes.sampling.temperature == 0:
            session, states = self._decoder.about(told).open_explicit()
            yield from best_text(session, states, rules, beams, wishes.max_new_tokens)
            return
        session = self._decoder.about(told).open_session()
        random = np.random.default_rng(wishes.sampling.seed)
        said: list[int] = []
        pending: Sequence[int] = rules.start
        for _ in range(wishes.max_new_tokens):
            logits = session.run([np.array([pending], np.int64)])[0][0, -1]
            token = choose_token(rules.applied(logits, said), wishes.sampling, random)
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


__all__ = ["TASKS_WITH_SOURCES", "SourceModel", "Wishes", "makes_text_of_sources"]
