"""The outline of `graph.nnef`: our writer's dialect read back, tract's own, and text that is neither."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import (
    Argument,
    ArrayLiteral,
    Block,
    DimLiteral,
    NnefFragment,
    NnefGraph,
    NnefOperation,
    Reference,
    TupleLiteral,
)
from generic_export.nnef.text import graph_text
from generic_export.read.outline import External, Variable, module_paths, read_outline

NOWHERE = Block()
FRAGMENT = "fragment double(x: tensor<scalar>) -> (y: tensor<scalar>)\n{\n  y = add(x, x);\n}"


def operation(
    operator: str, output: str, *inputs: Argument, block: Block = NOWHERE, **named: Argument
) -> NnefOperation:
    generic = "scalar" if operator == "variable" else ""
    return NnefOperation(operator, inputs, tuple(named.items()), (output,), block, "f32 [S]", generic)


def sample() -> NnefGraph:
    mlp = Block("model.layers.0.mlp", "MLP")
    return NnefGraph(
        "net",
        ("x",),
        ("y",),
        (
            operation("tract_core_external", "x", shape=ArrayLiteral((1, DimLiteral("S+P"))), datum_type="f16"),
            operation("variable", "w", label="a/b.weight", shape=ArrayLiteral((4, 8)), block=mlp),
            operation("add", "h", Reference("x"), 1.5e-6, block=mlp),
            operation(
                "pad",
                "y",
                Reference("h"),
                padding=ArrayLiteral((TupleLiteral((0, -1)),)),
                block=Block("model.norm", "N"),
            ),
        ),
        symbols=("S", "P"),
        assertions=("S >= 0", "S+P<=4096"),
        registries=("tract_core",),
        fragments=(NnefFragment("double", FRAGMENT),),
        properties=(("producer", 'a "quoted" name; # not a comment'), ("scale", 0.5)),
    )


def test_what_we_write_is_read_back_whole() -> None:
    outline = read_outline(graph_text(sample()))
    assert outline.unknown == ()
    assert (outline.name, outline.version) == ("net", "1.0")
    assert outline.registries == ("tract_core",)
    assert outline.symbols == ("S", "P")
    assert outline.assertions == ("S >= 0", "S+P<=4096")
    assert outline.properties == (("producer", 'a "quoted" name; # not a comment'), ("scale", 0.5))
    assert outline.fragments == ("tract_core_properties", "double")
    assert (outline.inputs, outline.outputs) == (("x",), ("y",))
    assert outline.externals == (External("x", "f16", ("1", "S+P")),)
    assert outline.variables == (Variable("w", "a/b.weight", ("4", "8")),)
    assert dict(outline.operators) == {"tract_core_external": 1, "variable": 1, "add": 1, "pad": 1}
    pad = outline.invocations[-1]
    assert pad.argument("padding") == ArrayLiteral((TupleLiteral((0, -1)),))
    assert outline.invocations[2].argument("1") == 1.5e-6


def test_identifiers_lead_back_to_the_modules_of_the_comments() -> None:
    paths = module_paths(graph_text(sample()))
    assert paths["h"] == paths["w"] == ("model.layers.0.mlp", "MLP")
    assert paths["y"] == ("model.norm", "N")
    assert module_paths("graph net(x) -> (y) { y = x; }") == {}


def test_what_tract_writes_is_read_whole(tiny_archive: Path) -> None:
    outline = read_outline((tiny_archive / "graph.nnef").read_text())
    assert outline.unknown == ()
    assert [external.datum_type for external in outline.externals] == ["i64", "f32"]
    assert outline.externals[1].shape == ("1", "P", "4")
    assert ("tract_nnef_ser_version", TractWheel().version) in outline.properties
    assert dict(outline.operators)["tract_core_gather"] == 1


@pytest.fixture(scope="module")
def tiny_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive loaded and written again by tract itself, in a process of its own."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("tract-written")
    (folder / "in").mkdir()
    (folder / "in" / "graph.nnef").write_text(
        "version 1.0;\nextension tract_registry tract_core;\nextension tract_symbol S;\nextension tract_symbol P;\n"
        "extension tract_assert P >= 0;\n"
        "graph net(ids, past) -> (y) {\n"
        '  ids = tract_core_external(shape=[1, S], datum_type="i64");\n'
        '  past = tract_core_external(shape=[1, P, 4], datum_type="f32");\n'
        "  table = [[0.5, 1.0, 2.0, 4.0], [8.0, 1.0, 1.0, 1.0]];\n"
        "  x = tract_core_gather(table, ids, axis=0);\n  y = concat([past, x], axis=1);\n}\n"
    )
    code = (
        "import sys, tract; n = tract.nnef().with_tract_transformers().with_tract_extra(); "
        "n.write_model_to_dir(n.load(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "in"), str(folder / "out")], check=True, timeout=120)
    return folder / "out"


def test_nested_calls_count() -> None:
    outline = read_outline("graph n(x) -> (y) { x = external<scalar>(shape=[2]); y = add(mul(x, x), relu(x)); }")
    assert Counter(dict(outline.operators)) == Counter(external=1, add=1, mul=1, relu=1)
    assert outline.externals == (External("x", "", ("2",)),)


def test_infix_arithmetic_and_plain_aliases_are_understood() -> None:
    outline = read_outline("graph n(x) -> (z) { y = (S + P); z = x; (a, b) = split(x, axis=0, ratios=[1, 1]); }")
    assert outline.unknown == ()
    assert outline.invocations[0].outputs == ("a", "b")


def test_a_line_that_is_not_understood_is_named_and_the_rest_is_read() -> None:
    text = "version 1.0;\nhello world;\ngraph n(x) -> (y) {\n  x = external(shape=[1]);\n  what is this;\n  y = copy(x);\n}\n"
    outline = read_outline(text)
    assert [(part.line, part.text) for part in outline.unknown] == [(2, "hello world"), (5, "what is this")]
    assert dict(outline.operators) == {"external": 1, "copy": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "graph",
        "graph n",
        "graph n(x) -> (y) {",
        "graph n(x) (y) { }",
        "extension",
        "fragment",
        "fragment tract_core_properties() -> (properties: (string, tensor<scalar>)[]) { properties = 3; }",
        "graph n(x) -> (y) { y = " + "(" * 200 + ")" * 200 + "; }",
        "graph n(x) -> (y) { y = add(x, [); }",
        "graph n(x) -> (y) { = 3; }",
        'graph n(x) -> (y) { y = variable(label="a; }',
    ],
)
def test_broken_text_is_unknown_never_an_exception(text: str) -> None:
    assert read_outline(text).unknown or not text


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('graph net()[]{}<>,;="#.->0129\\n \t+*/é'), max_size=400))
def test_any_text_has_an_outline(text: str) -> None:
    read_outline(text)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_graph_cut_or_altered_anywhere_has_an_outline(data: st.DataObject) -> None:
    text = graph_text(sample())
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    read_outline(text[:start] + data.draw(st.text(max_size=5)) + text[end:])


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(
            st.integers(-(10**12), 10**12),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            st.text(st.characters(codec="utf-8", exclude_characters="\n\r{}%#"), max_size=20),
            st.sampled_from([Reference("x"), DimLiteral("S+P")]),
        ),
        lambda inner: st.lists(inner, max_size=4).map(lambda parts: ArrayLiteral(tuple(parts))),
        max_leaves=12,
    )
)
def test_every_argument_is_read_back_as_it_was(value: Argument) -> None:
    graph = NnefGraph(
        "n", ("x",), ("y",), (operation("external", "x"), operation("copy", "y", Reference("x"), a=value))
    )
    outline = read_outline(graph_text(graph))
    assert outline.unknown == ()
    read = outline.invocations[1].argument("a")
    assert read == value
    assert type(read) is type(value)
