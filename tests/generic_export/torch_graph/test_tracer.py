"""Capture: symbolic sizes, names, module paths, ties, and errors that point at the user's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export.errors import CaptureError, OptionError, SpecializedAxisError
from generic_export.torch_graph import TensorKind, TorchModuleTracer
from generic_export.torch_graph.dims import dim_text
from generic_export.torch_graph.ir import FixedTensorList
from generic_export.torch_graph.naming import IdentifierAllocator, identifier, name_results
from tests.engine_check import check


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.cat([past, x], dim=1)


def trace_net(**changes: object):
    options = {
        "input_names": ["x", "past"],
        "dynamic_axes": {"x": {1: "S"}, "past": {1: "P"}},
    } | changes
    return TorchModuleTracer(Net(), args=(torch.zeros(1, 3, 4), torch.zeros(1, 5, 4)), **options).trace()


def test_sizes_stay_symbolic_with_the_users_names() -> None:
    graph = trace_net()
    assert [symbol.name for symbol in graph.symbols] == ["S", "P"]
    assert [[dim_text(dim) for dim in output.shape] for output in graph.outputs] == [["1", "S", "4"], ["1", "P+S", "4"]]


def test_each_operator_knows_its_module_and_source_line() -> None:
    graph = trace_net()
    linears = [op for op in graph.ops if op.target is torch.ops.aten.linear.default]
    assert [op.module_path for op in linears] == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert {op.module_type for op in linears} == {"Linear"}
    relu = next(op for op in graph.ops if op.target is torch.ops.aten.relu.default)
    assert relu.source.startswith("test_tracer.py:")


def test_results_are_named_after_modules() -> None:
    graph = name_results(trace_net())
    names = [op.output.name for op in graph.ops]
    assert "blocks.0.up" in names
    assert "blocks.0.relu" in names
    assert len(set(names)) == len(names)


def test_parameters_have_their_qualified_names_and_no_value_is_needed() -> None:
    with torch.device("meta"):
        net = Net()
        args = (torch.zeros(1, 3, 4), torch.zeros(1, 5, 4))
    graph = TorchModuleTracer(net, args=args).trace()
    assert {parameter.name for parameter in graph.parameters} == {name for name, _ in net.named_parameters()} | {
        "blocks.0.scale",
        "blocks.1.scale",
    }
    assert all(parameter.kind is TensorKind.PARAMETER for parameter in graph.parameters)


def test_lists_of_tensors_are_fixed_tensor_lists() -> None:
    graph = trace_net()
    cat = next(op for op in graph.ops if op.target is torch.ops.aten.cat.default)
    assert isinstance(cat.args[0], FixedTensorList)
    assert len(cat.args[0]) == 2


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    graph = TorchModuleTracer(Tied(), args=(torch.zeros(2, 4),)).trace()
    assert [parameter.name for parameter in graph.parameters] == ["first.weight"]


def test_an_axis_frozen_by_the_model_is_an_error_that_names_it() -> None:
    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3)

    tracer = TorchModuleTracer(Frozen(), args=(torch.zeros(3),), input_names=["x"], dynamic_axes={"x": {0: "N"}})
    with pytest.raises(SpecializedAxisError, match="Frozen"):
        tracer.trace()


def test_two_symbols_for_one_size_are_refused() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    axes = {"x": {0: "N"}, "y": {0: "M"}}
    tracer = TorchModuleTracer(Sum(), args=(torch.zeros(4), torch.zeros(4)), input_names=["x", "y"], dynamic_axes=axes)
    with pytest.raises((OptionError, CaptureError)):
        tracer.trace()


def test_one_symbol_on_two_inputs_is_one_size() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    axes = {"x": {0: "N"}, "y": {0: "N"}}
    graph = TorchModuleTracer(
        Sum(), args=(torch.zeros(4), torch.zeros(4)), input_names=["x", "y"], dynamic_axes=axes
    ).trace()
    assert [symbol.name for symbol in graph.symbols] == ["N"]


def test_data_dependent_control_flow_names_the_users_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"Branch at test_tracer\.py:\d+"):
        TorchModuleTracer(Branch(), args=(torch.zeros(3),)).trace()


def test_dynamic_axes_of_an_unknown_input_are_refused() -> None:
    with pytest.raises(OptionError, match="not an input or output"):
        trace_net(dynamic_axes={"y": {0: "N"}})


def test_wrong_number_of_names_is_refused() -> None:
    with pytest.raises(OptionError, match="2 input tensors, but 1"):
        trace_net(input_names=["x"], dynamic_axes={})
    with pytest.raises(OptionError, match="2 output tensors, but 1"):
        trace_net(output_names=["y"])


def test_identifiers_are_ones_that_tract_parses() -> None:
    assert identifier("model.layers.0.mlp") == "model_layers_0_mlp"
    assert identifier("0.weight") == "v_0_weight"
    assert identifier("info") == "v_info"
    assert identifier("graph") == "v_graph"


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("natural_verbose", ["a_b_linear", "a_b_linear_1"]),
        ("natural_verbose_camel", ["aBLinear", "aBLinear_1"]),
        ("raw", ["linear", "linear_1"]),
        ("numeric", ["v0", "v1"]),
    ],
)
def test_naming_schemes(scheme: str, expected: list[str]) -> None:
    allocator = IdentifierAllocator(scheme, reserved=["x"])
    assert [allocator.allocate("a.b.linear") for _ in range(2)] == expected


def test_an_unknown_naming_scheme_is_refused() -> None:
    with pytest.raises(OptionError, match="natural_verbose"):
        IdentifierAllocator("pretty", [])


def test_a_buffer_that_the_forward_writes_is_told() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x + self.seen

    with pytest.warns(UserWarning, match=r"Counter: the forward writes to seen at test_tracer\.py:\d+"):
        graph = TorchModuleTracer(Counter(), args=(torch.randn(2),)).trace()
    assert len(graph.outputs) == 1


@pytest.mark.parametrize("axes", [None, {"input_0": {0: "N"}, "input_1": {0: "N"}, "input_2": {0: "N"}}])
def test_one_example_tensor_given_several_times_is_several_inputs(axes: dict[str, dict[int, str]] | None) -> None:
    x = torch.linspace(-1, 1, 3)
    others = tuple(torch.randn(3) for _ in range(3))
    check(lambda q, k, v: q * 2 - k * 3 + v * 5, (x, x, x), others, dynamic_axes=axes)


def test_tensors_made_of_numbers_alone_meet() -> None:
    """The reference points of Deformable DETR: two ranges that no tensor goes into, in one grid."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.linspace(0.5, size - 0.5, size, device=x.device) for size in x.shape[1:])
        grid = torch.meshgrid(rows, columns, indexing="ij")
        return x + grid[0] * grid[1]

    check(shifted, (torch.randn(2, 4, 3),), (torch.randn(1, 4, 3),), dynamic_axes={"input_0": {0: "B"}})
