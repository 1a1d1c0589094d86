"""What a calibrated algorithm runs: a language model on text, layer by layer, or any other model in whole passes.

In: a source and what the user calls its data. Out: a `Calibration`, which does nothing before it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from t2n_llm.source.hub import ModelSource

if TYPE_CHECKING:
    from quant.protocol import InputStatistics
    from t2n_llm.compress.calibrate import CalibrationResult, Choice, LayerProgress
    from t2n_llm.compress.passes import Pass


class Calibration(Protocol):
    """A model and typical data for it."""

    def quantized(self, choice: Choice, work: Path, progress: Callable[[LayerProgress], None]) -> CalibrationResult:
        """Quantise the linears of the model.

        Args:
            choice: which algorithm each parameter gets.
            work: folder where the packed tensors are written; it outlives the result.
            progress: told after every layer.

        Raises:
            OptionError: the data cannot be read, or is too little.
        """

    def statistics(self) -> dict[str, InputStatistics]:
        """Return the mean squares of what every linear of the unquantised model reads, by parameter name.

        Raises:
            OptionError: as `quantized`.
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

    def quantized(self, choice: Choice, work: Path, progress: Callable[[LayerProgress], None]) -> CalibrationResult:
        """See `Calibration.quantized`."""
        from t2n_llm.compress.calibrate import calibrate
        from t2n_llm.compress.text import calibration_ids

        source = self.source
        return calibrate(
            source.weights,
            choice,
            calibration_ids(self.text, source),
            work_dir=work,
            progress=progress,
            trust_remote_code=source.trust_remote_code,
        )

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.calibrate import collect_statistics
        from t2n_llm.compress.text import calibration_ids

        source = self.source
        ids = calibration_ids(self.text, source)
        return collect_statistics(source.folder, ids, trust_remote_code=source.trust_remote_code)


@dataclass(frozen=True)
class PassCalibration:
    """A model that is in memory as a whole.

    Attributes:
        prepare: loads it in f32, and makes passes over it.
    """

    prepare: Callable[[], tuple[Any, Sequence[Pass]]]

    def quantized(self, choice: Choice, work: Path, progress: Callable[[LayerProgress], None]) -> CalibrationResult:
        """See `Calibration.quantized`."""
        from t2n_llm.compress.passes import calibrate_passes

        network, passes = self.prepare()
        return calibrate_passes(network, choice, passes, work_dir=work, progress=progress)

    def statistics(self) -> dict[str, InputStatistics]:
        """See `Calibration.statistics`."""
        from t2n_llm.compress.passes import pass_statistics

        return pass_statistics(*self.prepare())


__all__ = ["Calibration", "PassCalibration", "TextCalibration"]
