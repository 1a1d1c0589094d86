"""Filling a size: which tensors stay plain when not all of them may.

In: what each tensor takes in either form, and how sensitive it is. Out: the names that stay plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from generic_export.errors import OptionError
from generic_export.weights.source import TensorSource
from quant.packing import check_quantizable, pack_q8_1, unpack_q8_1
from quant.protocol import Quantizer
from quant.stream import QuantizationError, blocks_error, measured_error, row_length, row_pieces

_SAMPLED_ROWS = 8  # one row in so many is quantised to estimate a tensor's error


@dataclass(frozen=True)
class Candidate:
    """A tensor that could be quantised.

    Attributes:
        name: its name.
        plain_bytes, quantized_bytes: what it takes in either form.
        sensitivity: the harm of quantising it, in any unit that all candidates share.
    """

    name: str
    plain_bytes: int
    quantized_bytes: int
    sensitivity: float

    @property
    def extra_bytes(self) -> int:
        """What keeping it plain costs."""
        return self.plain_bytes - self.quantized_bytes


def kept_plain(candidates: Sequence[Candidate], other_bytes: int, budget: int) -> set[str]:
    """Choose the tensors that stay plain: the most harm avoided per byte first, as long as they fit.

    Args:
        candidates: all of them quantised is where it starts.
        other_bytes: what the tensors that are no candidates take.
        budget: bytes for all tensors together.

    Raises:
        OptionError: even with everything quantised the budget is exceeded.
    """
    smallest = other_bytes + sum(candidate.quantized_bytes for candidate in candidates)
    if smallest > budget:
        raise OptionError(
            f"the weights take {smallest / 1e6:.1f} MB when everything that can be is quantised, more than the "
            f"{budget / 1e6:.1f} MB asked for.",
            f"Ask for --target-size {math.ceil(smallest / 1e5) / 10}MB or more.",
        )
    room = budget - smallest
    kept: set[str] = set()
    for candidate in sorted(candidates, key=lambda each: each.sensitivity / max(1, each.extra_bytes), reverse=True):
        if candidate.extra_bytes <= room:
            kept.add(candidate.name)
            room -= candidate.extra_bytes
    return kept


def weight_sensitivity(source: TensorSource, quantizer: Quantizer, block_format: str = "q4_0") -> float:
    """Estimate the harm of quantising a tensor from its values alone: squared error over energy, on a sample of rows.

    Args:
        source: plain float values whose rows are whole groups of 32.
        quantizer: chooses the values of `q4_0`.
        block_format: `q4_0` or `q8_1`.

    Raises:
        WeightError: the tensor holds inf or nan.
    """
    total = QuantizationError()
    for rows in row_pieces(source, row_length(source.shape)):
        sample = rows[::_SAMPLED_ROWS].to(torch.float32)
        check_quantizable(sample, source.name)
        if block_format == "q8_1":
            total = total.plus(measured_error(sample, unpack_q8_1(pack_q8_1(sample, name=source.name))))
        else:
            total = total.plus(blocks_error(sample, quantizer.quantize(sample)))
    return total.relative_error
