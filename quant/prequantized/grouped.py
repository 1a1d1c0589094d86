"""What integer formats with one scale (and zero point) for a group of inputs have in common.

In: how to get levels, scales and zero points of one weight. Out: its blocks where they are Q4_0's, else its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.prequantized.tensors import DecodedTensor, ExactTensor, fits_float16, ranges

_EXACT_BITS = 4

WORD_BITS = 32
SUPPORTED_BITS = (2, 4, 8)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight [N, K] of small integers; value = (level - zero[group]) * scale[group].

    Attributes:
        name: in a checkpoint that is not quantised.
        shape: (N, K).
        bits: width of a level.
        scales: reads float [N, G], in the checkpoint's dtype.
        zeros: reads uint8 [N, G], or None where every zero point is 2^(bits - 1).
        levels: opens the levels: returns what gives uint8 [rows, K] for a slice of rows.
        group_of: int64 [K], the group of each input; None where groups are runs of K / G inputs.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    scales: Callable[[], torch.Tensor]
    zeros: Callable[[], torch.Tensor] | None
    levels: Callable[[], Callable[[slice], torch.Tensor]]
    group_of: torch.Tensor | None = None

    def source(self) -> tuple[ExactTensor | DecodedTensor, str]:
        """Return the weight as a source, and why it cannot be kept as it is ("" when it can).

        Scales and zero points are read for that, the levels are not.

        Raises:
            CorruptCheckpointError: the number of groups does not fit the shape.
        """
        reason = self._obstacle()
        if reason:
            return DecodedTensor(self.name, self.shape, self._values), reason
        return ExactTensor(self.name, self.shape, self._blocks), ""

    def _obstacle(self) -> str:
        if self.bits != _EXACT_BITS:
            return f"its integers have {self.bits} bits, Q4_0 has 4"
        if self.shape[1] % GROUP:
            return "its rows are no multiple of 32 values"
        groups = self._groups(self._checked_scales().shape[1]).unflatten(0, (-1, GROUP))
        if bool((groups != groups[:, :1]).any()):
            in_runs = self.group_of is None or bool((self.group_of.diff() >= 0).all())
            scattered = "activation order (desc_act) scatters its groups over the inputs"
            return "its groups are no multiple of 32 inputs" if in_runs else scattered
        if self.zeros is not None and bool((self.zeros() != ZERO_POINT).any()):
            return "its zero points are not all 8, Q4_0's are"
        return "" if fits_float16(self.scales()) else "float16 does not hold its scales"

    def _checked_scales(self) -> torch.Tensor:
        scales = self.scales()
        rows, inputs = self.shape
        groups = scales.shape[1] if scales.dim() == 2 and scales.shape[0] == rows else 0
        fits = groups and (int(self.group_of.max()) < groups if self.group_of is not None else inputs % groups == 0)
        if not fits:
            raise CorruptCheckpointError(
                f"tensor {self.name}: scales of shape {list(scales.shape)} do not fit {rows} rows of {inputs} inputs.",
                "Download the checkpoint again.",
            )
        return scales

    def _groups(self, count: int) -> torch.Tensor:
        """Return the group of each input, int64 [K]."""
        if self.group_of is not None:
            return self.group_of
        return torch.arange(count).repeat_interleave(self.shape[1] // count)

    def _blocks(self) -> Iterator[Q4Blocks]:
        scales = self._checked_scales()
        of_block = self._groups(scales.shape[1])[::GROUP]
        levels = self.levels()
        for rows in ranges(*self.shape):
            d = scales[rows][:, of_block].to(torch.float16)
            yield Q4Blocks(levels(rows).unflatten(-1, (-1, GROUP)), d)

    def _values(self) -> Iterator[torch.Tensor]:
        scales = self._checked_scales()
        zeros = self.zeros() if self.zeros is not None else None
        groups, middle = self._groups(scales.shape[1]), 1 << (self.bits - 1)
        levels = self.levels()
        for rows in ranges(*self.shape):
            zero = middle if zeros is None else zeros[rows][:, groups].to(torch.float32)
            yield (levels(rows).to(torch.float32) - zero) * scales[rows][:, groups].to(torch.float32)


# Small unsigned integers in 32-bit words, as GPTQ, AWQ and compressed-tensors keep them: unpacked, whole tensors at
# once.
def check_bits(bits: object, format_name: str) -> int:
    """Return the width of the integers.

    Raises:
        WeightError: it does not divide a word, or is no number.
    """
    if bits not in SUPPORTED_BITS:
        raise WeightError(
            f"{format_name}: {bits!r}-bit weights cannot be read.",
            f"Widths of {', '.join(map(str, SUPPORTED_BITS))} bits can; else give the original checkpoint.",
        )
    return int(str(bits))


def unpack_words(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the integers of packed words, the lowest bits first.

    Args:
        words: int32, any shape.
        bits: width of one integer: 2, 4 or 8.
        dim: axis along which consecutive integers share a word; it grows by 32 / bits.
        order: field `i` of a word, from its lowest bits, is integer `order[i]`; None is the natural order.

    Returns:
        uint8.
    """
    count = WORD_BITS // bits
    fields = [torch.empty(0)] * count
    for place, integer in enumerate(order or range(count)):
        fields[integer] = ((words >> (bits * place)) & ((1 << bits) - 1)).to(torch.uint8)
    dim %= words.dim()
    return torch.stack(fields, dim=dim + 1).flatten(dim, dim + 1)
