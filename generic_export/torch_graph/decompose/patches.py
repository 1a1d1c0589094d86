"""What PyTorch would take apart, or look into, while a module is captured: kept whole inside `capture_patches()`.

`torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu` are unrolled step by step, which freezes the length of the sequence: here they stay
one operator (`ops/rnn.py`). Transformer layers neither take their fused path nor look at the values of their mask.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from generic_export.compat import (
    SYMBOLIC_MATH,
    OpOverload,
    extrema_simplified,
    kernels_replaced,
    list_device_constructors,
    pool_windows_counted,
    pytree,
    size_arithmetic_remembered,
    without_causal_hint,
    without_strides_of_transforms,
)
from generic_export.errors import CaptureError
from generic_export.torch_graph.decompose.pieces import Pieces, without_pieces
from generic_export.torch_graph.loops import loop
from generic_export.torch_graph.sizes.answers import proved_sizes
from generic_export.torch_graph.sizes.in_tensors import (
    as_size_or_tensor,
    as_sizes,
    divided,
    padded,
    size_in_tensor,
    sizes_or_none,
    stepped,
    with_sizes,
)
from generic_export.torch_graph.sizes.proofs import without_needless_extrema
from generic_export.torch_graph.sizes.ratios import whole_quotients
from generic_export.torch_graph.source_lines import short_stacks

Tensor = torch.Tensor


# `torch.cov` and `torch.corrcoef` without PyTorch's questions about the weights' values, which shapes alone do not
# answer.
def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of variables (rows) over observations (columns), as torch.cov's documentation defines it.

    Args:
        input: [variables, observations], or one variable's observations.
        correction, fweights, aweights: as of torch.cov; that weights are not negative is not looked at.
    """
    rows = torch.atleast_2d(input)
    observations = rows.shape[1]
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        total: Tensor | int = observations
        mean = rows.sum(1, keepdim=True) / observations
    else:
        total = weights.sum()
        mean = (rows * weights).sum(1, keepdim=True) / total
    centred = rows - mean
    degrees: Tensor | int
    if weights is None or aweights is None or correction == 0:
        degrees = total - correction
    else:
        # Without frequencies the weights themselves take their place.
        degrees = total - correction * (weights * aweights).sum() / total
    scaled = centred if weights is None else centred * weights
    positive = torch.clamp(degrees, min=0) if isinstance(degrees, Tensor) else max(degrees, 0)
    return ((scaled @ centred.mT.conj()) / positive).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Correlations of variables (rows): their covariance with deviations of 1, within [-1, 1]."""
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = torch.sqrt(torch.diagonal(covariance))
    result = covariance / deviations.unsqueeze(0) / deviations.unsqueeze(1)
    return result if result.is_complex() else torch.clamp(result, -1.0, 1.0)


_MODULE = "torchaudio.functional.filtering"
_FILTER = "_lfilter"


# `torch.linalg.lstsq` by the pseudo-inverse, while a module is captured: its own rank is a number of the data's.
class LeastSquares:
    """What `torch.linalg.lstsq` returns, of which the solution alone has a shape that is known.

    Attributes:
        solution: [..., N, K].
    """

    def __init__(self, solution: torch.Tensor) -> None:
        self.solution = solution

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            return self.solution
        raise CaptureError(
            "torch.linalg.lstsq: the number of residuals, the rank and the singular values depend on the data.",
            "Use the solution only: torch.linalg.lstsq(A, B).solution.",
        )

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in ("residuals", "rank", "singular_values"):
            return self[1]
        raise AttributeError(name)


def lstsq(
    input: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> LeastSquares:
    """Return the shortest X that makes A X nearest to B; where A is of full rank there is one only, whatever the driver.

    Args:
        input: A [..., M, N].
        b: B [..., M, K].
        rcond: singular values below this share of the largest count as 0; by default PyTorch's, epsilon times the longer side.
        driver: of LAPACK; all but `gels` give the shortest, and `gels` asks for full rank.
    """
    share = torch.finfo(input.dtype).eps * max(input.shape[-2:]) if rcond is None else rcond
    return LeastSquares(torch.linalg.pinv(input, rtol=share) @ b)


aten = torch.ops.aten


@contextmanager
def capture_patches() -> Iterator[None]:
    """Enter every patch below for the length of the block; nothing outlives it."""
    list_device_constructors()  # before functions are put in here that must not be among them
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            kernels_replaced(_SHAPES),  # shapes of recurrent layers, instead of their steps
            without_causal_hint(_is_causal),
            mock.patch("torch.linspace", _linspace),
            mock.patch("torch.tensor", _tensor),
            mock.patch("torch.nn.functional.scaled_dot_product_attention", _attention),
            _PlainFunctions(),
            _symbolic_math(),
            _gradients_off_once(),
            proved_sizes(),
            whole_quotients(),
            filters_as_loops(),
            extrema_simplified(without_needless_extrema),
            size_arithmetic_remembered(),
            short_stacks(),
            without_strides_of_transforms(),
            pool_windows_counted(_windows),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _gradients_off_once() -> Iterator[None]:
    """A capture computes no gradients: `torch.no_grad` in a model's code has nothing to do in it.

    torch.export notes where such a block begins and ends, and cuts its graph there; putting the parts together again takes
    time that grows with the square of their number (DeepSeek's 58 routers: two thirds of a capture).
    """
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__

    def entered(block: torch.no_grad) -> None:
        if torch.is_grad_enabled():
            enter(block)
        else:
            block.prev = False

    def left(block: torch.no_grad, *error: Any) -> None:
        if block.prev != torch.is_grad_enabled():
            leave(block, *error)

    with mock.patch.object(torch.no_grad, "__enter__", entered), mock.patch.object(torch.no_grad, "__exit__", left):
        yield


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """PyTorch compares the mask with a causal one, which needs its values; without that hint the mask itself is applied."""
    return bool(is_causal)


_make_tensor = torch.tensor
_get_item = torch.Tensor.__getitem__
_scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """Numbers made a tensor on the meta device have lost their values when the graph is read; those filled in keep them."""
    if isinstance(data, torch.SymInt | torch.SymFloat) and options.keys() <= {"dtype"}:
        return size_in_tensor(data, options.get("dtype"), device)
    sizes = sizes_or_none(data, device=device, **options) if options.keys() <= {"dtype"} else None
    if sizes is not None:
        return sizes  # type: ignore[return-value]
    if device is None or torch.device(device).type != "meta" or not _is_numbers(data):
        return _make_tensor(data, device=device, **options)
    dtype = options.pop("dtype", None) or (torch.bool if isinstance(data, bool) else _make_tensor(data).dtype)
    if isinstance(data, list | tuple):
        return torch.stack([_tensor(each, device=device, dtype=dtype, **options) for each in data])
    return torch.full((), data, dtype=dtype, device=device, **options)


def _is_numbers(data: Any) -> bool:
    """Say whether data is a number, or a list of numbers, or of such lists."""
    if isinstance(data, list | tuple):
        return bool(data) and all(map(_is_numbers, data))
    return isinstance(data, bool | int | float)


class _PlainFunctions(TorchFunctionMode):
    """What `_REPLACED` says in the place of what PyTorch has.

    A mode, since setting and deleting `torch.Tensor.__getitem__` makes tensors sequences for the rest of the process:
    `torch.tensor([torch.tensor(1)])` fails then.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(map(without_pieces, args))
        kwargs = {name: without_pieces(value) for name, value in (kwargs or {}).items()}
        return _REPLACED.get(func, func)(*args, **kwargs)


def _getitem(self: torch.Tensor, index: Any) -> Any:
    """Lists of places, such as `x[..., [-1]]`, keep their values on the meta device: see `_tensor`."""
    index = with_sizes(index)
    places = index if isinstance(index, tuple) else (index,)
    if self.device.type == "meta" and any(isinstance(each, list) and _is_numbers(each) for each in places):
        index = tuple(
            _tensor(each, device=self.device) if isinstance(each, list) and _is_numbers(each) else each
            for each in places
        )
    return _get_item(self, index)


def _chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """Chunks of an axis that changes; of batches that were put together, PyTorch counts them by a division that freezes the batch.

    Inputs that share a batch have symbols of their own here, equal by the end of the capture. That the chunks divide their sum is
    asked as a model's own code would; of one size it would be a condition that the model does not have.
    """
    size = input.shape[dim]
    if not isinstance(size, torch.SymInt) or chunks < 1:
        return input.chunk(chunks, dim)
    if len(size.node.expr.free_symbols) > 1 and size % chunks == 0:
        return input.split([size // chunks] * chunks, dim)
    return Pieces(input, (size + chunks - 1) // chunks, dim, lambda: aten.chunk.default(input, chunks, dim))


def _split(tensor: torch.Tensor, split_size_or_sections: Any = None, dim: int = 0, **options: Any) -> Any:
    """Pieces of one length, of an axis that changes."""
    length = options.get("split_size", split_size_or_sections)  # torch.Tensor.split calls it so
    if isinstance(length, int | torch.SymInt) and isinstance(tensor.shape[dim], torch.SymInt) and length > 0:
        return Pieces(tensor, length, dim, lambda: aten.split.Tensor(tensor, length, dim))
    return tensor.split(length, dim)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "") -> torch.Tensor:
    """Distances without the question whether there are more than 25, for which PyTorch has another kernel."""
    return torch.cdist(x1, x2, p, compute_mode="donot_use_mm_for_euclid_dist")


def _one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
    """As many classes as a size says: PyTorch asks for the number."""
    if not isinstance(num_classes, torch.SymInt):
        return torch.nn.functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _tensor_split(input: torch.Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
    """Sections of a size that changes: PyTorch gives each the size that it has in the example."""
    size, sections = input.shape[dim], indices_or_sections
    if not isinstance(sections, int) or not isinstance(size, torch.SymInt) or sections < 1:
        return input.tensor_split(indices_or_sections, dim)
    return input.split([(size + sections - 1 - place) // sections for place in range(sections)], dim)


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`is_causal=length > 1 and ...` is no bool where the length is a size: transformers' models say so."""
    args, kwargs = pytree.tree_map_only(torch.SymBool, bool, (args, kwargs))
    return _scaled_dot_product_attention(*args, **kwargs)


def _unchunked_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> torch.Tensor:
    """Computed batch by batch it saves memory of gradients, in an operator that does not export; the loss is the same."""
    return torch.nn.functional.linear_cross_entropy(*args, **kwargs)


def _interpolate(input: torch.Tensor, size: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """To sizes that numbers stand for, which PyTorch does not take."""
    return torch.nn.functional.interpolate(input, as_sizes(size), *args, **kwargs)


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.interpolate: _interpolate,
    _get_item: _getitem,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.cdist: _cdist,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.nn.functional.one_hot: _one_hot,
    torch.as_tensor: as_size_or_tensor,
    torch.div: divided,
    torch.arange: stepped,
    torch.nn.functional.pad: padded,
    torch.linalg.lstsq: lstsq,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
    getattr(torch.nn.functional, "linear_cross_entropy", None): _unchunked_cross_entropy,  # not in older releases
}


@contextmanager
def _symbolic_math() -> Iterator[None]:
    """`math.sqrt(x.shape[1])` asks a symbolic size for its value, which freezes it: torch has a function that does not."""
    with ExitStack() as stack:
        for name, symbolic in SYMBOLIC_MATH.items():
            stack.enter_context(mock.patch.object(math, name, _on_sizes(getattr(math, name), symbolic)))
        yield


def _on_sizes(plain: Callable[..., float], symbolic: Callable[[Any], Any]) -> Callable[..., Any]:
    @wraps(plain)
    def function(*args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return symbolic(args[0])
        return plain(*args)

    return function


_plain_linspace = torch.linspace


def _linspace(
    start: float | torch.Tensor, end: float | torch.Tensor, steps: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`torch.linspace` takes plain numbers of steps only, and would freeze a size: both halves as PyTorch computes them."""
    tensors = isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor)
    if tensors or args or kwargs.get("out") is not None or not isinstance(steps, torch.SymInt):
        return _plain_linspace(start, end, steps, *args, **kwargs)
    positions = torch.arange(steps, device=kwargs.get("device"))
    last = torch.sym_max(steps - 1, 1)
    step = (end - start) / last
    values = torch.where(positions < steps // 2, start + step * positions, end - step * (steps - 1 - positions))
    values = torch.where(positions == 0, start, values)  # of one value, it is the start
    return values.to(kwargs.get("dtype") or torch.get_default_dtype())


# --- recurrent layers ------------------------------------------------------------------------------


def _layer_shapes(
    input: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Results of lstm.input, whose states are two, and of gru.input, rnn_tanh.input and rnn_relu.input, which have one."""
    if train and dropout > 0:
        raise CaptureError("a recurrent layer in training mode has active dropout.", "Call model.eval() first.")
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    outputs = input.new_empty(*input.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1))
    return outputs, *map(torch.empty_like, states)


def _windows(size: Any, kernel: int, before: int, after: int, stride: int, dilation: int, ceil_mode: bool) -> Any:
    """Return how many windows a pool has; PyTorch asks the example whether the last one begins inside (ATen/native/Pool.h)."""
    field = dilation * (kernel - 1) + 1
    if not ceil_mode:
        return (size + before + after - field) // stride + 1
    if stride + after > field:  # the last one that begins inside the image
        return (size + before - 1) // stride + 1
    return (size + before + after - field + stride - 1) // stride + 1


def _pooled(*args: Any, **kwargs: Any) -> torch.Tensor:
    """max_pool1d as its sibling computes it: PyTorch's own kernel, alone among the pools, freezes a dynamic length."""
    values, _ = aten.max_pool1d_with_indices.default(*args, **kwargs)
    return values


_SHAPES: dict[OpOverload, Callable[..., Any]] = {
    aten.max_pool1d.default: _pooled,
    aten.lstm.input: _layer_shapes,
    aten.gru.input: _layer_shapes,
    aten.rnn_tanh.input: _layer_shapes,
    aten.rnn_relu.input: _layer_shapes,
}


# torchaudio's recursive filters (`lfilter`, and all biquads) as one loop of the graph, while a module is captured.
# Their loop over samples is an operator of torchaudio's own, or one of Python's, that writes into its argument.
@contextmanager
def filters_as_loops() -> Iterator[None]:
    """Replace the function under `torchaudio.functional.lfilter`, where that is imported, for the length of the block."""
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FILTER):
        yield
        return
    with mock.patch.object(module, _FILTER, filtered):
        yield


def filtered(waveform: torch.Tensor, a_coeffs: torch.Tensor, b_coeffs: torch.Tensor) -> torch.Tensor:
    """Return y with a_0 y[t] = sum_k b_k x[t - k] - sum_(k > 0) a_k y[t - k] (torchaudio.functional.lfilter, not clamped).

    Args:
        waveform: x [B, C, T].
        a_coeffs, b_coeffs: [C, order + 1].
    """
    first, order = a_coeffs[:, :1], a_coeffs.shape[1] - 1
    taps = (b_coeffs / first).flip(1).unsqueeze(1)
    driven = F.conv1d(F.pad(waveform, (order, 0)), taps, groups=a_coeffs.shape[0])
    if order == 0:
        return driven
    feedback = (a_coeffs[:, 1:] / first).T.unsqueeze(1)  # [order, 1, C], the last sample's first
    past = torch.zeros_like(driven[:, :, :1]).squeeze(2).expand(order, *driven.shape[:2])
    _, (samples,) = loop(_sample, [past, feedback], [driven.permute(2, 0, 1)])
    return samples.permute(1, 2, 0)


def _sample(states: list[torch.Tensor], slices: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    past, feedback = states
    given = slices[0] - (feedback * past).sum(0)
    return [torch.cat([given.unsqueeze(0), past[:-1]]), feedback], [given]
