"""What a family of speech models is: parts to capture, the plan that connects them, and transformers' own answer.

In: a transformers config and a vocoder. Out: `SpeechPart`s, and an `Utterance` of PyTorch. One file a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from generic_export.errors import OptionError
from kvcache.states.tensors import Slot, StateTensor
from t2n_llm.source.empty_model import ModelKind, instantiate
from t2n_llm.source.vocoder import HIFI_GANS, Vocoder
from t2n_llm.tasks.speech.arrays import Draws, given_to
from t2n_llm.tasks.speech.plan import IDS, LENGTH, SPECTROGRAM, TOKENS, WAVEFORM, SpeechPlan
from t2n_llm.weights.f32_model import eager_model, refuse_invented

TO_WAVEFORM = ModelKind("AutoModelForTextToWaveform", "text-to-audio model", "Choose another --task")
_FIRST_TOKEN = 3
TO_SPECTROGRAM = ModelKind("AutoModelForTextToSpectrogram", "text-to-spectrogram model", "Choose another --task")


@dataclass(frozen=True)
class SpeechPart:
    """A graph of a speech model.

    Attributes:
        role: name of the archive.
        module: what is captured; its attribute `network` is transformers' model.
        inputs: shapes by name; symbols are dynamic. Those whose names end in `_id`, `_ids`, `code` or `codes` are i64.
        outputs: names.
        states: that outputs feed back to inputs.
        handed: outputs that are keys and values for another part, with example shapes.
        vocoder: whose network it is; None for the model's own.
    """

    role: str
    module: nn.Module
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    states: tuple[StateTensor, ...] = ()
    handed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    vocoder: Vocoder | None = None


@dataclass(frozen=True)
class Utterance:
    """What PyTorch makes of a text.

    Attributes:
        made: outputs of the archives by name, those that are compared: `waveform` f32 [1, samples] of transformers' own model,
            and what is made on the way.
        largest_states: largest magnitude of each state.
    """

    made: Mapping[str, np.ndarray]
    largest_states: Mapping[Slot, float] = field(default_factory=dict)


class SpeechFamily(ABC):
    """A kind of speech model, for one config."""

    kind: ModelKind
    """Which of transformers' classes it is."""

    usual_vocoder = ""
    """What to use where a vocoder is needed and none was given."""

    vocoders: tuple[str, ...] = HIFI_GANS
    """Names of the classes that a vocoder beside it may have."""

    makes = "spectrograms"
    """What a vocoder beside it turns into sound."""

    def __init__(self, config: Any, vocoder: Vocoder | None = None, settings: Mapping[str, Any] | None = None) -> None:
        """Describe a model.

        Args:
            config: of transformers.
            vocoder: beside it, or None.
            settings: what the model's folder says of generation and processing; None for nothing.
        """
        self.config, self.vocoder, self.settings = config, vocoder, settings or {}

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.config.vocab_size)

    @property
    def text_tokens(self) -> range:
        """Tokens that a text may have; those before are padding and the like."""
        return range(_FIRST_TOKEN, self.vocabulary)

    @property
    @abstractmethod
    def plan(self) -> SpeechPlan:
        """How the archives connect.

        Raises:
            OptionError: the model needs a vocoder, or has something that is not supported.
        """

    @abstractmethod
    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """Return the parts of a network, in the order in which they run."""

    @abstractmethod
    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """Return what transformers makes of a text, without the outputs of the text's part.

        Args:
            model: of transformers, in f32.
            ids: i64 [1, S].
            speaker: see `plan.Speaker`.
            draws: whatever the model draws.
        """

    def heard(self, recording: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return what transformers makes of a recording f32 [1, V, frame], by name; nothing where no part takes one."""
        del recording
        return {}

    def own_vocoder(self) -> Vocoder:
        """Return the vocoder of a model that has none itself.

        Raises:
            OptionError: there is none, or one for other models.
        """
        if self.vocoder is None:
            raise OptionError(
                f"{type(self.config).__name__}: the model makes {self.makes}, and no vocoder was given.",
                f"Pass --vocoder {self.usual_vocoder}, or the vocoder that was trained with the model.",
            )
        if self.vocoder.architecture not in self.vocoders:
            raise OptionError(
                f"--vocoder {self.vocoder.name}: a {self.vocoder.architecture} makes no sound of {self.makes}.",
                f"Use {self.usual_vocoder}, or the vocoder that was trained with the model.",
            )
        return self.vocoder

    @cached_property
    def vocoder_network(self) -> Any:
        """transformers' model of the vocoder beside it, in f32 with its weights, read once.

        Raises:
            OptionError: see `own_vocoder`.
            CorruptCheckpointError: the checkpoint lacks some.
        """
        return vocoder_model(self.own_vocoder())

    def refuse_vocoder(self) -> None:
        """Refuse a vocoder beside a model that makes waveforms.

        Raises:
            OptionError: there is one.
        """
        if self.vocoder is not None:
            raise OptionError(f"{type(self.config).__name__}: the model makes waveforms itself.", "Omit --vocoder.")


class VocoderModule(nn.Module):
    """`spectrogram -> waveform`."""

    def __init__(self, network: Any, path: str = "") -> None:
        """Wrap a network.

        Args:
            network: the vocoder, or a model with one.
            path: of the vocoder in it.
        """
        super().__init__()
        self.network = network
        self.path = path

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Return samples [1, N] of frames [1, F, mel]."""
        made: torch.Tensor = self.network.get_submodule(self.path)(spectrogram)
        return made


def vocoder_part(vocoder: Vocoder) -> SpeechPart:
    """Return the part of a vocoder beside a model."""
    network = instantiate(vocoder.kind, vocoder.config, torch.float32, "eager", "eager", trust_remote_code=False)
    module = VocoderModule(network)
    return SpeechPart(WAVEFORM, module, spectrogram_shape(vocoder.config), (WAVEFORM,), vocoder=vocoder)


def vocoder_model(vocoder: Vocoder) -> Any:
    """Return transformers' model of a vocoder beside a model, in f32 with its weights.

    Raises:
        CorruptCheckpointError: the checkpoint lacks some.
    """
    model, missing = eager_model(vocoder.kind, vocoder.folder, trust_remote_code=False)
    refuse_invented(vocoder.name, missing)
    return model


def spectrogram_shape(config: Any) -> dict[str, tuple[int | str, ...]]:
    """Return the input of a vocoder; `config` is its own."""
    return {SPECTROGRAM: (1, LENGTH, config.model_in_dim)}


def text_of(
    family: SpeechFamily, model: Any, ids: np.ndarray, speaker: np.ndarray | None, seed: int
) -> dict[str, np.ndarray]:
    """Return what the text's part makes of a text in PyTorch, by name.

    Args:
        family, model: of transformers.
        ids: i64 [1, S].
        speaker: see `plan.Speaker`.
        seed: of the noise.
    """
    part = family.parts(model)[0]
    given = given_to(tuple(part.inputs), family.plan, {IDS: ids}, speaker, Draws(seed), {TOKENS: ids.shape[1]})
    made = part.module(*(torch.from_numpy(given[name]) for name in part.inputs))
    return {name: tensor.numpy() for name, tensor in zip(part.outputs, made, strict=True)}


@contextmanager
def drawn_from(draw: Callable[[tuple[int, ...]], torch.Tensor]) -> Iterator[None]:
    """Let `torch.randn` and `torch.randn_like` return what a function makes for a shape, for the length of the block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "randn", lambda *sizes, **_: draw(sizes)))
        stack.enter_context(mock.patch.object(torch, "randn_like", lambda like, **_: draw(tuple(like.shape))))
        yield


__all__ = [
    "TO_SPECTROGRAM",
    "TO_WAVEFORM",
    "SpeechFamily",
    "SpeechPart",
    "Utterance",
    "VocoderModule",
    "drawn_from",
    "spectrogram_shape",
    "text_of",
    "vocoder_model",
    "vocoder_part",
]
