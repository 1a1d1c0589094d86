"""GGUF files: each tensor as a source that reads the memory-mapped file, Q4_0 as the very blocks.

In: a path. Out: `GgufFile`, its tensors in GGUF's own names and orientation (the axes in PyTorch's order). Everything but Q4_0,
F16, BF16 and F32 is dequantised a piece of rows at a time, rare types by the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from quant.blocks import GROUP, Q4Blocks
from quant.packing import unpack_q4_0
from quant.prequantized.gguf_parts import all_parts, named_parts
from quant.prequantized.gguf_reader import gguf_reader
from quant.prequantized.tensors import DecodedTensor, ExactTensor, ranges

_PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_EXACT = "Q4_0"


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: in the file.
        shape: in PyTorch's order of axes: the last one is contiguous.
        kind: its type, such as `Q4_0`.
        data: the mapped bytes, uint8 [rows, bytes of a row]; vectors are one row.
        code: the type as the `gguf` package has it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: np.ndarray
    code: Any

    @property
    def is_plain(self) -> bool:
        """Whether its values are floats of 16 or 32 bits."""
        return self.kind in _PLAIN

    @property
    def is_exact(self) -> bool:
        """Whether its blocks are those that tract runs."""
        return self.kind == _EXACT and self.shape[-1] % GROUP == 0

    def rows(self, start: int, stop: int) -> GgufTensor:
        """Return some of its rows, all axes but the last one counted as one, as a matrix."""
        return replace(self, shape=(stop - start, self.shape[-1]), data=self.data[start:stop])

    def source(self, name: str, order: np.ndarray | None = None) -> ExactTensor | DecodedTensor:
        """Return the tensor as a source.

        Args:
            name: what to call it.
            order: row i of the result is row `order[i]` here (int [rows]); None keeps the order.
        """
        if self.is_exact:
            return ExactTensor(name, self.shape, lambda: self._blocks(order))
        dtype = _PLAIN.get(self.kind, torch.float32)
        return DecodedTensor(name, self.shape, lambda: self._values(order), dtype, not self.is_plain)

    def values(self) -> np.ndarray:
        """Return the whole tensor as float32."""
        pieces = [piece.to(torch.float32).numpy() for piece in self._values(None)]
        return np.concatenate(pieces).reshape(self.shape)

    def _rows(self, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """Yield copies of runs of rows: what streams them may keep them, and the file's memory is read-only."""
        for rows in ranges(len(self.data), self.shape[-1] if self.shape else 1):
            yield self.data[rows].copy() if order is None else self.data[order[rows]]

    def _blocks(self, order: np.ndarray | None) -> Iterator[Q4Blocks]:
        for rows in self._rows(order):
            yield unpack_q4_0(torch.from_numpy(rows))

    def _values(self, order: np.ndarray | None) -> Iterator[torch.Tensor]:
        for rows in self._rows(order):
            if self.is_plain:
                yield torch.from_numpy(rows).view(_PLAIN[self.kind])
            else:
                yield torch.from_numpy(self._decoded(rows))

    def _decoded(self, rows: np.ndarray) -> np.ndarray:
        from quant.prequantized.gguf_blocks import LAYOUTS, decode_blocks  # numba, a second at every start otherwise

        if self.kind in LAYOUTS:
            return decode_blocks(self.kind, rows)
        from gguf import dequantize

        try:
            return np.ascontiguousarray(dequantize(rows, self.code), dtype=np.float32)
        except NotImplementedError as error:  # I8 to I64 and F64, which no model's weights have
            raise WeightError(
                f"{self.name}: its values are {self.kind}, which the gguf package does not decode.",
                "Convert the model again with float or GGUF block weights.",
            ) from error


def joined(name: str, shape: tuple[int, ...], pieces: Sequence[GgufTensor]) -> ExactTensor | DecodedTensor:
    """Return matrices one below the other as one source: with the blocks where all have them, in one dtype where they share it.

    Args:
        name: what to call it.
        shape: of the result; it may have more axes.
        pieces: at least one.
    """
    if all(piece.is_exact for piece in pieces):
        return ExactTensor(name, shape, lambda: (each for piece in pieces for each in piece._blocks(None)))
    kinds = {piece.kind for piece in pieces}
    dtype = _PLAIN.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32

    def values() -> Iterator[torch.Tensor]:
        return (each.to(dtype) for piece in pieces for each in piece._values(None))

    return DecodedTensor(name, shape, values, dtype, not all(piece.is_plain for piece in pieces))


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened GGUF file.

    Attributes:
        paths: its parts in order; of most models there is one.
        architecture: as llama.cpp names it, such as `llama`.
        tensors: by GGUF name, of all parts.
        numbers: metadata that are single numbers or truth values, by key.
        header: the mapped bytes of the first part that come before its tensors: all metadata.
    """

    paths: tuple[Path, ...]
    architecture: str
    tensors: Mapping[str, GgufTensor]
    numbers: Mapping[str, float | int | bool]
    header: memoryview


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file; no tensor is read.

    Raises:
        WeightError: it cannot be read, the `gguf` package is not installed, or a part of the model is missing.
        CorruptCheckpointError: it is no GGUF file, or ends early.
    """
    try:
        reader_class = gguf_reader()
    except ImportError as error:
        raise WeightError(
            f"{path}: reading GGUF files needs the gguf package.", "Install it: pip install gguf."
        ) from error
    try:
        reader = reader_class(path)
    except WeightError:  # a part is missing
        raise
    except FileNotFoundError as error:
        all_parts(path, named_parts(path))  # says that it is not the only one
        raise WeightError(f"{path}: no such file.") from error
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror}.") from error
    except Exception as error:  # a damaged file makes the reader fail wherever it happens to be
        raise CorruptCheckpointError(f"{path}: not a complete GGUF file ({error}).", "Download it again.") from error
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise CorruptCheckpointError(f"{path}: its architecture is missing.", "Download it again.")
    tensors = {str(tensor.name): _tensor(path, tensor) for tensor in reader.tensors}
    numbers = dict(_numbers(reader.fields))
    promised = numbers.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CorruptCheckpointError(
            f"{path}: its parts have {len(tensors)} tensors, but the first says {promised}.",
            "The parts belong to different models; download them again.",
        )
    header = memoryview(reader.data[: reader.data_offset]).cast("B")
    return GgufFile(tuple(reader.paths), _architecture(path, architecture), tensors, numbers, header)


def _architecture(path: Path, field: Any) -> str:
    try:
        return str(field.contents())
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{path}: its architecture is not text.", "Download it again.") from error


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float | int | bool]]:
    for name, field in fields.items():
        kind = field.types[0].name if len(field.types) == 1 else "ARRAY"
        value = field.contents() if kind not in ("ARRAY", "STRING") else None  # strings may be no text at all
        if isinstance(value, (float, int)):
            yield name, value


def _tensor(path: Path, tensor: Any) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
    rows = math.prod(shape[:-1])
    data = tensor.data.reshape(-1).view(np.uint8)
    # Rows of no values are as many as a file likes to say.
    if not data.nbytes or data.nbytes != int(tensor.n_bytes) or data.nbytes % rows:
        raise CorruptCheckpointError(f"{path}: tensor {tensor.name} is incomplete.", "Download the file again.")
    return GgufTensor(str(tensor.name), shape, tensor.tensor_type.name, data.reshape(rows, -1), tensor.tensor_type)
