"""Fourier transforms, on complex values carried as pairs: `tract_core_fft` and `tract_core_stft` want exactly those."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
import torch

from generic_export.nnef.graph import Argument, DimLiteral
from generic_export.ops.complex import as_complex_dtype, both_parts
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import given
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.complex_layout import COMPONENT_DTYPES, as_complex, as_pairs
from generic_export.translate.registry import translates

aten = torch.ops.aten

_COMPLEX_OF = {component: dtype for dtype, component in COMPONENT_DTYPES.items()}
# PyTorch's `normalization` argument: 0 none, 1 by sqrt(n), 2 by n.
_BY_ROOT, _BY_LENGTH = 1, 2


def _transform(b: NnefBuilder, value: Value, axes: Sequence[int], *, inverse: bool) -> Value:
    pairs = as_pairs(value)
    for axis in axes:
        attributes: dict[str, Argument] = {"axis": axis, "inverse": inverse}
        pairs = b.emit("tract_core_fft", [pairs], shape=pairs.shape, dtype=pairs.dtype, attributes=attributes)
    return as_complex(pairs)


def _normalised(b: NnefBuilder, value: Value, lengths: Sequence[Dim], normalization: int) -> Value:
    """Divide by the transform's length, or its root (a complex value, or a real one)."""
    if not normalization:
        return value
    length = volume(lengths)
    pairs = as_pairs(value) if value.dtype.is_complex else value
    if isinstance(length, int):
        factor = b.scalar(1.0 / (math.sqrt(length) if normalization == _BY_ROOT else length), pairs.dtype)
    else:
        factor = b.unary("rsqrt" if normalization == _BY_ROOT else "recip", b.scalar(length, pairs.dtype))
    scaled = b.binary("mul", pairs, factor)
    return as_complex(scaled) if value.dtype.is_complex else scaled


@translates(aten._fft_c2c.default)
def fft_c2c(b: NnefBuilder, self: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    axes = [axis_of(axis, self.rank) for axis in dim]
    result = _transform(b, self, axes, inverse=not forward)
    return _normalised(b, result, [self.shape[axis] for axis in axes], normalization)


@translates(aten._fft_r2c.default)
def fft_r2c(b: NnefBuilder, self: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    """_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor"""
    axes = [axis_of(axis, self.rank) for axis in dim]
    value = as_complex_dtype(b, self, _COMPLEX_OF[self.dtype])
    result = _normalised(
        b, _transform(b, value, axes, inverse=False), [self.shape[axis] for axis in axes], normalization
    )
    if not onesided:
        return result
    last = axes[-1]
    return b.slice(result, last, 0, simplify_dim(sympy.sympify(floor_div(self.shape[last], 2)) + 1))


@translates(aten._fft_c2r.default)
def fft_c2r(b: NnefBuilder, self: Value, dim: Sequence[int], normalization: int, last_dim_size: Dim) -> Value:
    """_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor"""
    axes = [axis_of(axis, self.rank) for axis in dim]
    last, size = axes[-1], last_dim_size
    bins = simplify_dim(sympy.sympify(floor_div(size, 2)) + 1)
    value = _transform(b, b.slice(self, last, 0, bins), axes[:-1], inverse=True)
    # The missing half is the mirrored conjugate: counted twice, the half that is there has the same real part.
    missing = simplify_dim(sympy.sympify(size) - sympy.sympify(bins))
    padded = b.concat([_doubled_inside(b, value, last, bins, size), _zeros(b, value, last, missing)], last)
    pairs = _transform(b, padded, [last], inverse=True)
    real, _ = both_parts(b, pairs)
    lengths = [size if axis == last else self.shape[axis] for axis in axes]
    return _normalised(b, real, lengths, normalization)


def _doubled_inside(b: NnefBuilder, value: Value, axis: int, bins: Dim, size: Dim) -> Value:
    """Double every frequency but 0 and, for an even size, the last one: 1 + min(k, 1) * min(size - 2 k, 1) times each."""
    pairs = as_pairs(value)
    one, two, whole = (b.scalar(number, pairs.dtype) for number in (1.0, 2.0, sympy.sympify(size)))
    places = b.cast(_range(b, bins), pairs.dtype)
    opposite = b.binary("min", b.binary("sub", whole, b.binary("mul", places, two)), one)
    times = b.binary("add", one, b.binary("mul", b.binary("min", places, one), opposite))
    return as_complex(
        b.binary("mul", pairs, b.unsqueeze(times, [other for other in range(pairs.rank) if other != axis]))
    )


def _zeros(b: NnefBuilder, value: Value, axis: int, count: Dim) -> Value:
    shape = (*value.shape[:axis], count, *value.shape[axis + 1 :], 2)
    return as_complex(b.full(shape, 0.0, COMPONENT_DTYPES[value.dtype]))


# --- short-time transforms -----------------------------------------------------------------------


@translates(aten.stft.default)
def stft(
    b: NnefBuilder,
    self: Value,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Value | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
) -> Value:
    """stft(Tensor self, int n_fft, int? hop_length=None, int? win_length=None, Tensor? window=None, ...) -> Tensor"""
    hop = hop_length or n_fft // 4
    real_input = not self.dtype.is_complex
    signal = self if self.rank == 2 else b.unsqueeze(self, [0])
    complex_dtype = _COMPLEX_OF[self.dtype] if real_input else self.dtype
    framed = _frames(b, as_complex_dtype(b, signal, complex_dtype), n_fft, hop, _centred(b, window, win_length, n_fft))
    spectrum = _normalised(b, framed, [n_fft], _BY_ROOT if normalized else 0)
    if onesided if onesided is not None else real_input:
        spectrum = b.slice(spectrum, 2, 0, n_fft // 2 + 1)
    result = b.transpose(spectrum, [0, 2, 1])
    result = result if self.rank == 2 else b.squeeze(result, [0])
    return result if return_complex or (return_complex is None and not real_input) else as_pairs(result)


def _centred(b: NnefBuilder, window: Value | None, win_length: int | None, n_fft: int) -> Value | None:
    """Return the window with zeros on both sides up to the frame's length; None when it is all ones."""
    length = n_fft if win_length is None else win_length
    if window is None:
        if length == n_fft:
            return None
        window = b.full((length,), 1.0, torch.get_default_dtype())
    before = (n_fft - length) // 2
    sides = [b.full((count,), 0.0, window.dtype) for count in (before, n_fft - length - before)]
    return b.concat([part for part in (sides[0], window, sides[1]) if not same_dim(part.shape[0], 0)], 0)


def _frames(b: NnefBuilder, signal: Value, n_fft: int, hop: int, window: Value | None) -> Value:
    """Return the spectrum of each frame, [batch, frame, bin]."""
    batch, length = signal.shape
    count = simplify_dim(sympy.sympify(floor_div(simplify_dim(sympy.sympify(length) - n_fft), hop)) + 1)
    pairs = as_pairs(signal)
    if window is None or b.label_of(window) is not None:
        inputs: list[Argument | Value] = [pairs, 1, n_fft, hop]
        inputs += [] if window is None else [window]
        shape = (batch, count, n_fft, 2)
        return as_complex(b.emit("tract_core_stft", inputs, shape=shape, dtype=pairs.dtype))
    # tract_core_stft takes a stored window only: one that the graph computes is put on frames picked by their index.
    framed = _picked_frames(b, pairs, count, n_fft, hop)
    weights = b.unsqueeze(b.cast(window, framed.dtype), [0, 1, 3])
    return _transform(b, as_complex(b.binary("mul", framed, weights)), [2], inverse=False)


def _picked_frames(b: NnefBuilder, pairs: Value, count: Dim, n_fft: int, hop: int) -> Value:
    starts = b.binary("mul", b.unsqueeze(_range(b, count), [1]), b.scalar(hop, torch.int64))
    indices = b.binary("add", starts, b.unsqueeze(_range(b, n_fft), [0]))
    attributes: dict[str, Argument] = {"axis": 1}
    shape = (pairs.shape[0], count, n_fft, 2)
    return b.emit("tract_core_gather", [pairs, indices], shape=shape, dtype=pairs.dtype, attributes=attributes)


def _range(b: NnefBuilder, count: Dim) -> Value:
    return b.emit("tract_core_range", [0, DimLiteral(dim_text(count)), 1], shape=[count], dtype=torch.int64)


# --- windows -------------------------------------------------------------------------------------


def _cosine_window(
    window_length: int,
    periodic: bool = True,
    *,
    dtype: torch.dtype | None = None,
    coefficients: Sequence[float],
    **placement: object,
) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    if window_length == 1:
        return torch.ones(1, dtype=dtype)
    steps = window_length if periodic else window_length - 1
    angle = torch.arange(window_length, dtype=torch.float64) * (2 * math.pi / steps)
    window = torch.zeros(window_length, dtype=torch.float64)
    for order, coefficient in enumerate(coefficients):
        window = window + torch.cos(angle * order) * ((-1.0) ** order * coefficient)
    return window.to(dtype)


for _packet, _coefficients in (
    (aten.hann_window, (0.5, 0.5)),
    (aten.hamming_window, (0.54, 0.46)),
    (aten.blackman_window, (0.42, 0.5, 0.08)),
):
    rewrites(_packet.default, _packet.periodic)(given(_cosine_window, coefficients=_coefficients))


@rewrites(aten.fft_fftfreq.default)
def fft_fftfreq(
    n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> torch.Tensor:
    """The frequencies of a transform, the negative ones last; `layout` and `pin_memory` say nothing of values."""
    steps = torch.cat([torch.arange((n + 1) // 2, device=device), torch.arange(-(n // 2), 0, device=device)])
    return steps.to(dtype or torch.get_default_dtype()) / (n * d)


@rewrites(aten.fft_rfftfreq.default)
def fft_rfftfreq(
    n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> torch.Tensor:
    """The frequencies of a transform of real numbers."""
    return torch.arange(n // 2 + 1, device=device).to(dtype or torch.get_default_dtype()) / (n * d)
