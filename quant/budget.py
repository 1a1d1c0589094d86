"""Filling a size: which tensors stay plain when not all of them may.

In: what each tensor takes in either form, and how sensitive it is. Out: the names that stay plain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from generic_export.errors import OptionError
from generic_export.sizes import parse_size
from generic_export.weights.source import TensorSource
from generic_export.weights.values import row_pieces
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM
from quant.blocks import TWICE
from quant.packing import check_quantizable, pack_q8_1, unpack_q8_1
from quant.protocol import InputStatistics, Quantizer
from quant.stream import QuantizationError, measured_error, row_length

_SAMPLED_ROWS = 8  # one row in so many is quantised to estimate a tensor's error
_KNAPSACK_STEPS = 4096
_GROWTH = re.compile(r"\s*\+(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", re.ASCII)
_LARGEST_OUTLIER_FACTOR = 2.0

# How much KL divergence a relative error of a kind of tensor costs, relative to query projections. Measured on SmolLM2-135M
# with the 30 tensors of one kind quantised at a time (mean KL: q 0.010, k 0.009, o 0.011, gate 0.022, up 0.050, v 0.068,
# down 0.092), and drawn together a little, since it is one small model.
_KIND_FACTORS = {
    "v_proj": 6.0,
    "down_proj": 6.0,
    "up_proj": 4.0,
    "gate_proj": 2.0,
}
_ROLE_FACTORS = {"@head": 3.0, "@embeddings": 1.0}  # not measured: recipes that mix keep heads first
_EDGE_FACTOR = 1.5  # the first and the last eighth of the layers, as recipes that mix do; not measured


@dataclass(frozen=True)
class TargetSize:
    """What all weights may take: so many bytes, or so much more than with everything quantised.

    Attributes:
        bytes: of all weights; None where `growth` says it.
        growth: 0.1 for a tenth more than the least.
    """

    bytes: int | None = None
    growth: float = 0.0

    def above(self, smallest: int) -> int:
        """Return the bytes that may be filled when everything quantised takes `smallest`."""
        return self.bytes if self.bytes is not None else int(smallest * (1 + self.growth))

    def written(self) -> int | str:
        """Return it as `parse_target` reads it."""
        return self.bytes if self.bytes is not None else f"+{100 * self.growth:g}%"


def parse_target(text: str | float) -> TargetSize:
    """Return a target: a size (`900MB`), or a share on top of the least (`+10%`).

    Raises:
        OptionError: it is neither.
    """
    found = _GROWTH.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        return TargetSize(growth=float(found[1]) / 100)
    if isinstance(text, str) and text.lstrip().startswith("+"):
        raise OptionError(f"{text[:40]!r} is not a size.", "Write a share such as +10%, or a size such as 900MB.")
    return TargetSize(parse_size(text, positive=True))


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


def kept_plain(candidates: Sequence[Candidate], other_bytes: int, target: TargetSize) -> set[str]:
    """Choose the tensors that stay plain: as much harm avoided as fits.

    Args:
        candidates: all of them quantised is where it starts.
        other_bytes: what the tensors that are no candidates take.
        target: for all tensors together.

    Raises:
        OptionError: even with everything quantised the budget is exceeded.
    """
    smallest = other_bytes + sum(candidate.quantized_bytes for candidate in candidates)
    budget = target.above(smallest)
    if smallest > budget:
        raise OptionError(
            f"the weights take {smallest / 1e6:.1f} MB when everything possible is quantized, more than "
            f"the requested {budget / 1e6:.1f} MB.",
            f"Use --target-size {math.ceil(smallest / 1e5) / 10}MB or more.",
        )
    free = [candidate for candidate in candidates if candidate.extra_bytes <= 0]
    return {candidate.name for candidate in free} | _fullest(
        [candidate for candidate in candidates if candidate.extra_bytes > 0],
        budget - smallest - sum(candidate.extra_bytes for candidate in free),
    )


def _fullest(candidates: Sequence[Candidate], room: int) -> set[str]:
    """Solve the knapsack: the most harm avoided in the room there is, sizes rounded up to a few thousandths of it."""
    unit = max(1, -(-room // _KNAPSACK_STEPS))
    steps = room // unit
    best = torch.zeros(steps + 1, dtype=torch.float64)
    taken = torch.zeros((len(candidates), steps + 1), dtype=torch.bool)
    for index, candidate in enumerate(candidates):
        size = -(-candidate.extra_bytes // unit)
        if size <= steps:
            with_it = best[: steps + 1 - size] + candidate.sensitivity
            taken[index, size:] = with_it > best[size:]
            best[size:] = torch.maximum(best[size:], with_it)
    kept: set[str] = set()
    left = steps
    for index in reversed(range(len(candidates))):
        if bool(taken[index, left]):
            kept.add(candidates[index].name)
            left -= -(-candidates[index].extra_bytes // unit)
    return kept | _rest(candidates, kept, room)


def _rest(candidates: Sequence[Candidate], kept: set[str], room: int) -> set[str]:
    """Fill what rounding left over, by harm per byte."""
    room -= sum(candidate.extra_bytes for candidate in candidates if candidate.name in kept)
    added: set[str] = set()
    for candidate in sorted(candidates, key=lambda each: each.sensitivity / each.extra_bytes, reverse=True):
        if candidate.name not in kept and candidate.extra_bytes <= room:
            added.add(candidate.name)
            room -= candidate.extra_bytes
    return added


def weight_sensitivity(
    source: TensorSource,
    quantizer: Quantizer,
    block_format: str = "q4_0",
    statistics: InputStatistics | None = None,
) -> float:
    """Estimate how wrong a tensor's outputs become by quantising it: squared error over energy, on a sample of rows.

    With statistics both are weighted by the power of each input channel, E[x^2]: then it is the error of the outputs of a
    product, as far as its inputs are uncorrelated. Without them the error of the weights hardly differs between tensors
    and is corrected by how far their values are from normal: outliers in one place mostly come with outliers in another.

    Args:
        source: plain float values whose rows are whole groups of 32.
        quantizer: chooses the values of `q4_0`.
        block_format: one of `quant.recipe.QUANTIZED_SCHEMES`.
        statistics: of the inputs, if known.

    Raises:
        WeightError: the tensor holds inf or nan.
    """
    length = row_length(source.shape)
    known = statistics is not None and statistics.mean_square.shape == (length,)
    root = statistics.mean_square.clamp(min=0).sqrt() if statistics is not None and known else None
    total, moments = QuantizationError(), _Moments()
    for rows in row_pieces(source, length):
        sample = rows[::_SAMPLED_ROWS].to(torch.float32)
        check_quantizable(sample, source.name)
        values = rounded(sample, quantizer, block_format, source.name, statistics if known else None)
        moments = moments.plus(sample)
        weighted = (sample, values) if root is None else (sample * root, values * root)
        total = total.plus(measured_error(*weighted))
    return total.relative_error * (1.0 if known else moments.outlier_factor())


def rounded(
    rows: torch.Tensor, quantizer: Quantizer, block_format: str, name: str, statistics: InputStatistics | None
) -> torch.Tensor:
    """Return the values that blocks of some rows hold.

    Args:
        rows: float32 [N, K], whole groups of 32.
        quantizer: chooses the values of `q4_0`.
        block_format: one of `quant.recipe.QUANTIZED_SCHEMES`.
        name: of the tensor, for errors.
        statistics: of the K inputs, if the quantizer is to look at them.

    Raises:
        WeightError: values are not finite, or the statistics have another number of channels.
    """
    if block_format == "q8_1":
        return unpack_q8_1(pack_q8_1(rows, name=name))
    if block_format == TWICE:
        search = BUILT_IN[DEFAULT_ALGORITHM]
        values = search.quantize(rows).dequantize()
        return values + search.quantize(rows - values).dequantize()
    return quantizer.quantize(rows, statistics).dequantize()


@dataclass(frozen=True)
class _Moments:
    """Sums of squares and fourth powers, relative to the first piece's scale."""

    count: int = 0
    second: float = 0.0
    fourth: float = 0.0

    def plus(self, values: torch.Tensor) -> _Moments:
        squares = values.double().square()
        return _Moments(
            self.count + values.numel(),
            self.second + float(squares.sum()),
            self.fourth + float(squares.square().sum()),
        )

    def outlier_factor(self) -> float:
        """Return the fourth root of the kurtosis over that of a normal distribution, from 1 to 2."""
        if not self.second:
            return 1.0
        kurtosis = self.count * self.fourth / self.second**2
        return float(min(max((kurtosis / 3.0) ** 0.25, 1.0), _LARGEST_OUTLIER_FACTOR))


def kind_factor(name: str, role: str, layers: int) -> float:
    """Return how much an error of this kind of tensor weighs, relative to that of a query projection in a middle layer.

    Args:
        name: of the parameter.
        role: `@head`, `@embeddings`, `@linears` or "".
        layers: number of decoder layers.
    """
    if role in _ROLE_FACTORS:
        return _ROLE_FACTORS[role]
    kind = next((factor for part, factor in _KIND_FACTORS.items() if part in name), 1.0)
    layer = _layer(name)
    edge = max(1, layers // 8)
    return kind * (_EDGE_FACTOR if layer is not None and (layer < edge or layer >= layers - edge) else 1.0)


def layer_count(names: Iterable[str]) -> int:
    """Return how many decoder layers the parameters of these names come from."""
    return max((layer + 1 for layer in map(_layer, names) if layer is not None), default=0)


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None
