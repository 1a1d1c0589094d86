"""A part of a document holds what its values need, and nothing else; it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.capture import ModuleCall
from generic_export.errors import GraphError
from generic_export.nnef.cutting import part_of
from generic_export.nnef.graph import ArrayLiteral, DimLiteral, NnefGraph, NnefOperation, check_graph
from generic_export.nnef.text import graph_text
from generic_export.translate.translate import translate


class Pair(nn.Module):
    """Two linear layers, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return both and their sum, of [B, 4] and [T, 5]."""
        left, right = nn.functional.gelu(self.left(x)), self.right(y)
        return left, right, left.sum(0) + right.sum(0)


@pytest.fixture(scope="module")
def graph() -> NnefGraph:
    """The document of the pair."""
    target = TractNNEF(dynamic_axes={"x": {0: "B"}, "y": {0: "T"}})
    call = ModuleCall(Pair().eval(), (torch.randn(2, 4), torch.randn(3, 5)), {}, ("x", "y"), ("left", "right", "sum"))
    return translate(call.tracer(target).trace())


def test_one_side_needs_its_own_things_alone(graph: NnefGraph) -> None:
    part = part_of(graph, ["left"], name="one")
    check_graph(part)
    assert (part.name, part.inputs, part.outputs, part.symbols) == ("one", ("x",), ("left",), ("B",))
    assert {variable.label for variable in part.variables} == {"left.weight", "left.bias"}
    assert [fragment.name for fragment in part.fragments] == ["gelu_exact"]
    other = part_of(graph, ["right"])
    assert (other.inputs, other.symbols, other.fragments) == (("y",), ("T",), ())
    assert not [line for line in graph_text(other).splitlines() if "left" in line]


def test_given_values_are_not_computed(graph: NnefGraph) -> None:
    shape = ArrayLiteral((DimLiteral("B"), 3))
    given = NnefOperation("tract_core_external", (), (("shape", shape), ("datum_type", "f32")), ("left",))
    part = part_of(graph, ["sum"], [given])
    check_graph(part)
    assert part.inputs == ("left", "y")
    assert {variable.label for variable in part.variables} == {"right.weight", "right.bias"}
    assert "gelu_exact" not in graph_text(part)


def test_a_value_that_is_not_there_is_named(graph: NnefGraph) -> None:
    with pytest.raises(GraphError, match="'middle'"):
        part_of(graph, ["middle"])


def test_the_whole_is_a_part_of_itself(graph: NnefGraph) -> None:
    assert part_of(graph, graph.outputs) == graph
