"""Levels and scales to bytes and back: Q4_0 (18 bytes per 32 values) and Q8_1 (36 bytes per 32 values).

In: `Q4Blocks` or float values. Out: uint8 tensors in GGUF's order, as tract's `.dat` items 0x3040 and 0x3080 hold them.
"""

from __future__ import annotations

import torch

from generic_export.errors import WeightError
from quant.blocks import BLOCK_BYTES, GROUP, Q4Blocks

Q8_1_BLOCK_BYTES = 36
_HALF = GROUP // 2
_Q8_HIGHEST = 127
_LARGEST_SCALE = torch.finfo(torch.float16).max


def pack_q4_0(blocks: Q4Blocks) -> torch.Tensor:
    """Return the bytes of blocks: per group the scale, then level j in the low and j + 16 in the high half of byte 2 + j.

    Args:
        blocks: q uint8 [..., G, 32], d float16 [..., G].

    Returns:
        uint8 [..., G * 18] (ggml, ggml-common.h `block_q4_0`; tract 0.23.9, linalg block_quant/q4_0.rs).
    """
    packed = torch.empty((*blocks.d.shape, BLOCK_BYTES), dtype=torch.uint8)
    packed[..., :2] = blocks.d.contiguous().unsqueeze(-1).view(torch.uint8)
    torch.bitwise_or(blocks.q[..., :_HALF], blocks.q[..., _HALF:] << 4, out=packed[..., 2:])
    return packed.flatten(-2)


def unpack_q4_0(data: torch.Tensor) -> Q4Blocks:
    """Return the blocks that bytes hold.

    Args:
        data: uint8 [..., G * 18].

    Raises:
        WeightError: the last axis is no whole number of blocks.
    """
    rows = _blocks_of(data, BLOCK_BYTES, "Q4_0")
    nibbles = rows[..., 2:]
    q = torch.cat((nibbles & 0x0F, nibbles >> 4), dim=-1)
    return Q4Blocks(q, rows[..., :2].contiguous().view(torch.float16).squeeze(-1))


def pack_q8_1(values: torch.Tensor, *, name: str = "tensor") -> torch.Tensor:
    """Quantise to eight bits and pack: scale d = max|w| / 127, d times the sum of the levels, 32 signed levels.

    Args:
        values: float [..., K], K a multiple of 32, finite.
        name: what to call the tensor in an error.

    Returns:
        uint8 [..., K // 32 * 36] (ggml, ggml-common.h `block_q8_1`).

    Raises:
        WeightError: K is no multiple of 32, a value is inf or nan, or a scale does not fit float16.
    """
    check_quantizable(values, name)
    groups = values.to(torch.float32).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(dim=-1) / _Q8_HIGHEST
    if bool((scale > _LARGEST_SCALE).any()):
        raise WeightError(f"tensor {name}: values up to {groups.abs().max():.3g} are too large for Q8_1.")
    d = scale.to(torch.float16)
    stored = d.to(torch.float32).unsqueeze(-1)
    q = torch.where(stored != 0, groups / stored, 0.0).round_().clamp_(-_Q8_HIGHEST, _Q8_HIGHEST)
    # The engine ignores the sum; where it overflows float16 (scales above 16) the largest float16 stands for it.
    total = (q.sum(dim=-1) * stored.squeeze(-1)).clamp_(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)
    packed = torch.empty((*d.shape, Q8_1_BLOCK_BYTES), dtype=torch.uint8)
    packed[..., :2] = d.unsqueeze(-1).view(torch.uint8)
    packed[..., 2:4] = total.unsqueeze(-1).view(torch.uint8)
    packed[..., 4:] = q.to(torch.int8).view(torch.uint8)
    return packed.flatten(-2)


def unpack_q8_1(data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values [..., K] of Q8_1 bytes, uint8 [..., K // 32 * 36].

    Raises:
        WeightError: the last axis is no whole number of blocks.
    """
    rows = _blocks_of(data, Q8_1_BLOCK_BYTES, "Q8_1")
    d = rows[..., :2].contiguous().view(torch.float16).to(torch.float32)
    return (rows[..., 4:].view(torch.int8).to(torch.float32) * d).flatten(-2)


def dequantize_bytes(data: torch.Tensor, block_format: str) -> torch.Tensor:
    """Return the float32 values [..., K] of packed bytes.

    Args:
        data: uint8 [..., bytes of a row].
        block_format: `q4_0` or `q8_1`.

    Raises:
        WeightError: no such format, or the last axis is no whole number of blocks.
    """
    if block_format == "q4_0":
        return unpack_q4_0(data).dequantize()
    if block_format == "q8_1":
        return unpack_q8_1(data)
    raise WeightError(f"block format {block_format!r} is unknown.", "Known: q4_0, q8_1.")


def check_quantizable(values: torch.Tensor, name: str) -> None:
    """Refuse what has no quantised form.

    Args:
        values: float [..., K].
        name: what to call the tensor.

    Raises:
        WeightError: K is no multiple of 32, or a value is inf or nan.
    """
    if not values.dim() or values.shape[-1] % GROUP:
        size = values.shape[-1] if values.dim() else "no axis"
        raise WeightError(
            f"tensor {name}: its last axis is {size}, which is not a multiple of {GROUP}.",
            "Keep this tensor in f16 or f32.",
        )
    # One sum finds inf and nan in one pass; finite values that overflow it are looked at one by one.
    if not bool(values.sum(dtype=torch.float32).isfinite()) and not bool(values.isfinite().all()):
        raise WeightError(
            f"tensor {name}: it contains inf or NaN, which cannot be quantized.", "Repair the checkpoint."
        )


def _blocks_of(data: torch.Tensor, block_bytes: int, scheme: str) -> torch.Tensor:
    if not data.dim() or data.shape[-1] % block_bytes:
        raise WeightError(
            f"{scheme} rows are multiples of {block_bytes}-byte blocks, got {list(data.shape)} bytes.",
            "The data are damaged, or not in this format.",
        )
    return data.unflatten(-1, (-1, block_bytes))
