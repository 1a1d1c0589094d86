"""How much a model suffers from quantising each of its tensors: what was measured, else what its weights let one guess.

In: the tensors that a recipe would quantise. Out: a number for each, in one unit, for `quant.budget.kept_plain` to choose by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from generic_export.weights.source import TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM
from quant.budget import kind_factor, layer_count, weight_sensitivity
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import TensorName


@dataclass(frozen=True)
class Quantizable:
    """A stored tensor that would be quantised.

    Attributes:
        names: of the parameters that it stands for, with their roles; a tied table has two.
        source: its values, rows as blocks want them.
        block_format: one of `quant.recipe.QUANTIZED_SCHEMES`.
    """

    names: tuple[TensorName, ...]
    source: TensorSource
    block_format: str


@dataclass(frozen=True)
class Harm:
    """What is known of how tensors can be quantised, and of what that does.

    Attributes:
        quantizers: by parameter name; None where it looks at the whole model.
        statistics: of what a tensor is multiplied with, by parameter name.
        divergences: KL that quantising a parameter alone brings about, where it was measured.
    """

    quantizers: Mapping[str, Quantizer | None]
    statistics: Mapping[str, InputStatistics]
    divergences: Mapping[str, float]

    def of(self, tensors: Mapping[str, Quantizable]) -> dict[str, float]:
        """Return the harm of each tensor, by label."""
        measured = {
            label: sum(self.divergences[each.name] for each in tensor.names)
            for label, tensor in tensors.items()
            if all(each.name in self.divergences for each in tensor.names)
        }
        if len(measured) == len(tensors):
            return measured
        layers = layer_count(each.name for tensor in tensors.values() for each in tensor.names)
        guessed = {label: self._guessed(tensor, layers) for label, tensor in tensors.items()}
        known = sum(guessed[label] for label in measured)
        unit = sum(measured.values()) / known if known else 1.0
        return {label: measured.get(label, unit * guess) for label, guess in guessed.items()}

    def _guessed(self, tensor: Quantizable, layers: int) -> float:
        quantizer = self.quantizers.get(tensor.names[0].name) or BUILT_IN[DEFAULT_ALGORITHM]
        known = next((self.statistics[each.name] for each in tensor.names if each.name in self.statistics), None)
        harm = weight_sensitivity(tensor.source, quantizer, tensor.block_format, known)
        return harm * sum(kind_factor(each.name, each.role, layers) for each in tensor.names)


__all__ = ["Harm", "Quantizable"]
