"""Which speech models are known, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generic_export.errors import UnknownArchitectureError
from t2n_llm.source.vocoder import Vocoder
from t2n_llm.tasks.names import TEXT_TO_AUDIO
from t2n_llm.tasks.speech.csm import Csm
from t2n_llm.tasks.speech.family import SpeechFamily
from t2n_llm.tasks.speech.fastspeech2 import FastSpeech2, FastSpeech2WithHifiGan
from t2n_llm.tasks.speech.pocket_tts import PocketTts
from t2n_llm.tasks.speech.speecht5 import SpeechT5
from t2n_llm.tasks.speech.vits import Vits

_FAMILIES: dict[str, type[SpeechFamily]] = {
    "vits": Vits,
    "fastspeech2_conformer": FastSpeech2,
    "fastspeech2_conformer_with_hifigan": FastSpeech2WithHifiGan,
    "speecht5": SpeechT5,
    "csm": Csm,
    "pocket_tts": PocketTts,
    "gradium_phonon_tts": PocketTts,
}


def family_of(config: Any, vocoder: Vocoder | None = None, settings: Mapping[str, Any] | None = None) -> SpeechFamily:
    """Return the family of a config.

    Args:
        config: of transformers.
        vocoder: beside the model, or None.
        settings: see `SpeechFamily`.

    Raises:
        UnknownArchitectureError: speech models of this type are not supported.
    """
    kind = str(config.model_type)
    if kind not in _FAMILIES:
        raise UnknownArchitectureError(
            f"--task {TEXT_TO_AUDIO} does not support models of type {kind!r}.",
            f"Supported types: {', '.join(_FAMILIES)}.",
        )
    return _FAMILIES[kind](config, vocoder, settings)


__all__ = ["family_of"]
