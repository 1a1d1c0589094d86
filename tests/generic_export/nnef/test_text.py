"""`graph.nnef`: literals that tract parses, blocks by module, errors for documents that make no sense."""

from __future__ import annotations

import pytest

from generic_export.errors import GraphError
from generic_export.nnef.graph import ArrayLiteral, Block, DimLiteral, NnefGraph, NnefOperation, Reference, TupleLiteral
from generic_export.nnef.order import group_by_module
from generic_export.nnef.text import argument_text, graph_text


def operation(operator: str, inputs: list[str], output: str, path: str = "") -> NnefOperation:
    return NnefOperation(operator, tuple(Reference(name) for name in inputs), (), (output,), Block(path, "Layer"))


def external(name: str) -> NnefOperation:
    return NnefOperation("tract_core_external", (), (("shape", ArrayLiteral((1,))),), (name,), Block("inputs"))


def variable(name: str, path: str) -> NnefOperation:
    return NnefOperation("variable", (), (("label", name),), (name,), Block(path, "Layer"), generic_type="scalar")


def document(*operations: NnefOperation, outputs: tuple[str, ...] = ("y",)) -> NnefGraph:
    return NnefGraph("g", ("x",), outputs, (external("x"), *operations))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (1e-5, "1.0e-05"),
        (2.5e20, "2.5e20"),
        (1e22, "1.0e22"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (3, "3"),
        (True, "true"),
        ('a"b\\c', '"a\\"b\\\\c"'),
        (DimLiteral("S+P"), "S+P"),
        (ArrayLiteral((1, DimLiteral("S"))), "[1, S]"),
        (TupleLiteral((0, 1)), "(0, 1)"),
    ],
)
def test_literals(value: object, text: str) -> None:
    assert argument_text(value) == text  # type: ignore[arg-type]


def test_nan_has_no_literal() -> None:
    with pytest.raises(GraphError, match="NaN"):
        argument_text(float("nan"))


def test_one_commented_block_per_module() -> None:
    graph = document(operation("relu", ["x"], "a", "net.first"), operation("neg", ["a"], "y", "net.second"))
    text = graph_text(graph)
    assert text.index("# net.first: Layer") < text.index("a = relu(x);") < text.index("# net.second: Layer")


def test_use_before_definition_is_refused() -> None:
    with pytest.raises(GraphError, match="'a' is used before"):
        graph_text(document(operation("neg", ["a"], "y"), operation("relu", ["x"], "a")))


def test_double_assignment_is_refused() -> None:
    with pytest.raises(GraphError, match="assigned twice"):
        graph_text(document(operation("relu", ["x"], "y"), operation("neg", ["x"], "y")))


def test_missing_and_repeated_outputs_are_refused() -> None:
    with pytest.raises(GraphError, match="never assigned"):
        graph_text(document(outputs=("z",)))
    with pytest.raises(GraphError, match="lists an output twice"):
        graph_text(document(operation("relu", ["x"], "y"), outputs=("y", "y")))


def test_template_markers_are_refused() -> None:
    graph = NnefGraph("g", ("x",), ("x",), (external("x"),), properties=(("note", "{{ x }}"),))
    with pytest.raises(GraphError, match="template"):
        graph_text(graph)


def test_a_parents_steps_wait_for_its_leaf_children() -> None:
    graph = group_by_module(
        document(
            operation("relu", ["x"], "q", "block.attn.q_proj"),
            operation("neg", ["q"], "q2", "block.attn"),
            operation("relu", ["x"], "k", "block.attn.k_proj"),
            operation("neg", ["k"], "k2", "block.attn"),
            operation("add", ["q2", "k2"], "y", "block.attn"),
        )
    )
    paths = [op.block.path for op in graph.operations[1:]]
    assert paths == ["block.attn.q_proj", "block.attn.k_proj", "block.attn", "block.attn", "block.attn"]
    graph_text(graph)


def test_stored_tensors_stand_before_their_first_reader() -> None:
    graph = group_by_module(
        document(
            variable("w", "late"),
            operation("unsqueeze", ["w"], "w2", "late"),
            operation("relu", ["x"], "a", "early"),
            operation("mul", ["a", "w2"], "y", "late"),
        )
    )
    assert [op.outputs[0] for op in graph.operations] == ["x", "a", "w", "w2", "y"]


def test_a_stored_tensor_may_be_an_output() -> None:
    graph = group_by_module(document(variable("w", ""), operation("copy", ["w"], "y", "")))
    assert [op.outputs[0] for op in graph.operations] == ["x", "w", "y"]
