"""PyTorch's element types by the names that tract gives them."""

from __future__ import annotations

import torch

from generic_export.errors import TranslationError

TRACT_DTYPES: dict[torch.dtype, str] = {
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
}

F32_MAX = torch.finfo(torch.float32).max
F32_SCALE = 2.0**126
F32_SMALLEST = 2.0**-149
F32_SMALL = 2.0**-60  # what f32 leaves of an f64 number of this size is still a normal f32

# A float beyond these types' bounds: tract saturates, PyTorch wraps.
WRAPPING_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32})


def as_read(value: float) -> float:
    """Return a number as tract reads it: rounded to f32 (docs/contributing/engine-facts.md#identifiers-and-literals)."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


def tract_dtype(dtype: torch.dtype) -> str:
    """Return tract's name of an element type.

    Raises:
        TranslationError: tract has no such element type (bf16, complex).
    """
    name = TRACT_DTYPES.get(dtype)
    if name is None:
        raise TranslationError(f"tract has no dtype {dtype}.", "Convert the model to float16 or float32.")
    return name


__all__ = [
    "F32_MAX",
    "F32_SCALE",
    "F32_SMALL",
    "F32_SMALLEST",
    "TRACT_DTYPES",
    "WRAPPING_DTYPES",
    "as_read",
    "tract_dtype",
]
