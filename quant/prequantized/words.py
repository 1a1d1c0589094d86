"""Small unsigned integers in 32-bit words, as GPTQ, AWQ and compressed-tensors keep them: unpacked, whole tensors at once."""

from __future__ import annotations

import torch

from generic_export.errors import WeightError

WORD_BITS = 32
SUPPORTED_BITS = (2, 4, 8)


def check_bits(bits: object, format_name: str) -> int:
    """Return the width of the integers.

    Raises:
        WeightError: it does not divide a word, or is no number.
    """
    if bits not in SUPPORTED_BITS:
        raise WeightError(
            f"{format_name}: {bits!r}-bit weights are not supported.",
            f"Supported: {', '.join(map(str, SUPPORTED_BITS))} bits; otherwise use the original checkpoint.",
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
