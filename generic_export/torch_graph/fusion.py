"""Rewrites that recognise what a group of operators means, so that it reaches the engine as one operator.

Each fusion looks at one root operator and answers with its replacement, or None. `apply_fusions` returns a new graph;
operators that only the replaced ones read disappear with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy
import torch

from generic_export.compat import OpOverload
from generic_export.torch_graph.dims import simplify_dim
from generic_export.torch_graph.ir import TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp, is_dim

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten._to_copy.default)


class GraphView:
    """What a fusion may ask about the graph around its root."""

    def __init__(self, graph: TorchModuleIRGraph) -> None:
        self._producers = graph.producers()
        self._uses = graph.use_counts()
        self._constants = graph.constants
        self.numbers: dict[str, torch.Tensor | None] = {}
        """What is known of tensors all of whose values are one number, by name; see `known_numbers`."""

    def made_by(self, value: object, *targets: OpOverload) -> TorchOp | None:
        """Return the operator that makes `value`, when it is a call of one of `targets`."""
        if not isinstance(value, TensorVariable):
            return None
        op = self._producers.get(value.name)
        return op if op is not None and op.target in targets else None

    def maker(self, value: TensorVariable) -> TorchOp | None:
        """Return the operator that makes `value`; None for inputs and stored tensors."""
        return self._producers.get(value.name)

    def constant(self, value: TensorVariable) -> torch.Tensor | None:
        """Return what the module itself gives `value`, when that is known at capture."""
        known = self._constants.get(value.name)
        return None if known is None or known.device.type == "meta" else known

    def is_read_once(self, value: TensorVariable) -> bool:
        """Say whether a single operator reads `value`, and no output of the graph is it."""
        return self._uses.get(value.name, 0) == 1


Fusion = Callable[[GraphView, TorchOp], TorchOp | None]


def apply_fusions(graph: TorchModuleIRGraph, fusions: Sequence[Fusion]) -> TorchModuleIRGraph:
    """Return the graph after each fusion, in order, was offered every operator."""
    for fusion in fusions:
        view = GraphView(graph)
        ops = tuple(fusion(view, op) or op for op in graph.ops)
        graph = without_dead_ops(replace(graph, ops=ops))
    return graph


def without_dead_ops(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Return the graph without operators, parameters and constants that no output depends on."""
    needed = {output.name for output in graph.outputs}
    live: list[TorchOp] = []
    for op in reversed(graph.ops):
        if any(output is not None and output.name in needed for output in op.outputs):
            live.append(op)
            needed.update(tensor.name for tensor in op.tensor_inputs())
    return replace(
        graph,
        ops=tuple(reversed(live)),
        parameters=tuple(parameter for parameter in graph.parameters if parameter.name in needed),
        constants={name: value for name, value in graph.constants.items() if name in needed},
    )


def _either_order(op: TorchOp) -> list[tuple[object, object]]:
    return [(op.args[0], op.args[1]), (op.args[1], op.args[0])] if len(op.args) > 1 else []


def _same(left: object, right: object) -> bool:
    return isinstance(left, TensorVariable) and isinstance(right, TensorVariable) and left.name == right.name


# --- RMS norm --------------------------------------------------------------------------------------


def fuse_rms_norm(view: GraphView, root: TorchOp) -> TorchOp | None:
    """x * rsqrt(mean(x^2, -1) + eps) -> rms_norm(x)   (Zhang & Sennrich 2019, eq. 4)"""
    if root.target is not aten.mul.Tensor:
        return None
    for source, factor in _either_order(root):
        epsilon = _inverse_rms_epsilon(view, factor, source)
        if epsilon is not None and isinstance(source, TensorVariable):
            arguments = (source, (source.shape[-1],), None, epsilon)
            return replace(root, target=aten.rms_norm.default, args=arguments, kwargs={})
    return None


def _inverse_rms_epsilon(view: GraphView, factor: object, source: object) -> float | None:
    root = view.made_by(factor, aten.rsqrt.default)
    if root is None:
        root = view.made_by(factor, aten.pow.Tensor_Scalar)
        if root is None or root.args[1] != -0.5:
            return None
    shifted = view.made_by(root.args[0], aten.add.Tensor)
    if shifted is None or not isinstance(shifted.args[1], float):
        return None
    mean = view.made_by(shifted.args[0], aten.mean.dim)
    if mean is None or not isinstance(source, TensorVariable) or not _over_last_axis(mean, source.rank):
        return None
    square = view.made_by(mean.args[0], aten.pow.Tensor_Scalar)
    if square is None or square.args[1] != 2 or not _same(square.args[0], source):
        return None
    return float(shifted.args[1])


def _over_last_axis(mean: TorchOp, rank: int) -> bool:
    axes = mean.args[1]
    keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
    return keepdim is True and tuple(axes) in ((-1,), (rank - 1,))


def absorb_rms_norm_casts(view: GraphView, root: TorchOp) -> TorchOp | None:
    """to_f16(rms_norm(to_f32(x))) -> rms_norm(x): the operator computes in f32 whatever its input"""
    if root.target not in _CASTS:
        return None
    norm = view.made_by(root.args[0], aten.rms_norm.default)
    if norm is None or not view.is_read_once(norm.output):
        return None
    widened = view.made_by(norm.args[0], *_CASTS)
    if widened is None:
        return None
    source = widened.args[0]
    if not isinstance(source, TensorVariable) or source.dtype is not root.output.dtype:
        return None
    return replace(root, target=norm.target, args=(source, *norm.args[1:]), kwargs={})


def absorb_rms_norm_weight(view: GraphView, root: TorchOp) -> TorchOp | None:
    """weight * rms_norm(x) -> rms_norm(x, weight)"""
    if root.target is not aten.mul.Tensor:
        return None
    for weight, value in _either_order(root):
        norm = view.made_by(value, aten.rms_norm.default)
        if norm is None or norm.args[2] is not None or not view.is_read_once(norm.output):
            continue
        if not isinstance(weight, TensorVariable) or weight.kind is not TensorKind.PARAMETER or weight.rank != 1:
            continue
        if weight.dtype is norm.output.dtype:
            return replace(root, target=norm.target, args=(*norm.args[:2], weight, norm.args[3]), kwargs={})
    return None


# --- GELU, tanh form ---------------------------------------------------------------------------------


def fuse_tanh_gelu(view: GraphView, root: TorchOp) -> TorchOp | None:
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))) -> gelu(x, tanh)   (Hendrycks & Gimpel 2016)"""
    if root.target is not aten.mul.Tensor:
        return None
    for half, gate in _either_order(root):
        halved = view.made_by(half, aten.mul.Tensor)
        if halved is None or halved.args[1] != 0.5:
            continue
        source = halved.args[0]
        if _is_tanh_gate(view, gate, source):
            return replace(root, target=aten.gelu.default, args=(source,), kwargs={"approximate": "tanh"})
    return None


def _is_tanh_gate(view: GraphView, gate: object, source: object) -> bool:
    shifted = view.made_by(gate, aten.add.Tensor)
    if shifted is None or shifted.args[1] != 1.0:
        return False
    tanh = view.made_by(shifted.args[0], aten.tanh.default)
    scaled = view.made_by(tanh.args[0], aten.mul.Tensor) if tanh is not None else None
    if scaled is None or not _is_close(scaled.args[1], math.sqrt(2 / math.pi)):
        return False
    inner = view.made_by(scaled.args[0], aten.add.Tensor)
    if inner is None or not _same(inner.args[0], source):
        return False
    cubic = view.made_by(inner.args[1], aten.mul.Tensor)
    if cubic is None or not _is_close(cubic.args[1], 0.044715):
        return False
    cube = view.made_by(cubic.args[0], aten.pow.Tensor_Scalar)
    return cube is not None and cube.args[1] == 3 and _same(cube.args[0], source)


def _is_close(value: object, expected: float) -> bool:
    return isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-6)


# --- index ranges ------------------------------------------------------------------------------------


def fuse_range_offset(view: GraphView, root: TorchOp) -> TorchOp | None:
    """arange(n) + p -> arange(p, n + p): the offset stays in the size language, where it is exact"""
    if root.target is not aten.add.Tensor or not is_dim(root.args[1]) or root.kwargs.get("alpha", 1) != 1:
        return None
    offset = root.args[1]
    ranged = view.made_by(root.args[0], aten.arange.default, aten.arange.start)
    if ranged is None or ranged.output.dtype is not root.output.dtype:
        return None
    start, end = (0, ranged.args[0]) if ranged.target is aten.arange.default else ranged.args[:2]
    if not is_dim(start) or not is_dim(end):
        return None
    moved = tuple(simplify_dim(sympy.sympify(bound) + sympy.sympify(offset)) for bound in (start, end))
    return replace(root, target=aten.arange.start, args=moved, kwargs=dict(ranged.kwargs))


STANDARD_FUSIONS: tuple[Fusion, ...] = (
    fuse_range_offset,
    fuse_rms_norm,
    absorb_rms_norm_casts,
    absorb_rms_norm_weight,
    fuse_tanh_gelu,
)
"""The fusions that hold for any model."""
