"""What a calibrated algorithm runs: a language model on text, layer by layer, or any other model in whole passes.

In: a source and what the user calls its data. Out: a `Calibration`, which does nothing before it is asked.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from generic_export.documents import producer_version
from t2n_llm.compress.algorithms import CalibratedAlgorithm
from t2n_llm.compress.effort import MOST_TEXTS, Effort
from t2n_llm.compress.progress import Progress
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.placement import available_memory

if TYPE_CHECKING:
    import torch

    from quant.protocol import InputStatistics
    from t2n_llm.compress.learning_journal import LearningJournal
    from t2n_llm.compress.passes import Pass
    from t2n_llm.compress.result import CalibrationResult
    from t2n_llm.compress.sensitivity import Quantization


Told: TypeAlias = Callable[[Progress], None]
Chosen: TypeAlias = Mapping[str, CalibratedAlgorithm]
"""The algorithm of each parameter that gets one."""

_MOST_HELD = 2 << 30  # bytes of what the linears of one layer read
_READ_LIKE_STATES = 3  # as wide as hidden states is what q, k and v, what o, and what gate and up read


class Calibration(Protocol):
    """A model and typical data for it."""

    def quantized(self, chosen: Chosen, work: Path, progress: Told, effort: Effort) -> CalibrationResult:
        """Quantise the linears of the model.

        Args:
            chosen: which algorithm each parameter gets.
            work: folder where the packed tensors are written; it outlives the result. Where an earlier run was stopped in it, the
                layers that it had finished are taken over, if that can be.
            progress: told after every layer, and while it learns.
            effort: how long it learns at the end, where an algorithm does.

        Raises:
            OptionError: the data cannot be read, or is too little.
        """

    def statistics(self) -> dict[str, InputStatistics]:
        """Return the mean squares of what every linear of the unquantised model reads, by parameter name.

        Raises:
            OptionError: as `quantized`.
        """

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told, seed: int) -> dict[str, float]:
        """Return the KL that quantising each parameter alone brings about; nothing where that is not measured.

        Args:
            wanted: how each would be quantised.
            progress: told after every layer.
            seed: of the tokens that are drawn for it.

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

    def quantized(self, chosen: Chosen, work: Path, progress: Told, effort: Effort) -> CalibrationResult:
        """See `Calibration.quantized`."""
        from t2n_llm.compress.calibrate import calibrate
        from t2n_llm.compress.journal import CalibrationJournal
        from t2n_llm.compress.learning_journal import LearningJournal

        source, trust = self.source, self.source.trust_remote_code
        ids = self._read(_texts_of_layers(chosen, source.config), effort.seed)
        identity = _identity(source, chosen, ids)
        journal = CalibrationJournal(work, identity)
        made = calibrate(
            source.weights,
            chosen.get,
            ids,
            work_dir=work,
            journal=journal,
            progress=progress,
            trust_remote_code=trust,
        )
        if any(chosen[name].distils for name in made.packed) and not effort.is_none:
            texts = self._read(MOST_TEXTS, effort.seed)
            learning = LearningJournal(work, f"{identity} {list(texts.shape)} {effort}")
            self._learned(made, texts, effort, learning, progress)
        return made

    def _read(self, texts: int, seed: int) -> torch.Tensor:
        """Return at most so many texts; what the model itself writes takes long to write, and is never more."""
        from t2n_llm.compress.text import AUTO, DEFAULT_SEQUENCES, calibration_ids

        sequences = min(texts, DEFAULT_SEQUENCES) if self.text == AUTO else texts
        return calibration_ids(self.text, self.source, sequences=sequences, seed=seed)

    def _learned(
        self, made: CalibrationResult, ids: torch.Tensor, effort: Effort, journal: LearningJournal, progress: Told
    ) -> None:
        """Let the whole model learn, where it fits in memory."""
        from t2n_llm.compress.distil import FEWEST_TEXTS, bytes_needed, bytes_of_text, distil, texts_to_write
        from t2n_llm.compress.reconstruct import split
        from t2n_llm.compress.walk import open_walkable
        from t2n_llm.compress.written import continued_ids

        if len(ids) < FEWEST_TEXTS:
            made.notes.append(
                f"tuned did not learn at the end: {len(ids)} texts of {ids.shape[1]} tokens are fewer than {FEWEST_TEXTS}."
            )
            return
        model = open_walkable(self.source.weights, trust_remote_code=self.source.trust_remote_code)
        needed, free = bytes_needed(model, made, *ids.shape), available_memory()
        if needed > free:
            made.notes.append(
                f"tuned did not learn at the end: that takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free."
            )
            return
        recalled = journal.recalled_texts()
        if recalled is None:
            began = time.monotonic()
            wanted = min(texts_to_write(effort, len(ids)), (free - needed) // bytes_of_text(model, ids.shape[1]))
            written = continued_ids(self.source, ids[split(len(ids))[0]], effort, wanted, progress)
            recalled = written, effort.less(time.monotonic() - began)
            journal.keep_texts(*recalled)
        written, left = recalled
        found = distil(
            model, made, ids, left, written=written, work_dir=journal.folder, journal=journal, progress=progress
        )
        if not found.kept:
            made.notes.append(
                "tuned learned nothing at the end that its held-out texts confirm: its blocks are as before."
            )

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.calibrate import collect_statistics
        from t2n_llm.compress.text import calibration_ids

        source = self.source
        ids = calibration_ids(self.text, source)
        return collect_statistics(source.folder, ids, trust_remote_code=source.trust_remote_code)

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told, seed: int) -> dict[str, float]:
        """See `Calibration.divergences`."""
        from t2n_llm.compress.sensitivity import LENGTH, TEXTS, divergences
        from t2n_llm.compress.text import calibration_ids

        ids = calibration_ids(self.text, self.source, sequences=TEXTS, length=LENGTH, seed=seed)
        trust = self.source.trust_remote_code
        return divergences(self.source.weights, wanted, ids, seed=seed, progress=progress, trust_remote_code=trust)


@dataclass(frozen=True)
class PassCalibration:
    """A model that is in memory as a whole.

    Attributes:
        prepare: loads it in f32, and makes passes over it.
    """

    prepare: Callable[[], tuple[Any, Sequence[Pass]]]

    def quantized(self, chosen: Chosen, work: Path, progress: Told, effort: Effort) -> CalibrationResult:
        """See `Calibration.quantized`; nothing learns at the end."""
        from t2n_llm.compress.passes import calibrate_passes

        network, passes = self.prepare()
        made = calibrate_passes(network, chosen.get, passes, work_dir=work, progress=progress)
        if effort.seconds and any(chosen[name].distils for name in made.packed):
            made.notes.append("--budget has no meaning here: only language models learn at the end.")
        return made

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.passes import pass_statistics

        return pass_statistics(*self.prepare())

    def divergences(self, wanted: Mapping[str, Quantization], progress: Told, seed: int) -> dict[str, float]:
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
