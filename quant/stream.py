"""Quantising while tensors stream: a float `TensorSource` in, one of blocks out, a piece of rows at a time.

One piece of rows at a time; the archive's writer streams several tensors at once, which is what keeps the processors busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from generic_export.errors import WeightError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.weights.half import SOURCE_DTYPES
from generic_export.weights.source import DerivedTensor, InMemoryTensor, TensorSource
from generic_export.weights.values import ROW_PIECE_VALUES, read_tensor, row_pieces
from quant.blocks import GROUP, StoredBlocks
from quant.packing import check_quantizable, pack_q4_0, pack_q8_1, unpack_q4_0, unpack_q8_1
from quant.protocol import InputStatistics, Quantizer, RowQuantizer

_ONE_PASS_VALUES = 1 << 20  # where nothing lies between values and blocks, only calls are to be saved


@dataclass(frozen=True)
class QuantizationError:
    """What quantising did to one tensor.

    Attributes:
        values: how many there are.
        squared_error: sum of (w - value)^2.
        energy: sum of w^2.
    """

    values: int = 0
    squared_error: float = 0.0
    energy: float = 0.0

    @property
    def relative_error(self) -> float:
        """Squared error as a share of the energy; 0 for a tensor of zeros."""
        return self.squared_error / self.energy if self.energy else 0.0

    def plus(self, other: QuantizationError) -> QuantizationError:
        """Return the sum of two parts of a tensor."""
        return QuantizationError(
            self.values + other.values, self.squared_error + other.squared_error, self.energy + other.energy
        )


@dataclass
class QuantizationReport:
    """Collects the quantization error of tensors while they are streamed.

    Args:
        errors: error by tensor name.
    """

    errors: dict[str, QuantizationError] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class QuantizedTensor(StoredBlocks, DerivedTensor):
    """A tensor source that quantizes another one while it streams.

    Args:
        source: float values [..., K]; rows are those of `row_length`.
        quantizer: algorithm; not used for `q8_1`.
        report: receives the error under the tensor's name when `chunks()` is consumed.
        block_format: `q4_0` or `q8_1`.
        statistics: statistics of the K inputs, for the algorithm.

    Raises:
        WeightError: the source is not a float tensor, or its rows are not multiples of 32.
    """

    source: TensorSource
    quantizer: Quantizer
    report: QuantizationReport
    block_format: str = "q4_0"
    statistics: InputStatistics | None = None

    def __post_init__(self) -> None:
        if self.source.dtype not in SOURCE_DTYPES:
            raise WeightError(
                f"tensor {self.name}: {self.source.dtype} cannot be quantised.", "Quantise f16, bf16, f32 or f64."
            )
        if not row_length(self.shape) or self.block_format not in BLOCK_FORMATS:
            raise WeightError(
                f"tensor {self.name}: shape {list(self.shape)} has no {self.block_format} form: rows must be whole groups "
                f"of {GROUP} values.",
                "Keep it in f16 or f32.",
            )

    def chunks(self) -> Iterator[memoryview]:
        """Yield the blocks in row order; raises whatever the source raises.

        Raises:
            WeightError: the tensor contains inf or NaN.
        """
        total = QuantizationError()
        for _, packed, error in self.pieces():
            total = total.plus(error)
            yield packed.reshape(-1).numpy().data
        self.report.errors[self.name] = total

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, QuantizationError]]:
        """Yield rows of the source, their blocks, and the error of these rows; raises as `chunks`."""
        values = ROW_PIECE_VALUES if self._in_one_pass is None else _ONE_PASS_VALUES
        for rows in row_pieces(self.source, row_length(self.shape), values):
            yield rows, *self._quantize(rows)

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, QuantizationError]:
        if (quantizer := self._in_one_pass) is not None:
            return self._quantize_rows(rows, quantizer)
        weight = rows.to(torch.float32)
        check_quantizable(weight, self.name)
        if self.block_format == "q8_1":
            packed = pack_q8_1(weight, name=self.name)
            return packed, measured_error(weight, unpack_q8_1(packed))
        blocks = self.quantizer.quantize(weight, self.statistics)
        return pack_q4_0(blocks), measured_error(weight, blocks.dequantize())

    @property
    def _in_one_pass(self) -> RowQuantizer | None:
        if self.block_format == "q4_0" and isinstance(self.quantizer, RowQuantizer):
            return self.quantizer
        return None

    def _quantize_rows(self, rows: torch.Tensor, quantizer: RowQuantizer) -> tuple[torch.Tensor, QuantizationError]:
        try:
            done = quantizer.quantize_rows(rows, self.statistics)
        except WeightError:
            check_quantizable(rows.to(torch.float32), self.name)  # inf or nan: says so with the tensor's name
            raise
        return done.data, QuantizationError(rows.numel(), done.squared_error, done.energy)


@dataclass(frozen=True, eq=False)
class Remainder(DerivedTensor):
    """What the Q4_0 blocks of a tensor leave of it, float32.

    Args:
        source: makes these blocks.
    """

    source: QuantizedTensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def chunks(self) -> Iterator[memoryview]:
        """The differences in row order; raises as those of the blocks."""
        for rows, packed, _ in self.source.pieces():
            left = rows.to(torch.float32) - unpack_q4_0(packed).dequantize().reshape(rows.shape)
            yield from InMemoryTensor(self.name, left).chunks()


@dataclass(frozen=True, eq=False)
class PermutedTensor(DerivedTensor):
    """A tensor source with the axes of another one in another order; it holds one whole tensor while it streams.

    Args:
        source: the tensor as stored.
        axes: axis `i` of the result is axis `axes[i]` of the source.
    """

    source: TensorSource
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape[axis] for axis in self.axes)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def chunks(self) -> Iterator[memoryview]:
        """The values in the new order; raises whatever the source raises."""
        yield from InMemoryTensor(self.name, read_tensor(self.source).permute(self.axes)).chunks()


@dataclass(frozen=True, eq=False)
class PackedBlocks(StoredBlocks, DerivedTensor):
    """Blocks that lie somewhere as plain bytes (calibration writes them to files), as a source of blocks.

    Args:
        source: uint8 [..., bytes of a row].
        block_format: of those bytes.
    """

    source: TensorSource
    block_format: str = "q4_0"

    @property
    def shape(self) -> tuple[int, ...]:
        block = BLOCK_FORMATS[self.block_format]
        return (*self.source.shape[:-1], self.source.shape[-1] // block.block_bytes * block.group)

    def chunks(self) -> Iterator[memoryview]:
        return self.source.chunks()


def row_length(shape: tuple[int, ...]) -> int:
    """Return how many consecutive values form a row that blocks divide, or 0 when there is no such row.

    The last axis where it is a multiple of 32, else all axes but the first (kernels of a convolution).
    """
    if len(shape) < 2 or not math.prod(shape):
        return 0
    if shape[-1] % GROUP == 0:
        return shape[-1]
    flattened = math.prod(shape[1:])
    return 0 if flattened % GROUP else flattened


def measured_error(weight: torch.Tensor, values: torch.Tensor) -> QuantizationError:
    """Return the error of float32 values against a float32 weight of the same shape."""
    flat, difference = weight.reshape(-1), (values - weight).reshape(-1)
    return QuantizationError(weight.numel(), float(torch.dot(difference, difference)), float(torch.dot(flat, flat)))
