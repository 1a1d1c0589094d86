"""A vocoder beside a model of spectrograms or of a codec's latents: a HiFi-GAN or the codec, with a config and weights.

In: a folder. Out: a `Vocoder`; transformers has no Auto class for these, so its architecture names the class.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import SourceError, UnknownArchitectureError
from generic_export.weights.checkpoint import Checkpoint, open_checkpoint
from t2n_llm.source.empty_model import ModelKind

HIFI_GANS = ("SpeechT5HifiGan", "FastSpeech2ConformerHifiGan")
CODECS = ("PocketTTSAudioTokenizerModel",)
_CONFIG = "config.json"


@dataclass(frozen=True)
class Vocoder:
    """An opened vocoder.

    Attributes:
        name: hub id or folder, as the user gave it.
        folder: with its files.
        revision: commit of a hub repository, or None.
        config: of transformers.
        architecture: name of its class in transformers.
        checkpoint: its opened weight files.
    """

    name: str
    folder: Path
    revision: str | None
    config: Any
    architecture: str
    checkpoint: Checkpoint

    @property
    def kind(self) -> ModelKind:
        """Its class."""
        return ModelKind(self.architecture, "vocoder", "Choose another --vocoder")

    def recorded(self) -> dict[str, Any]:
        """Return the entry of `export.json`; of a folder only its own name."""
        name = self.name if self.revision is not None else self.folder.resolve().name
        return {"name": name, "revision": self.revision, "architecture": self.architecture}

    @staticmethod
    def of(name: str, folder: Path, revision: str | None) -> Vocoder:
        """Open a vocoder; no weight is read.

        Args:
            name: hub id or folder, as the user gave it.
            folder, revision: what it stands for.

        Raises:
            SourceError: its config cannot be read.
            UnknownArchitectureError: it is none that is supported.
            WeightError: its weights cannot be opened.
        """
        try:
            stated = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            architecture = str(stated["architectures"][0])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SourceError(
                f"{name}: its {_CONFIG} names no vocoder.", "Use a vocoder such as microsoft/speecht5_hifigan."
            ) from error
        if architecture not in HIFI_GANS + CODECS:
            raise UnknownArchitectureError(
                f"{name}: {architecture} is no vocoder that is supported.",
                f"Supported: {', '.join(HIFI_GANS + CODECS)}.",
            )
        import transformers

        config = getattr(transformers, architecture).config_class.from_dict(stated)
        return Vocoder(name, folder, revision, config, architecture, open_checkpoint(folder))


__all__ = ["CODECS", "HIFI_GANS", "Vocoder"]
