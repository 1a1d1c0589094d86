"""Graphs whose values leave f16, kept times a power of two: PyTorch and tract compute of them in f16 what PyTorch does in f32."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.capture import Prepared, prepare
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.capture.replay import replay
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.precision.magnitudes import measured
from generic_export.torch_graph.precision.rescaling import Rescaling, fitted, rescaled, without_overflow_guards

_LARGE = 2.0**14


class Stream(nn.Module):
    """A residual stream, far beyond f16, between a projection and a norm."""

    def __init__(self, norm: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.block = nn.Sequential(norm, nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.norm = norm
        with torch.no_grad():
            for layer in (self.enter, self.block[3]):
                layer.weight.mul_(_LARGE)  # type: ignore[union-attr, operator]
                layer.bias.mul_(_LARGE)  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.enter(x) + 3 * _LARGE
        for _ in range(2):
            stream = stream + self.block(stream)
        return self.norm(stream)  # type: ignore[no-any-return]


class Read(nn.Module):
    """A stream that something reads as it is."""

    def __init__(self, reader: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.enter, self.reader, self.leave = nn.Linear(8, 8, bias=False), reader, nn.Linear(8, 4)
        with torch.no_grad():
            self.enter.weight.mul_(_LARGE * 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.reader(self.enter(x)))  # type: ignore[no-any-return]


class HandedOver(nn.Module):
    """A stream whose input is given by another graph, and one column of which is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        with torch.no_grad():
            self.enter.weight.mul_(_LARGE * 8)
            self.enter.weight[0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = x + self.enter(x)
        return (stream + torch.relu(self.leave(_own_norm(stream))).sum(-1, keepdim=True))[..., :1]


def _own_norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _gated(x: torch.Tensor) -> torch.Tensor:
    return _own_norm(torch.cat([x, -x], -1)[..., 4:12] * x.mean(-1, keepdim=True))


FITTING: Mapping[str, Callable[[], nn.Module]] = {
    "RMS norm": lambda: Stream(nn.RMSNorm(8, eps=1e-3)),
    "RMS norm without weight": lambda: Stream(nn.RMSNorm(8, elementwise_affine=False)),
    "layer norm": lambda: Stream(nn.LayerNorm(8)),
    "a norm in f32, written out": lambda: Read(_own_norm),
    "a product of two such": lambda: Read(_gated),
    "multiplied with a mask of integers": lambda: Read(lambda x: _own_norm(x * (torch.arange(8) < 6).long())),
    "multiplied with a size": lambda: Read(lambda x: _own_norm(x * x.shape[0])),
    "divided by a size": lambda: Read(lambda x: _own_norm(x / x.shape[0])),
    "handed over": HandedOver,
    "read by a projection": lambda: Read(lambda x: torch.relu(x) * 2.0**-18),
}


class Mixed(nn.Module):
    """Two copies of a stream, mixed by weights that depend on it, as hyper-connections do; its values choose the layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.layer = nn.Linear(8, 2), nn.Linear(8, 8)
        with torch.no_grad():
            self.mix.weight.mul_(1 / _LARGE)
            self.layer.weight.mul_(_LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = torch.stack((x, x.roll(1, -1)), -2)
        for _ in range(2):
            weights = torch.softmax(torch.tanh(self.mix(copies)), -1)
            read = torch.softmax(torch.log1p(copies.mean(-1).abs()), -1)
            inner = self.layer(_own_norm((read[..., None] * copies).sum(-2)))
            copies = weights @ copies + inner[..., None, :]
        return _own_norm(copies.sum(-2))


ISLANDS: Mapping[str, Callable[[], nn.Module]] = {
    "a sigmoid": lambda: Read(torch.sigmoid),
    "a gate": lambda: Read(lambda x: _own_norm(nn.functional.silu(x) * x)),
    "a logarithm": lambda: Read(lambda x: torch.log1p(x.abs())),
    "integers": lambda: Read(lambda x: (x.long() // 2**14).to(x.dtype)),
    "a size that is added": lambda: Read(lambda x: _own_norm(x + x.shape[0])),
    "a division that rounds": lambda: Read(lambda x: _own_norm(torch.div(x, 3.0, rounding_mode="floor"))),
    "a choice of rows": lambda: Read(lambda x: _own_norm(torch.topk(x, 6).values[..., [0, 1, 2, 3, 4, 5, 0, 1]])),
    "hyper-connections": lambda: Read(Mixed()),
}


class RescaledTract(TractNNEF):
    """tract, for a graph that is measured on the tensors it had before they were multiplied."""

    def __init__(self, before: Prepared, inputs: Sequence[torch.Tensor], f32_regions: bool) -> None:
        axes = {
            each.name: {axis: str(dim) for axis, dim in enumerate(each.shape) if not isinstance(dim, int)}
            for each in before.graph.inputs
        }
        super().__init__(check_io=False, dynamic_axes=axes)
        self.before, self.inputs, self.f32_regions = before, inputs, f32_regions

    def post_capture(self, graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
        graph = without_overflow_guards(graph)
        largest = measured(graph, self.inputs, self.before.stored).largest
        return fitted(graph, largest, f32_regions=self.f32_regions).graph


def _in_engine(
    before: Prepared, factors: Mapping[str, float], name: str, example: torch.Tensor, *, f32_regions: bool = False
) -> torch.Tensor:
    """Export the module once more, its parameters multiplied and its graph rescaled, and run it in tract."""
    module = copy.deepcopy(before.model)
    with torch.no_grad():
        for parameter, factor in factors.items():
            module.get_parameter(parameter).mul_(factor)
    with tempfile.TemporaryDirectory() as folder:
        target = RescaledTract(before, [example], f32_regions)
        archive = export_model_to_nnef(module, before.args, Path(folder) / "model.nnef", target, [name])
        with TractWheel(timeout_seconds=60).load(archive) as engine:
            (answer,) = engine.run([example.numpy()])
    return torch.from_numpy(answer.astype(np.float32))


def _captured(module: nn.Module) -> Prepared:
    module = module.half().eval()
    axes = {"x": {0: "N"}}
    return prepare(module, (torch.randn(3, 8).half(),), TractNNEF(check_io=False, dynamic_axes=axes), ["x"])


def _result(graph: Any, x: torch.Tensor, stored: Callable[[str], torch.Tensor | None]) -> torch.Tensor:
    (output,) = graph.outputs
    return replay(graph, [x], stored, {output.name})[output.name]


def _with_factors(prepared: Prepared, rescaling: Rescaling) -> Callable[[str], torch.Tensor | None]:
    def stored(name: str) -> torch.Tensor | None:
        tensor = prepared.stored(name)
        factor = rescaling.factors.get(name)
        return tensor if tensor is None or factor is None else tensor * factor

    return stored


@pytest.mark.parametrize("name", FITTING)
def test_a_rescaled_graph_computes_the_same_in_f16(name: str) -> None:
    torch.manual_seed(0)
    module = FITTING[name]()
    x = (3 * torch.randn(5, 8)).half()
    prepared = _captured(module)
    assert not _result(prepared.graph, x, prepared.stored).isfinite().all(), "the case does not overflow"
    largest = measured(prepared.graph, [x], prepared.stored).largest
    rescaling = rescaled(prepared.graph, largest)
    assert max(largest.values()) > 65504 and any(group.exponent for group in rescaling.groups)
    found = _result(rescaling.graph, x, _with_factors(prepared, rescaling))
    engine = _in_engine(prepared, rescaling.factors, "x", x)
    with torch.no_grad():
        expected = module.float()(x.float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(engine, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [*ISLANDS, "RMS norm", "layer norm", "a product of two such", "handed over"])
def test_what_is_read_as_it_is_stays_in_f32(name: str) -> None:
    """Of what could be kept smaller, where that is asked for."""
    torch.manual_seed(0)
    module, forced = (ISLANDS | FITTING)[name](), name in FITTING
    x = (3 * torch.randn(5, 8)).half()
    prepared = _captured(module)
    largest = measured(prepared.graph, [x], prepared.stored).largest
    fit = fitted(prepared.graph, largest, f32_regions=forced)
    assert any(group.in_f32 and group.overflows for group in fit.groups)
    assert all(group.exponent or group.in_f32 for group in fit.groups if group.overflows)
    products = [op for op in fit.graph.ops if op.target is torch.ops.aten.linear.default]
    assert products and all(tensor.dtype is torch.float16 for op in products for tensor in op.tensor_inputs())
    found = _result(fit.graph, x, _with_factors(prepared, fit))
    engine = _in_engine(prepared, fit.factors, "x", x, f32_regions=forced)
    with torch.no_grad():
        expected = module.float()(x.float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(engine, expected, rtol=2e-2, atol=2e-2)


def test_a_norm_that_takes_the_type_of_its_input_has_a_scale_of_its_own() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x.float(), (8,)).type_as(x)

    torch.manual_seed(0)
    prepared = _captured(Stream(Norm()))
    rescaling = rescaled(prepared.graph, measured(prepared.graph, [torch.randn(5, 8)], prepared.stored).largest)
    # The block is read twice; what reads the norm is as it was.
    assert set(rescaling.factors) == {"enter.weight", "enter.bias"}


def test_what_fits_is_left_alone() -> None:
    torch.manual_seed(0)
    prepared = _captured(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    rescaling = rescaled(prepared.graph, measured(prepared.graph, [torch.randn(5, 8)], prepared.stored).largest)
    assert rescaling.graph is prepared.graph and not rescaling.factors and not rescaling.groups


@pytest.mark.parametrize(
    ("reader", "obstacle"),
    [
        (lambda x: x.sigmoid(), "aten.sigmoid.default reads it"),
        (lambda x: x.exp().sqrt(), "aten.exp.default reads it"),
        (lambda x: x.long().to(x.dtype), "aten.to.dtype reads it"),
        (lambda x: _own_norm(x + x.shape[0]), "aten.add.Tensor reads it"),
        (lambda x: torch.div(x, 3.0, rounding_mode="floor"), "aten.div.Tensor_mode reads it"),
    ],
)
def test_what_reads_values_as_they_are_is_named(reader: Callable[[torch.Tensor], torch.Tensor], obstacle: str) -> None:
    torch.manual_seed(0)
    prepared = _captured(Read(reader))
    x = (3 * torch.randn(5, 8)).half()
    rescaling = rescaled(prepared.graph, measured(prepared.graph, [x], prepared.stored).largest)
    unfit = [group for group in rescaling.groups if not group.exponent and group.overflows]
    assert [group.where for group in unfit][:1] == ["enter"] and unfit[0].obstacle.startswith(obstacle)


def test_a_result_of_the_graph_stays_as_it_is() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    with torch.no_grad():
        module.weight.mul_(_LARGE * 8)
    prepared = _captured(module)
    rescaling = rescaled(prepared.graph, measured(prepared.graph, [3 * torch.randn(5, 8)], prepared.stored).largest)
    (group,) = rescaling.groups
    assert rescaling.graph is prepared.graph and group.exponent == 0 and "output of the graph" in group.obstacle


def test_a_t5_encoder_whose_stream_overflows() -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, feed_forward_proj="relu")
    model = T5EncoderModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".o.weight", ".wo.weight", "shared.weight")):
                parameter.mul_(2.0**14 if "shared" in name else 2.0**16)
    model = model.half()
    ids = torch.randint(0, 60, (1, 7))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=ids).last_hidden_state  # type: ignore[no-any-return]

    target = TractNNEF(check_io=False, dynamic_axes={"ids": {1: "S"}})
    prepared = prepare(Encoder().eval(), (ids[:, :5],), target, ["ids"])
    graph = without_overflow_guards(prepared.graph)
    largest = measured(graph, [ids], prepared.stored).largest
    rescaling = rescaled(graph, largest)
    assert max(largest.values()) > 65504 and any(group.exponent for group in rescaling.groups)
    assert not [group for group in rescaling.groups if group.obstacle]
    found = _result(rescaling.graph, ids, _with_factors(prepared, rescaling))
    engine = _in_engine(prepared, rescaling.factors, "ids", ids)
    with torch.no_grad():
        expected = model.float()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(engine, expected, rtol=2e-2, atol=2e-2)
