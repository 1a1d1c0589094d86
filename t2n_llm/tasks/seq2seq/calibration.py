"""What an encoder-decoder is calibrated on: texts, recordings or pictures, and what is said of them.

In: what `--calibration` names. Out: the model in f32, and passes over it: a source through the encoder, then all tokens of its text
through the decoder at once (teacher forcing). Where nobody gives a text, it is the one that the model itself makes, token by
token the most likely one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import OptionError
from generic_export.interrupts import asking
from t2n_llm.compress.text import AUTO, BUILTIN, builtin_text, read_text
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.source.empty_model import ModelKind
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.media.encoder_input import EncoderInput, EncoderInputReader
from t2n_llm.tasks.media.sound import read_waveform
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION, TEXT_TO_TEXT
from t2n_llm.tasks.seq2seq.adapters import read_source, run_decoder
from t2n_llm.tasks.seq2seq.listener import Listener
from t2n_llm.tasks.seq2seq.model import first_token
from t2n_llm.tasks.seq2seq.sources import SourceForm
from t2n_llm.tasks.seq2seq.token_rules import TokenRules, languages_of
from t2n_llm.weights.f32_model import eager_model
from t2n_llm.weights.placement import require_memory

MOST_SOURCES = 64
_LONGEST_SOURCE = 256  # tokens
_LONGEST_TEXT = 128
_WINDOW_SECONDS = 30  # of a recording, where the model does not say how much it hears at once
_LEAST_SECONDS = 0.1  # of what is left of a recording
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class _Data:
    """What a task is calibrated on.

    Attributes:
        noun: of several.
        suffixes: of its files; none for texts.
        hint: what to give.
    """

    noun: str
    suffixes: tuple[str, ...]
    hint: str


_LISTS = "a folder of them, one of them, or a list: one path per line, optionally followed by a tab and its text"
_DATA: Mapping[str, _Data] = {
    TEXT_TO_TEXT: _Data(
        "texts",
        (),
        "Use --calibration builtin, or a file: one text per line, optionally followed by a tab and the "
        "expected output.",
    ),
    SPEECH_RECOGNITION: _Data("recordings", (".wav",), f"Use --calibration with WAV files: {_LISTS}."),
    IMAGE_TO_TEXT: _Data(
        "pictures",
        (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"),
        f"Use --calibration with images: {_LISTS}.",
    ),
}


@dataclass(frozen=True)
class Example:
    """A source, and what is said of it.

    Attributes:
        source: a text, or the path of a file.
        text: None where nobody says.
    """

    source: str
    text: str | None = None


@dataclass(frozen=True)
class TaughtPass:
    """One source and the text made of it, without caches.

    Attributes:
        given: the source, as arguments of the model's forward.
        tokens: int64 [1, S] that the decoder reads.
    """

    given: Mapping[str, torch.Tensor]
    tokens: torch.Tensor

    def __call__(self, network: Any) -> torch.Tensor:
        """Return the logits [1, S, vocab]."""
        read = read_source(network, self.given)
        logits: torch.Tensor = run_decoder(network, read, self.tokens, use_cache=False, **self.given).logits
        return logits


def examples(task: str, data: str) -> list[Example]:
    """Return what a task is calibrated on.

    Args:
        task: of `tasks.names.WITH_SOURCES`.
        data: `builtin` (texts only), or a path: see `--calibration`.

    Raises:
        OptionError: there is nothing of that kind.
    """
    kind = _DATA[task]
    if data == AUTO:
        raise OptionError(
            f"--calibration auto lets a language model write a text; --task {task} needs inputs.", kind.hint
        )
    if data == BUILTIN:
        if kind.suffixes:
            raise OptionError(f"--task {task} is calibrated on {kind.noun}; t2n-llm includes none.", kind.hint)
        return [Example(" ".join(part.split())) for part in builtin_text().split("\n\n") if part.strip()]
    path = Path(data)
    if not path.exists():
        raise OptionError(f"calibration data {path}: no such file.", kind.hint)
    found = list(_files(path, kind)) if kind.suffixes else list(_lines(path, kind))
    if not found:
        raise OptionError(f"calibration data {path}: it contains no {kind.noun}.", kind.hint)
    return found


def _files(path: Path, kind: _Data) -> Iterator[Example]:
    if path.is_dir():
        yield from (Example(str(each)) for each in sorted(path.rglob("*")) if each.suffix.lower() in kind.suffixes)
    elif path.suffix.lower() in kind.suffixes:
        yield Example(str(path))
    else:
        for each in _lines(path, kind):
            file = path.parent / each.source
            if not file.is_file():
                raise OptionError(f"calibration data {path}: no such file as {each.source!r}.", kind.hint)
            yield Example(str(file), each.text)


def _lines(path: Path, kind: _Data) -> Iterator[Example]:
    if path.is_dir():
        raise OptionError(f"calibration data {path}: it is a folder.", kind.hint)
    for line in read_text(path, "calibration data", kind.hint).splitlines():
        source, _, text = line.partition("\t")
        if source.strip():
            yield Example(source.strip(), text.strip() or None)


def _spread(found: Sequence[Example]) -> list[Example]:
    """Return at most so many, evenly spread."""
    count = min(MOST_SOURCES, len(found))
    return [found[index * len(found) // count] for index in range(count)]


# --- passes -----------------------------------------------------------------------------------------


def prepared(
    task: str, kind: ModelKind, source: ModelSource, form: SourceForm, network: Any, data: str
) -> tuple[Any, list[TaughtPass]]:
    """Return a model in f32, and passes over it.

    Args:
        task: of `tasks.names.WITH_SOURCES`.
        kind: which of transformers' classes the model is.
        source: it.
        form: how sources enter its encoder.
        network: the same without weights.
        data: see `examples`.

    Raises:
        OptionError: the data cannot be read, or the encoder reads something else too.
        MissingTokenizerError: texts are given and the model has no tokenizer.
        NotEnoughMemoryError: the model does not fit.
    """
    if len(form.inputs) > 1:
        raise OptionError(
            f"{source.name}: its encoder also needs {form.inputs[1].name!r}, which calibration data does not contain.",
            "Use an algorithm without calibration, such as --compress q4_0.",
        )
    found = _spread(examples(task, data))
    require_memory(network, None)
    model, _ = eager_model(kind, source.folder, source.trust_remote_code)
    teacher = _Teacher(model.requires_grad_(False), source, form.inputs[0].name)
    with torch.no_grad():
        return model, [taught for example in asking(found) for taught in teacher.passes(task, example)]


class _Teacher:
    """Makes passes of examples."""

    def __init__(self, model: Any, source: ModelSource, name: str) -> None:
        self._model = model
        self._source = source
        self._name = name
        self._settings = generation_settings(source.folder)
        self._rules = TokenRules.of(self._settings, first_token(source.config))
        self._senses = EncoderInputReader(EncoderInput(source.folder, name), None)

    def passes(self, task: str, example: Example) -> Iterator[TaughtPass]:
        """Yield those of an example: one, or as many as a recording has windows that the model hears at once."""
        if task == TEXT_TO_TEXT:
            yield self._taught(self._ids(example.source), example.text)
        elif task == IMAGE_TO_TEXT:
            yield self._taught(self._senses.from_image(Path(example.source)), example.text)
        else:
            windows = self._windows(Path(example.source))
            text = example.text if len(windows) == 1 else None  # which words are in which window nobody says
            for window in windows:
                yield self._taught(self._senses.from_waveform(window), text)

    def _ids(self, text: str) -> np.ndarray:
        limit = min(_LONGEST_SOURCE, self._positions(_LONGEST_SOURCE))
        return np.array([self._source.tokenizer()(text, truncation=True, max_length=limit)["input_ids"]], np.int64)

    def _windows(self, path: Path) -> list[np.ndarray]:
        senses = self._senses.senses
        rate = senses.sampling_rate
        waveform = read_waveform(path, rate)
        window = senses.samples or _WINDOW_SECONDS * rate
        pieces = [waveform[at : at + window] for at in range(0, len(waveform), window)]
        return [piece for piece in pieces if len(piece) >= _LEAST_SECONDS * rate] or pieces[:1]

    def _taught(self, read: np.ndarray, text: str | None) -> TaughtPass:
        given = {self._name: torch.from_numpy(read)}
        tokens = self._said({self._name: read}) if text is None else self._labels(text)
        return TaughtPass(given, torch.tensor([tokens[:-1] or tokens], dtype=torch.int64))

    def _labels(self, text: str) -> list[int]:
        """Return the tokens of a text after those that a text starts with, its end last."""
        start = list(self._rules.start)
        labels = list(self._source.tokenizer()(text_target=text)["input_ids"])
        whole = labels if labels[: len(start)] == start else [*start, *labels]
        return whole[: self._positions(_LONGEST_TEXT)]

    def _said(self, read: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens of the text that the model makes of a source."""
        listener = Listener(self._model, read)
        rules = self._rules.told(self._settings, self._language(read), None, timestamps=False)
        for token in rules.start[:-1]:  # one at a time, as some decoders want them
            listener.answer([token])
        said: list[int] = []
        pending = rules.start[-1]
        for _ in range(self._positions(_LONGEST_TEXT) - len(rules.start)):
            pending = int(rules.applied(listener.answer([pending])[-1], said).argmax())
            said.append(pending)
            if pending in rules.ends:
                break
        return [*rules.start, *said]

    def _language(self, read: Mapping[str, np.ndarray]) -> str | None:
        """Return the language that the model hears; None where it is not asked."""
        languages = languages_of(self._settings)
        if not languages:
            return None
        row = Listener(self._model, read).answer(self._rules.start[:1])[-1]
        return max(languages, key=lambda name: float(row[languages[name]]))

    def _positions(self, wanted: int) -> int:
        """Return so many positions, or as many as the model has."""
        config = self._source.config.get_text_config(decoder=True)
        limits = [getattr(config, name, None) for name in _POSITIONS]
        return min([wanted, *(limit for limit in limits if isinstance(limit, int) and limit > 1)])


__all__ = ["MOST_SOURCES", "Example", "TaughtPass", "examples", "prepared"]
