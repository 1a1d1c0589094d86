"""Document 002, the captured graph: every name with its arguments, every attribute, and what each method does."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, as_forward, export_model_to_nnef
from generic_export.errors import CaptureError, JitTraceError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph import (
    FixedTensorList,
    PythonConstant,
    TensorVariable,
    TorchModuleIRGraph,
    TorchModuleTracer,
    TorchOp,
)


class Codec(nn.Module):
    """An encoder and a decoder that share a gain; `encode` calls other methods of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.decoder = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.split(self.encoder(x), [1, 2], dim=-1)
        return self.drop(torch.cat([right, left], dim=-1)) * (self.gain * 2)

    def error(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return (self(x) - x).square().mean() * scale


@pytest.fixture
def codec() -> Codec:
    torch.manual_seed(0)
    return Codec().eval()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def parameters(function: Any, count: int) -> list[tuple[str, Any]]:
    """Return names and defaults of the first parameters of a function."""
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()][:count]


REQUIRED = inspect.Parameter.empty


def test_signatures() -> None:
    assert parameters(TorchModuleTracer, 4) == [
        ("module", REQUIRED),
        ("traced_module", None),
        ("fn_name", "forward"),
        ("args", None),
    ]
    assert parameters(TorchModuleIRGraph, 9) == [
        ("torch_module_tracer", REQUIRED),
        ("omit_useless_nodes", True),
        ("is_root_module", False),
    ]
    assert parameters(TensorVariable, 9) == [
        *((name, REQUIRED) for name in ("name", "data", "shape", "dtype")),
        ("quant", None),
        ("_traced_data", None),
    ]
    fields = ("kind", "module_path", "inputs", "outputs", "scope", "op_ref", "call_name")
    assert parameters(TorchOp, 7) == [(name, REQUIRED) for name in fields]
    assert all(dataclasses.is_dataclass(kind) for kind in (FixedTensorList, TensorVariable, TorchOp))
    assert isinstance(TorchModuleTracer.torch_graph, property)


# --- TorchModuleTracer --------------------------------------------------------------------------------


def test_the_traced_module_is_made_when_it_is_read(codec: Codec) -> None:
    tracer = TorchModuleTracer(codec, None, "forward", (X,))
    assert "traced_module" not in vars(tracer)
    traced = tracer.traced_module
    assert isinstance(traced, torch.jit.ScriptModule)
    assert tracer.traced_module is traced
    other = torch.randn(5, 4)
    torch.testing.assert_close(traced(other), codec(other))


def test_a_trace_that_there_is_already_is_used(codec: Codec) -> None:
    traced = torch.jit.trace(codec, X)
    tracer = TorchModuleTracer(codec, traced, args=(X,))
    assert tracer.traced_module is traced
    assert str(tracer.torch_graph) == str(traced.graph)
    assert len(tracer.trace().inputs) == 1


def test_the_graph_is_that_of_the_method(codec: Codec) -> None:
    tracer = TorchModuleTracer(codec, fn_name="encode", args=(X,))
    assert [node.kind() for node in tracer.torch_graph.nodes()].count("aten::cat") == 1
    assert "decoder" not in str(tracer.torch_graph)
    assert "decoder" in str(TorchModuleTracer(codec, args=(X,)).torch_graph)


def test_keyword_arguments_are_traced_by_position(codec: Codec) -> None:
    tracer = TorchModuleTracer(codec, args=(), kwargs={"x": X})
    torch.testing.assert_close(tracer.traced_module(X), codec(X))


@pytest.mark.parametrize("args", [(), (torch.zeros(2, 5),), (X, X)])
def test_what_cannot_be_traced_is_an_error_of_ours(codec: Codec, args: tuple[torch.Tensor, ...]) -> None:
    exceptions = pytest.importorskip("generic_export.exceptions")
    assert exceptions.T2NErrorTorchJitTraceFailed is JitTraceError
    with pytest.raises(JitTraceError, match=r"Codec\.forward"):
        _ = TorchModuleTracer(codec, args=args).traced_module


def test_wrong_arguments_are_named(codec: Codec) -> None:
    with pytest.raises(OptionError, match=r"no method 'encoed'.*forward, encode, error"):
        TorchModuleTracer(codec, fn_name="encoed", args=(X,))
    with pytest.raises(OptionError, match="traced_module is a tuple"):
        TorchModuleTracer(codec, (X,))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no method 'encode'"):
        TorchModuleTracer(codec, torch.jit.trace(codec, X), "encode", (X,))
    with pytest.raises(OptionError, match="only the forward"):
        as_forward(torch.jit.trace(codec, X), "encode")


def test_another_method_is_captured_under_the_names_of_its_module(codec: Codec) -> None:
    graph = TorchModuleTracer(codec, fn_name="encode", args=(X,)).trace()
    assert {parameter.name for parameter in graph.parameters} == {"gain", "encoder.0.weight", "encoder.0.bias"}
    assert {op.module_path for op in graph.ops} == {"", "encoder.0", "encoder.1", "drop"}


@pytest.mark.parametrize("training", [False, True])
def test_another_method_is_exported(codec: Codec, training: bool, tmp_path: Path) -> None:
    codec.train(training)
    target = TractNNEF(dynamic_axes={"x": {0: "B"}})
    encode = as_forward(codec, "encode")
    archive = export_model_to_nnef(encode, (X,), tmp_path / "encode", target)
    assert codec.training is codec.drop.training is training
    codec.eval()
    other = torch.randn(5, 4)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        (answer,) = engine.run([other.numpy()])
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(answer), codec.encode(other), rtol=1e-5, atol=1e-6)


def test_a_method_that_calls_the_module_is_exported_without_its_hooks_twice(codec: Codec, tmp_path: Path) -> None:
    calls: list[int] = []
    codec.register_forward_hook(lambda *_: calls.append(1))
    error = as_forward(codec, "error")
    assert error(X) == codec.error(X)
    assert len(calls) == 2  # one for each call of the forward inside, none for the method
    export_model_to_nnef(error, (X,), tmp_path / "error", TractNNEF(), kwargs={"scale": 2.0})
    assert as_forward(codec, "forward") is codec


# --- TorchModuleIRGraph -------------------------------------------------------------------------------


def test_a_graph_has_nodes_of_data_and_of_operators(codec: Codec) -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(codec, args=(X,)))
    assert [node.name for node in graph.inputs] == ["x"]
    assert all(any(node is data for data in graph.data_nodes) for node in (*graph.inputs, *graph.outputs))
    assert len({node.name for node in graph.data_nodes}) == len(graph.data_nodes)
    assert [op.kind for op in graph.op_nodes] == [
        "aten::linear",
        "aten::tanh",
        "aten::split_with_sizes",
        "aten::cat",
        "aten::dropout",
        "aten::mul",
        "aten::mul",
        "aten::linear",
    ]
    linear, split, cat = graph.op_nodes[0], graph.op_nodes[2], graph.op_nodes[3]
    assert (linear.module_path, linear.call_name) == ("encoder.0", "linear")
    assert linear.scope == "__module.encoder/__module.encoder.0"
    assert linear.op_ref is torch.ops.aten.linear.default
    assert [node.name for node in linear.inputs] == ["x", "encoder.0.weight", "encoder.0.bias"]
    assert linear.inputs[0] is graph.inputs[0]
    assert [output.shape for output in split.outputs] == [[2, 1], [2, 2]]
    assert isinstance(cat.inputs[0], FixedTensorList)
    assert cat.inputs[0].data == split.outputs[::-1]
    assert isinstance(cat.inputs[1], PythonConstant)
    assert cat.inputs[1].data == -1
    assert graph.op_nodes[-1].outputs == graph.outputs
    assert "aten.linear.default(x, encoder.0.weight" in str(graph)


def test_parameters_have_data_and_results_have_none(codec: Codec) -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(codec, args=(X,)))
    nodes = {node.name: node for node in graph.data_nodes}
    weight = nodes["encoder.0.weight"]
    assert isinstance(weight, TensorVariable)
    torch.testing.assert_close(weight.data, codec.encoder[0].weight.detach())
    assert (weight.shape, weight.dtype, weight.quant) == ([3, 4], torch.float32, None)
    assert graph.inputs[0].data is None
    assert graph.outputs[0].data is None


class Wasteful(nn.Module):
    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        _ = x.exp()
        return x + 1


def test_useless_nodes_are_left_out_unless_asked_for() -> None:
    tracer = TorchModuleTracer(Wasteful(), args=(X, X))

    def shape_of(**options: bool) -> tuple[list[str], list[str]]:
        graph = TorchModuleIRGraph(tracer, **options)
        assert len(graph.data_nodes) >= len(graph.inputs) + len(graph.outputs)
        return [node.name for node in graph.inputs], [op.kind for op in graph.op_nodes]

    assert shape_of() == (["x"], ["aten::add"])
    assert shape_of(is_root_module=True) == (["x", "flag"], ["aten::add"])
    assert shape_of(omit_useless_nodes=False) == (["x", "flag"], ["aten::exp", "aten::add"])


def test_sizes_are_those_of_the_example_though_axes_are_dynamic(codec: Codec) -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(codec, args=(X,), dynamic_axes={"x": {0: "B"}}))
    assert graph.outputs[0].shape == [2, 4]
    assert [str(size) for size in graph.captured.outputs[0].shape] == ["B", "4"]


def test_a_quantised_model_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")
    model = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Linear(4, 3), torch.ao.quantization.DeQuantStub()
    ).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare(model)
    prepared(X)
    converted = torch.ao.quantization.convert(prepared)
    graph = TorchModuleIRGraph(TorchModuleTracer(converted, args=(X,)))
    assert all(op.realise_output_type_and_size() for op in graph.op_nodes)
    torch.testing.assert_close(graph.outputs[0].value, converted(X), rtol=0, atol=0.02)


def test_floats_are_quantised_for_a_module_that_takes_no_others() -> None:
    layer = torch.ao.nn.quantized.Linear(4, 3)
    traced = TorchModuleTracer(layer, args=(X,)).traced_module
    quantised = torch.quantize_per_tensor(X, 0.01, 100, torch.quint8)
    assert torch.equal(traced(quantised).int_repr(), layer(quantised).int_repr())


# --- TorchOp and TensorVariable -----------------------------------------------------------------------


def test_an_operator_can_be_called_alone(codec: Codec) -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(codec, args=(X,)))
    last = graph.op_nodes[-1]
    with torch.no_grad():
        torch.testing.assert_close(last.call_op(), codec(X))


def test_a_walk_through_the_operators_realises_every_output(codec: Codec) -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(codec, args=(X,)))
    for op in graph.op_nodes:
        for output in op.outputs:
            output.shape = output.dtype = None
        assert op.realise_output_type_and_size()
    with torch.no_grad():
        torch.testing.assert_close(graph.outputs[0].value, codec(X))
    assert (graph.outputs[0].shape, graph.outputs[0].dtype) == ([2, 4], torch.float32)
    constants = [op.outputs[0] for op in graph.op_nodes if op.outputs[0].data is not None]
    (doubled,) = constants  # `gain * 2` depends on no input
    torch.testing.assert_close(doubled.data, codec.gain.detach() * 2)


class Running(nn.Module):
    """A loop, whose operator holds a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        return scan(lambda total, row: (total + row, total * 1.0), torch.zeros(4), x)[1]


def test_a_loop_is_computed_too() -> None:
    graph = TorchModuleIRGraph(TorchModuleTracer(Running(), args=(X,)))
    loop = next(op for op in graph.op_nodes if op.kind == "t2n::scan")
    assert loop.op_ref is None
    torch.testing.assert_close(loop.call_op()[-1], torch.stack([torch.zeros(4), X[0]]))


def test_an_operator_of_ones_own() -> None:
    def tensor(name: str, value: torch.Tensor | None = None) -> TensorVariable:
        return TensorVariable(name, value, None, None)

    y = tensor("y")
    a, b = TensorVariable("a", None, [2], torch.int64, None, torch.tensor([1, 2])), tensor("b", torch.tensor([3, 4]))
    add = TorchOp("aten::add", "", [a, b], [y], "", torch.add, "add")
    assert add.call_op().tolist() == [4, 6]
    assert add.realise_output_type_and_size()
    assert (y.shape, y.dtype, y.data) == ([2], torch.int64, None)
    by_name = TorchOp("aten::mul", "", [b, PythonConstant("k", 3)], [y], "", None, None)
    assert by_name.realise_output_type_and_size()
    assert y.data is not None
    assert y.data.tolist() == [9, 12]


def test_what_cannot_be_computed_says_so() -> None:
    y = TensorVariable("y", None, None, None)
    empty = TorchOp("aten::neg", "", [TensorVariable("x", None, [2], torch.float32)], [y], "", torch.neg, None)
    with pytest.raises(CaptureError, match="'x' has no value"):
        empty.call_op()
    assert not empty.realise_output_type_and_size()
    wrong = TorchOp("aten::neg", "encoder.1", [PythonConstant("x", "text")], [y], "", torch.neg, None)
    with pytest.raises(CaptureError, match=r"aten::neg at encoder\.1: PyTorch refused"):
        wrong.call_op()
    unknown = TorchOp("mine::nothing", "", [], [y], "", None, None)
    with pytest.raises(CaptureError, match="mine::nothing"):
        unknown.call_op()


def test_a_quantised_tensor_says_how() -> None:
    values = torch.quantize_per_tensor(X, 0.25, 3, torch.qint8)
    y = TensorVariable("y", None, None, None)
    op = TorchOp("aten::relu", "", [TensorVariable("x", values, [2, 4], torch.qint8)], [y], "", None, None)
    assert op.realise_output_type_and_size()
    assert y.quant == {"scale": 0.25, "zero_point": 3}
    assert y.dtype is torch.qint8
