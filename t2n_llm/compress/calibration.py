"""What a calibrated algorithm runs: a language model on text, layer by layer, or any other model in whole passes.

In: a source and what the user calls its data. Out: a `Calibration`, which does nothing before it is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from generic_export.documents import producer_version
from t2n_llm.compress.algorithms import CalibratedAlgorithm
from t2n_llm.compress.progress import Progress
from t2n_llm.source.hub import ModelSource

if TYPE_CHECKING:
    import torch

    from quant.protocol import InputStatistics
    from t2n_llm.compress.passes import Pass
    from t2n_llm.compress.result import CalibrationResult
    from t2n_llm.compress.sensitivity import Quantization


Told: TypeAlias = Callable[[Progress], None]
Chosen: TypeAlias = Mapping[str, CalibratedAlgorithm]
"""The algorithm of each parameter that gets one."""

MOST_TEXTS = 96
"""The most texts that `tuned` reads."""
_MOST_HELD = 2 << 30  # bytes of what the linears of one layer read
_READ_LIKE_STATES = 3  # as wide as hidden states is what q, k and v, what o, and what gate and up read


class Calibration(Protocol):
    """A model and typical data for it."""

    def quantized(self, chosen: Chosen, work: Path, progress: Told) -> CalibrationResult:
        """Quantise the linears of the model.

        Args:
            chosen: which algorithm each parameter gets.
            work: folder where the packed tensors are written; it outlives the result. Where an earlier run was stopped in it, the
                layers that it had finished are taken over, if that can be.
            progress: told after every layer.

        Raises:
            OptionError: the data cannot be read, or is too little.
        """

    def statistics(self) -> dict[str, InputStatistics]:
        """Return the mean squares of what every linear of the unquantised model reads, by parameter name.

        Raises:
            OptionError: as `quantized`.
        """

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told) -> dict[str, float]:
        """Return the KL that quantising each parameter alone brings about; nothing where that is not measured.

        Args:
            wanted: how each would be quantised.
            progress: told after every layer.

        Raises:
            OptionError: as `quantized`.
            MissingTokenizerError: there is no tokenizer to read the data with.
            CaptureError: the model cannot be walked layer by layer and back.
        """


@dataclass(frozen=True)
class TextCalibration:
    """A language model, one layer in memory at a time.

    Attributes:
        source: the model.
        text: see `calibration_ids`.
    """

    source: ModelSource
    text: str

    def quantized(self, chosen: Chosen, work: Path, progress: Told) -> CalibrationResult:
        """See `Calibration.quantized`."""
        from t2n_llm.compress.calibrate import calibrate
        from t2n_llm.compress.journal import CalibrationJournal

        source = self.source
        ids = self._read(_texts_of_layers(chosen, source.config))
        return calibrate(
            source.weights,
            chosen.get,
            ids,
            work_dir=work,
            journal=CalibrationJournal(work, _identity(source, chosen, ids)),
            progress=progress,
            trust_remote_code=source.trust_remote_code,
        )

    def _read(self, texts: int) -> torch.Tensor:
        """Return at most so many texts; what the model itself writes takes long to write, and is never more."""
        from t2n_llm.compress.text import AUTO, DEFAULT_SEQUENCES, calibration_ids

        sequences = min(texts, DEFAULT_SEQUENCES) if self.text == AUTO else texts
        return calibration_ids(self.text, self.source, sequences=sequences)

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.calibrate import collect_statistics
        from t2n_llm.compress.text import calibration_ids

        source = self.source
        ids = calibration_ids(self.text, source)
        return collect_statistics(source.folder, ids, trust_remote_code=source.trust_remote_code)

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told) -> dict[str, float]:
        """See `Calibration.divergences`."""
        from t2n_llm.compress.sensitivity import LENGTH, TEXTS, divergences
        from t2n_llm.compress.text import calibration_ids

        ids = calibration_ids(self.text, self.source, sequences=TEXTS, length=LENGTH)
        trust = self.source.trust_remote_code
        return divergences(self.source.weights, wanted, ids, progress=progress, trust_remote_code=trust)


@dataclass(frozen=True)
class PassCalibration:
    """A model that is in memory as a whole.

    Attributes:
        prepare: loads it in f32, and makes passes over it.
    """

    prepare: Callable[[], tuple[Any, Sequence[Pass]]]

    def quantized(self, chosen: Chosen, work: Path, progress: Told) -> CalibrationResult:
        """See `Calibration.quantized`."""
        from t2n_llm.compress.passes import calibrate_passes

        network, passes = self.prepare()
        return calibrate_passes(network, chosen.get, passes, work_dir=work, progress=progress)

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.passes import pass_statistics

        return pass_statistics(*self.prepare())

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told) -> dict[str, float]:
        """See `Calibration.divergences`: these are not measured here."""
        return {}


def _identity(source: ModelSource, chosen: Chosen, ids: torch.Tensor) -> str:
    """Return text that two calibrations of layers share when they would make the same."""
    import torch

    files = [(file.path.name, file.identity.bytes, file.identity.mtime_ns) for file in source.checkpoint().held]
    texts = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    algorithms = sorted((name, algorithm.name) for name, algorithm in chosen.items())
    return json.dumps([files, texts, list(ids.shape), algorithms, producer_version(), torch.__version__])


def _texts_of_layers(chosen: Chosen, config: Any) -> int:
    """Return on how many texts the layers are quantised.

    What reconstructs makes more of more text; it holds what all linears of a layer read, which has to stay within bounds.
    """
    from t2n_llm.compress.text import DEFAULT_LENGTH, DEFAULT_SEQUENCES
    from t2n_llm.compress.walk import inner_width

    if not any(algorithm.reconstructs for algorithm in chosen.values()):
        return DEFAULT_SEQUENCES
    sizes = config.get_text_config()
    held = 4 * DEFAULT_LENGTH * (_READ_LIKE_STATES * sizes.hidden_size + inner_width(sizes))
    return min(MOST_TEXTS, max(DEFAULT_SEQUENCES, _MOST_HELD // held))


__all__ = ["Calibration", "PassCalibration", "TextCalibration"]
