"""Eager `torch.ao` int8 modules, which PyTorch cannot capture: for the length of a block each is its own spelled-out form.

In: a converted model. Out: the same model whose quantised modules take and return dequantised floats, through
`quantized_decomposed` operators (`ops/quantised.py`). What a module computes stays on the grid it was calibrated for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.ao.nn.intrinsic.quantized as fused
import torch.ao.nn.quantized as eager
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from generic_export.compat import children_of, quantized_decomposed, without_modes
from generic_export.errors import UnsupportedOperatorError
from generic_export.torch_graph.fusion import without_dead_ops
from generic_export.torch_graph.ir import TensorVariable, TorchModuleIRGraph, TorchOp

_quantized = quantized_decomposed()
_BYTES = {torch.quint8: (torch.uint8, 0, 255), torch.qint8: (torch.int8, -128, 127)}
_NAMESPACES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
_ADVICE = "Leave that module unquantized (qconfig = None), or quantize it with PT2E."


class OnGrid(nn.Module):
    """Rounds floats to the grid of a quantised tensor.

    Args:
        scale: size of a step.
        zero_point: the integer that stands for 0.
        dtype: `torch.quint8` or `torch.qint8`.
    """

    def __init__(self, scale: float, zero_point: int, dtype: torch.dtype = torch.quint8) -> None:
        super().__init__()
        self.scale, self.zero_point = float(scale), int(zero_point)
        self.dtype, self.low, self.high = _BYTES[dtype]

    def forward(self, x: Tensor) -> Tensor:
        return self._dequantised(_quantized.quantize_per_tensor(x, self.scale, *self._integers))

    def steps(self, x: Tensor) -> Tensor:
        """Return how many steps from 0 the elements of a tensor on this grid are: whole numbers, in f32."""
        return _quantized.quantize_per_tensor(x, self.scale, *self._integers).float() - self.zero_point

    def rounded(self, steps: Tensor, name: str) -> Tensor:
        """Return the nearest elements of the grid, counted in steps: an average lies on a half too often for floats.

        Halves go to the even integer before the zero point is added or after it, as the kernel of that name has it.

        Args:
            steps: averages.
            name: function that computed them, one of `_AVERAGED`.
        """
        before = _halves_before_zero_point(name, int(steps.shape[1]) if steps.dim() > 2 else 1)
        if all(before):
            return self._dequantised(self._rounded_before(steps))
        if not any(before):
            return self._dequantised(self._rounded_after(steps))
        channels = torch.tensor(before).reshape(-1, *[1] * (steps.dim() - 2))
        return self._dequantised(torch.where(channels, self._rounded_before(steps), self._rounded_after(steps)))

    def _rounded_before(self, steps: Tensor) -> Tensor:
        result: Tensor = _quantized.quantize_per_tensor(steps, 1.0, *self._integers)
        return result

    def _rounded_after(self, steps: Tensor) -> Tensor:
        result: Tensor = _quantized.quantize_per_tensor(steps + self.zero_point, 1.0, 0, *self._integers[1:])
        return result

    @property
    def _integers(self) -> tuple[int, int, int, torch.dtype]:
        return self.zero_point, self.low, self.high, self.dtype

    def _dequantised(self, integers: Tensor) -> Tensor:
        result: Tensor = _quantized.dequantize_per_tensor(integers, self.scale, *self._integers)
        _GRIDS[result] = self
        return result


# The grid that a tensor of a running forward lies on; entries die with their tensors.
_GRIDS: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Averages of quantised tensors are rounded to the grid of their input.
_AVERAGED = frozenset(
    {"mean", "interpolate"} | {f"{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in (1, 2, 3)}
)
# So are bounds and extrema; most results lie on it already, and the layer behind finds integers again.
_BOUNDED = frozenset(
    {"relu", "relu_", "relu6", "hardtanh", "clamp"} | {f"{kind}max_pool{n}d" for kind in ("", "_") for n in (1, 2, 3)}
)
# What moves elements; `ops/integer_products.py` looks through most of these.
_MOVED = frozenset(
    "reshape view flatten squeeze unsqueeze permute transpose contiguous clone dropout __getitem__ select narrow t".split()  # noqa: SIM905
)
# Functions whose result has a grid of its own (ATen/native/quantized/cpu: qsigmoid.cpp, qtanh.cpp, qhardsigmoid.cpp).
_OWN_GRIDS = {"sigmoid": (1 / 256, 0), "hardsigmoid": (1 / 256, 0), "tanh": (2 / 256, 128)}


@cache
def _halves_before_zero_point(name: str, channels: int) -> tuple[bool, ...]:
    """Ask a kernel for averages of quantised tensors how it rounds halves in each channel.

    Releases of PyTorch differ, and in some of them so do channels: what fills a vector of the processor, and the rest.

    Args:
        name: function, one of `_AVERAGED`.
        channels: of the tensor, which lie last as behind a convolution.

    Returns:
        For each channel, whether a half goes to the even integer before the zero point is added.
    """
    rank = int(name[-2]) if name.endswith("d") else 2
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)
    with without_modes():
        pair = torch.tensor([3.0, 4.0]).expand(1, channels, *[1] * (rank - 1), 2).contiguous(memory_format=layout)
        quantised = torch.quantize_per_tensor(pair, 1.0, 1, torch.quint8)  # 4 and 5; their average is 3.5 steps, or 4.5
        if name == "mean":
            result = quantised.mean(tuple(range(2, rank + 2)))
        elif name == "interpolate":
            result = functional.interpolate(quantised, size=(1, 1), mode="bilinear", align_corners=False)
        elif name.startswith("adaptive"):
            result = getattr(functional, name)(quantised, 1)
        else:
            result = getattr(functional, name)(quantised, (*[1] * (rank - 1), 2))
        return tuple(value == 5 for value in result.int_repr().flatten().tolist())


class GridKeeping(TorchFunctionMode):
    """Rounds what a forward computes on quantised tensors outside of quantised modules, as PyTorch's kernels do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        grid = _GRIDS.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if grid is not None and name in _AVERAGED:
            return grid.rounded(func(grid.steps(args[0]), *args[1:], **(kwargs or {})), name)
        result = func(*args, **(kwargs or {}))
        if grid is None or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if name in _OWN_GRIDS:
            return OnGrid(*_OWN_GRIDS[name])(result)
        if name in _BOUNDED:
            return grid(result)
        if name in _MOVED:
            _GRIDS[result] = grid
        return result


class SpelledOut(nn.Module):
    """A float function, then the grid of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor], grid: OnGrid) -> None:
        super().__init__()
        self.function, self.grid = function, grid

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.grid(self.function(x))
        return result


class IntegerWeights(nn.Module):
    """A linear layer or convolution: integer weights, a float bias, perhaps a ReLU, then the grid of the result."""

    weight: Tensor
    bias: Tensor | None
    zero_points: Tensor | None

    def __init__(self, layer: Any, apply: Callable[[Tensor, Tensor, Tensor | None], Tensor], relu: bool) -> None:
        super().__init__()
        weight, bias = layer.weight(), layer.bias()
        self.per_channel = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        if self.per_channel:
            self.register_buffer("scales", weight.q_per_channel_scales().float())
            offsets = weight.q_per_channel_zero_points()
            self.register_buffer("zero_points", offsets if bool(offsets.any()) else None)
        else:
            self.scale, self.zero_point = weight.q_scale(), weight.q_zero_point()
        self.register_buffer("weight", weight.int_repr())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.apply_layer, self.relu = apply, relu
        self.grid = OnGrid(layer.scale, layer.zero_point)

    def forward(self, x: Tensor) -> Tensor:
        if self.per_channel:
            w = _quantized.dequantize_per_channel(self.weight, self.scales, self.zero_points, 0, -128, 127, torch.int8)
        else:
            w = _quantized.dequantize_per_tensor(self.weight, self.scale, self.zero_point, -128, 127, torch.int8)
        y = self.apply_layer(x, w, self.bias)
        result: Tensor = self.grid(y.relu() if self.relu else y)
        return result


class Arithmetic(nn.Module):
    """`QFunctional`: arithmetic between quantised tensors, on the grid of its result."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.grid = OnGrid(module.scale, module.zero_point)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._on_grid(x + y)

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        return self._on_grid((x + y).relu())

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return self._on_grid(x * y)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        return self._on_grid(torch.cat(list(tensors), dim))

    def _on_grid(self, x: Tensor) -> Tensor:
        result: Tensor = self.grid(x)
        return result


# --- which module becomes what ----------------------------------------------------------------------

_CONVOLUTIONS = {
    eager.Conv1d: functional.conv1d,
    eager.Conv2d: functional.conv2d,
    eager.Conv3d: functional.conv3d,
}
_WITH_RELU = (fused.LinearReLU, fused.ConvReLU1d, fused.ConvReLU2d, fused.ConvReLU3d)
_FUNCTIONS: dict[type[nn.Module], Callable[[Any], Callable[[Tensor], Tensor]]] = {
    eager.Hardswish: lambda module: functional.hardswish,
    eager.LeakyReLU: lambda module: lambda x: functional.leaky_relu(x, module.negative_slope),
    eager.ELU: lambda module: lambda x: functional.elu(x, module.alpha),
    eager.Softmax: lambda module: lambda x: functional.softmax(x, module.dim),
    eager.Sigmoid: lambda module: torch.sigmoid,
}
# Their results lie on the grid of their input, and their forwards take floats as well.
_AS_THEY_ARE = (nn.MaxPool2d, nn.Dropout)


def _spelled_out(module: Any) -> nn.Module | None:
    """Return the spelled-out form of a quantised module; None for what needs none, or has none."""
    if isinstance(module, eager.Quantize):
        return OnGrid(float(module.scale), int(module.zero_point), module.dtype)
    if isinstance(module, eager.DeQuantize):
        return nn.Identity()
    if isinstance(module, eager.ReLU6):
        return nn.ReLU6()
    if isinstance(module, eager.QFunctional):
        return Arithmetic(module)
    relu = isinstance(module, _WITH_RELU)
    if type(module) in (eager.Linear, fused.LinearReLU):
        return IntegerWeights(module, functional.linear, relu)
    convolution = next((call for kind, call in _CONVOLUTIONS.items() if isinstance(module, kind)), None)
    if convolution is not None and module.padding_mode == "zeros" and type(module) in (*_CONVOLUTIONS, *_WITH_RELU):
        return IntegerWeights(module, _convolving(module, convolution), relu)
    function = _FUNCTIONS.get(type(module))
    if function is None:
        return None
    scale = getattr(module, "scale", None) or getattr(module, "output_scale", None)
    zero_point = getattr(module, "zero_point", None) or getattr(module, "output_zero_point", None)
    return SpelledOut(function(module), OnGrid(float(scale or 1.0), int(zero_point or 0)))


def _convolving(module: Any, function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups
    return lambda x, w, bias: function(x, w, bias, stride, padding, dilation, groups)


def _is_quantised(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_NAMESPACES)


def takes_quantised(module: nn.Module) -> bool:
    """Say whether a module is one of those that take quantised tensors and no floats."""
    return _is_quantised(module) and not isinstance(module, (eager.Quantize, *_AS_THEY_ARE))


@contextmanager
def spelled_out(model: nn.Module) -> Iterator[None]:
    """Put every quantised module's spelled-out form in its place for the length of the block.

    Raises:
        UnsupportedOperatorError: a quantised module has no such form; it is named with its path.
    """
    originals: list[tuple[nn.Module, str, nn.Module]] = []
    forms: dict[int, nn.Module] = {}
    try:
        for path, parent in list(model.named_modules(remove_duplicate=True)):
            children = [] if _is_quantised(parent) else list(parent.named_children())
            for name, child in children:
                if not _is_quantised(child) or isinstance(child, _AS_THEY_ARE):
                    continue
                form = forms.get(id(child)) or _spelled_out(child)
                if form is None:
                    where = f"{path}.{name}".lstrip(".")
                    raise UnsupportedOperatorError(f"{type(child).__name__} at {where}: no NNEF form.", _ADVICE)
                forms[id(child)] = form.eval()
                originals.append((parent, name, child))
                children_of(parent)[name] = form
        with GridKeeping() if originals else nullcontext():
            yield
    finally:
        for parent, name, child in originals:
            children_of(parent)[name] = child


def without_zero_offsets(graph: TorchModuleIRGraph, tensor_of: Callable[[str], Tensor | None]) -> TorchModuleIRGraph:
    """Return the graph with `zero_points=None` where a stored tensor of them is all zero, which spares their subtraction.

    Args:
        graph: what was captured.
        tensor_of: a stored tensor by its name; None when its values are not known.
    """

    def simplified(op: TorchOp) -> TorchOp:
        if op.target is not _quantized.dequantize_per_channel.default or len(op.args) < 3:
            return op
        offsets = op.args[2]
        stored = tensor_of(offsets.name) if isinstance(offsets, TensorVariable) else None
        if stored is None or stored.is_meta or bool(stored.any()):
            return op
        return replace(op, args=(*op.args[:2], None, *op.args[3:]))

    return without_dead_ops(replace(graph, ops=tuple(simplified(op) for op in graph.ops)))


__all__ = ["spelled_out", "takes_quantised", "without_zero_offsets"]
