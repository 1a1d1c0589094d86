"""Blocks of GGUF to float32 in compiled kernels: bit for bit what `gguf.quants.dequantize` computes, at many times its speed.

In: the bytes of a tensor's rows. Out: their values. Layouts: ggml-common.h, `block_q4_0` and following.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quant.compiled import compiled, part

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_LOW, _TWO, _SIX, _BIT = np.uint8(0x0F), np.uint8(0x03), np.uint8(0x3F), np.uint8(0x01)
_FOUR = np.uint8(4)
_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)  # doubled
_NON_LINEAR = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
# A power of two from its exponent alone, halved because the levels are doubled; the two smallest are subnormal.
_E8M0 = np.array([0x00200000 << e if e < 2 else (e - 1) << 23 for e in range(256)], np.uint32).view(np.float32)


# --- 32 values a block ------------------------------------------------------------------------------


@compiled
def _q4_0(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values, scale = blocks[row], out[row], d[row]
        for i in range(16):
            values[i] = scale * np.float32(np.int32(block[2 + i] & _LOW) - 8)
            values[i + 16] = scale * np.float32(np.int32(block[2 + i] >> _FOUR) - 8)


@compiled
def _q4_1(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values, scale, low = blocks[row], out[row], d[row], m[row]
        for i in range(16):
            values[i] = scale * np.float32(block[4 + i] & _LOW) + low
            values[i + 16] = scale * np.float32(block[4 + i] >> _FOUR) + low


@part
def _fifth_bits(block: Bytes, place: int) -> np.uint32:
    word = np.uint32(block[place]) | np.uint32(block[place + 1]) << np.uint32(8)
    return word | np.uint32(block[place + 2]) << np.uint32(16) | np.uint32(block[place + 3]) << np.uint32(24)


@compiled
def _q5_0(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values, scale = blocks[row], out[row], d[row]
        high = _fifth_bits(block, 2)
        for i in range(16):
            first = (high >> np.uint32(i)) & np.uint32(1)
            second = (high >> np.uint32(i + 16)) & np.uint32(1)
            values[i] = scale * np.float32(np.int32(block[6 + i] & _LOW) + np.int32(first << np.uint32(4)) - 16)
            values[i + 16] = scale * np.float32(np.int32(block[6 + i] >> _FOUR) + np.int32(second << np.uint32(4)) - 16)


@compiled
def _q5_1(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values, scale, low = blocks[row], out[row], d[row], m[row]
        high = _fifth_bits(block, 4)
        for i in range(16):
            first = (high >> np.uint32(i)) & np.uint32(1)
            second = (high >> np.uint32(i + 16)) & np.uint32(1)
            values[i] = scale * np.float32(np.int32(block[8 + i] & _LOW) + np.int32(first << np.uint32(4))) + low
            values[i + 16] = (
                scale * np.float32(np.int32(block[8 + i] >> _FOUR) + np.int32(second << np.uint32(4))) + low
            )


@compiled
def _q8_0(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values, scale = blocks[row], out[row], d[row]
        for i in range(32):
            values[i] = scale * np.float32(np.int8(block[2 + i]))


@part
def _look_up(block: Bytes, start: int, scale: np.float32, levels: Floats, values: Floats, first: int) -> None:
    """Fill in 32 values whose levels are two to a byte, by a table of 16."""
    for i in range(16):
        values[first + i] = scale * levels[block[start + i] & _LOW]
        values[first + i + 16] = scale * levels[block[start + i] >> _FOUR]


@compiled
def _iq4_nl(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        _look_up(blocks[row], 2, d[row], _NON_LINEAR, out[row], 0)


@compiled
def _mxfp4(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block = blocks[row]
        _look_up(block, 1, _E8M0[block[0]], _E2M1, out[row], 0)


# --- 256 values a block -----------------------------------------------------------------------------


@compiled
def _q2_k(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values = blocks[row], out[row]
        for group in range(16):  # of 16 values; eight of them share 32 bytes, two bits each
            scale = d[row] * np.float32(block[group] & _LOW)
            low = m[row] * np.float32(block[group] >> _FOUR)
            start, shift = 16 + group // 8 * 32 + group % 2 * 16, np.uint8(group % 8 // 2 * 2)
            for i in range(16):
                values[group * 16 + i] = scale * np.float32((block[start + i] >> shift) & _TWO) - low


@compiled
def _q3_k(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values = blocks[row], out[row]
        for group in range(16):
            low_bits = (block[96 + group % 8] >> np.uint8(group // 8 * 4)) & _LOW
            high_bits = (block[104 + group % 4] >> np.uint8(group // 4 * 2)) & _TWO
            scale = d[row] * np.float32(np.int32(low_bits) + np.int32(high_bits) * 16 - 32)
            start, shift = 32 + group // 8 * 32 + group % 2 * 16, np.uint8(group % 8 // 2 * 2)
            mask, bit = group % 2 * 16, np.uint8(group // 2)
            for i in range(16):
                above = np.int32((block[mask + i] >> bit) & _BIT) * 4 - 4
                values[group * 16 + i] = scale * np.float32(np.int32((block[start + i] >> shift) & _TWO) + above)


@part
def _six_bits(block: Bytes, group: int) -> tuple[np.uint8, np.uint8]:
    """Return scale and minimum of one of eight groups: six bits each, those of the last four in what the first four leave."""
    if group < 4:
        return block[4 + group] & _SIX, block[8 + group] & _SIX
    last = block[8 + group]
    scale = (last & _LOW) | ((block[group] >> np.uint8(2)) & np.uint8(0x30))
    return scale, (last >> _FOUR) | ((block[4 + group] >> np.uint8(2)) & np.uint8(0x30))


@compiled
def _q4_k(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values = blocks[row], out[row]
        for group in range(8):
            steps, offset = _six_bits(block, group)
            scale, low = d[row] * np.float32(steps), m[row] * np.float32(offset)
            start, shift = 16 + group // 2 * 32, np.uint8(group % 2 * 4)
            for i in range(32):
                values[group * 32 + i] = scale * np.float32((block[start + i] >> shift) & _LOW) - low


@compiled
def _q5_k(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values = blocks[row], out[row]
        for group in range(8):
            steps, offset = _six_bits(block, group)
            scale, low = d[row] * np.float32(steps), m[row] * np.float32(offset)
            start, shift, bit = 48 + group // 2 * 32, np.uint8(group % 2 * 4), np.uint8(group)
            for i in range(32):
                high = ((block[16 + i] >> bit) & _BIT) << _FOUR
                values[group * 32 + i] = scale * np.float32(((block[start + i] >> shift) & _LOW) | high) - low


@compiled
def _q6_k(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block, values = blocks[row], out[row]
        for group in range(16):
            scale = d[row] * np.float32(np.int8(block[192 + group]))
            start, shift = group // 8 * 64 + group % 4 * 16, np.uint8(group % 8 // 4 * 4)
            high, high_shift = 128 + group // 8 * 32 + group % 2 * 16, np.uint8(group % 8 // 2 * 2)
            for i in range(16):
                level = (block[start + i] >> shift) & _LOW
                level |= ((block[high + i] >> high_shift) & _TWO) << _FOUR
                values[group * 16 + i] = scale * np.float32(np.int32(level) - 32)


@compiled
def _iq4_xs(blocks: Bytes, d: Floats, m: Floats, out: Floats) -> None:
    for row in range(len(blocks)):
        block = blocks[row]
        for group in range(8):
            low_bits = (block[4 + group // 2] >> np.uint8(group % 2 * 4)) & _LOW
            high_bits = (block[2 + group // 4] >> np.uint8(group % 4 * 2)) & _TWO
            scale = d[row] * np.float32(np.int32(low_bits) + np.int32(high_bits) * 16 - 32)
            _look_up(block, 8 + group * 16, scale, _NON_LINEAR, out[row], group * 32)


# --- what is known of each ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """A type of block.

    Attributes:
        kernel: fills in float32 [blocks, values] from uint8 [blocks, size], scales and minima (float32 [blocks]).
        values: in a block.
        size: in bytes.
        scale, minimum: where its two float16 numbers are; None for none.
    """

    kernel: Callable[[Bytes, Floats, Floats, Floats], None]
    values: int
    size: int
    scale: int | None
    minimum: int | None = None


LAYOUTS: Mapping[str, _Layout] = {
    "Q4_0": _Layout(_q4_0, 32, 18, 0),
    "Q4_1": _Layout(_q4_1, 32, 20, 0, 2),
    "Q5_0": _Layout(_q5_0, 32, 22, 0),
    "Q5_1": _Layout(_q5_1, 32, 24, 0, 2),
    "Q8_0": _Layout(_q8_0, 32, 34, 0),
    "IQ4_NL": _Layout(_iq4_nl, 32, 18, 0),
    "MXFP4": _Layout(_mxfp4, 32, 17, None),
    "Q2_K": _Layout(_q2_k, 256, 84, 80, 82),
    "Q3_K": _Layout(_q3_k, 256, 110, 108),
    "Q4_K": _Layout(_q4_k, 256, 144, 0, 2),
    "Q5_K": _Layout(_q5_k, 256, 176, 0, 2),
    "Q6_K": _Layout(_q6_k, 256, 210, 208),
    "IQ4_XS": _Layout(_iq4_xs, 256, 136, 0),
}
"""Name of a type in ggml -> how its blocks lie; types that are not here are left to the `gguf` package."""


def decode_blocks(kind: str, rows: Bytes) -> Floats:
    """Return the values of rows of blocks.

    Args:
        kind: one of `LAYOUTS`.
        rows: uint8 [rows, bytes of a row], whole blocks, contiguous; it is only read.

    Returns:
        float32 [rows, values of a row].
    """
    layout = LAYOUTS[kind]
    blocks = rows.reshape(-1, layout.size)
    out = np.empty((len(blocks), layout.values), np.float32)
    layout.kernel(blocks, _halves(blocks, layout.scale), _halves(blocks, layout.minimum), out)
    return out.reshape(len(rows), -1)


def _halves(blocks: Bytes, place: int | None) -> Floats:
    if place is None:
        return np.empty(0, np.float32)
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16).reshape(-1).astype(np.float32)
