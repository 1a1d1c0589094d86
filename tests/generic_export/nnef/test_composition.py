"""Modules that do the same become calls of one fragment: the same computation, and text that is read back whole."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import KhronosNNEF, TractNNEF, export_model_to_nnef
from generic_export.capture import capture, prepare
from generic_export.compare.comparison import ToleranceLimits
from generic_export.debug.archive.bisect import Provenance, first_divergence
from generic_export.documents import module_classes
from generic_export.errors import OptionError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.composition import Composition, compose
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, Reference, TupleLiteral, check_graph
from generic_export.nnef.order import group_by_module
from generic_export.nnef.text import graph_text
from generic_export.read.expansion import engine_names, flat_text
from generic_export.read.outline import module_paths, read_outline
from generic_export.translate.translate import TranslationOptions, translate

WIDTH = 8
AXES = {"x": {1: "T"}}


class GatedLayer(nn.Module):
    """A layer with a residual, a gate and a number of its own."""

    def __init__(self, slope: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slope = slope

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [B, T, WIDTH]."""
        normed = self.norm(x)
        return x + torch.where(mask, nn.functional.gelu(self.gate(normed)) * self.slope, self.up(normed))


class WideLayer(GatedLayer):
    """Another kind of layer in the same list."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [B, T, WIDTH]."""
        return torch.tanh(super().forward(x, mask))


class Stack(nn.Module):
    """Layers that all read one mask."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, WIDTH] of the same."""
        mask = torch.arange(x.shape[1]).ge(2)[None, :, None]
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def document(model: nn.Module, scheme: str = "natural_verbose") -> NnefGraph:
    torch.manual_seed(0)
    captured = capture(model.eval(), (torch.randn(2, 5, WIDTH),), TractNNEF(dynamic_axes=AXES), ("x",), ("y",))
    return group_by_module(translate(captured, TranslationOptions(naming_scheme=scheme)))


def composition(model: nn.Module, scheme: str = "natural_verbose") -> Composition:
    return compose(document(model, scheme), module_classes(model))


def meaning(graph: NnefGraph) -> tuple[Counter[str], list[str]]:
    """Return what a flat graph computes, whatever its values are called and wherever its operations stand."""
    known: dict[str, str] = {}

    def said(value: Argument) -> str:
        if isinstance(value, Reference):
            return known[value.name]
        if isinstance(value, (ArrayLiteral, TupleLiteral)):
            return f"[{','.join(map(said, value.elements))}]"
        return repr(value)

    for each in graph.operations:
        arguments = [*map(said, each.inputs), *(f"{name}={said(value)}" for name, value in each.attributes)]
        where = each.outputs[0] if each.operator == "tract_core_external" else ""
        digest = hashlib.sha256(f"{where}{each.operator}({arguments}){each.note}".encode()).hexdigest()
        known |= {name: f"{digest}.{index}" for index, name in enumerate(each.outputs)}
    return Counter(known.values()), [known[name] for name in graph.outputs]


STACKS = {
    "one kind": Stack(GatedLayer(), GatedLayer(), GatedLayer()),
    "two kinds": Stack(GatedLayer(), WideLayer(), GatedLayer(), WideLayer()),
    "numbers of their own": Stack(GatedLayer(0.5), GatedLayer(0.25), GatedLayer(2.0)),
    "layers without a name": nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in "ab")),
    "a stack in a stack": Stack(),
}
FRAGMENTS = {
    "one kind": ["gated_layer"],
    "two kinds": ["gated_layer", "wide_layer"],
    "numbers of their own": ["gated_layer"],
    "layers without a name": ["sequential_block"],
    "a stack in a stack": [],
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("scheme", ["natural_verbose", "numeric"])
def test_the_text_is_read_back_as_the_flat_form_which_is_the_same_graph(name: str, scheme: str) -> None:
    graph = document(STACKS[name], scheme)
    forms = compose(graph, module_classes(STACKS[name]))
    check_graph(forms.flat)
    text = graph_text(forms.composed)
    assert flat_text(text) == graph_text(forms.flat)
    assert meaning(forms.flat) == meaning(graph)
    added = [fragment.name for fragment in forms.composed.fragments if fragment not in graph.fragments]
    assert added == FRAGMENTS[name]
    assert (forms.composed.inputs, forms.composed.outputs) == (graph.inputs, graph.outputs)
    assert {each.label for each in forms.composed.variables} == {each.label for each in graph.variables}


def test_numbers_and_tensors_of_a_layer_are_arguments() -> None:
    text = graph_text(composition(STACKS["numbers of their own"]).composed)
    head, _, rest = text.partition("fragment gated_layer(\n")
    declared, _, body = rest.partition(")")
    names = [line.split(":")[0].strip() for line in declared.splitlines()]
    assert names[:3] == ["hidden", "mask", "number"]
    assert names[3:] == ["norm_weight", "norm_bias", "gate_weight", "gate_bias", "up_weight", "up_bias"]
    assert "# GatedLayer: layers.0-2" in head
    assert "number: scalar" in declared and "gelu_exact" in body
    (call,) = [line for line in text.splitlines() if "layers_0, " in line and "0.25" in line]
    assert call.strip().startswith("layers_0, ")
    assert text.count("  # layers.1: GatedLayer\n") == 1


def test_what_outsiders_compute_between_its_steps_keeps_a_layer_as_it_is() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Halves() for _ in range(3))
            self.between = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer.behind(self.between(layer.before(x)).tanh())
            return x

    graph = document(Interrupted())
    forms = compose(graph, {})
    assert forms.flat is forms.composed is graph


def test_a_name_that_is_taken_keeps_a_kind_as_it_is() -> None:
    graph = document(STACKS["one kind"], "numeric")
    forms = compose(graph, module_classes(STACKS["one kind"]))
    made = {name for each in forms.flat.operations for name in each.outputs}
    new = min(name for name in made if name.startswith("layers_1_v"))
    taken = replace(graph, symbols=(*graph.symbols, new))
    assert compose(taken, module_classes(STACKS["one kind"])).composed is taken


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A tiny BERT, flat and composed, each checked by its export."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config, add_pooling_layer=False).eval()
    axes = {"input_ids": {1: "T"}, "attention_mask": {1: "T"}}
    folder = tmp_path_factory.mktemp("bert")
    ids = torch.randint(0, 50, (1, 7))
    return {
        fragments: export_model_to_nnef(
            model,
            (ids, torch.ones_like(ids)),
            folder / str(fragments),
            TractNNEF(dynamic_axes=axes),
            compression_level=None,
            fragments=fragments,
        )
        for fragments in (False, True)
    }


def test_an_encoder_gives_the_same_bits(bert: dict[bool, Path]) -> None:
    answers = []
    for archive in bert.values():
        with TractWheel().load(archive) as model:
            answers.append([model.run([np.arange(n)[None], np.ones((1, n), np.int64)]) for n in (3, 11)])
            operators = model.operators()
            answers[-1].append([np.array(sorted(operators.items()), dtype=object)])
    flat, composed = answers
    for ours, theirs in zip(flat, composed, strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(ours, theirs, strict=True))


def test_readers_see_what_the_fragments_stand_for(bert: dict[bool, Path]) -> None:
    flat, composed = ((archive / "graph.nnef").read_text() for archive in bert.values())
    assert "fragment bert_layer(" in composed and "fragment bert_layer(" not in flat
    ours, theirs = read_outline(composed), read_outline(flat)
    assert ours.fragments[-1] == "bert_layer" and dict(ours.properties)["module_fragments"] == "bert_layer"
    assert ours.unknown == ()
    assert dict(ours.operators) == dict(theirs.operators)
    assert (ours.externals, ours.outputs) == (theirs.externals, theirs.outputs)
    assert sorted(each.label for each in ours.variables) == sorted(each.label for each in theirs.variables)
    modules = Counter(path for path, _ in module_paths(composed).values())
    assert modules["encoder.layer.2.attention.self.query"] == 3  # the product, its bias, and that made to its rank


def test_nodes_of_the_engine_are_known_by_their_identifiers(bert: dict[bool, Path]) -> None:
    text = (bert[True] / "graph.nnef").read_text()
    names, modules = engine_names(text), module_paths(text)
    assert set(names.values()) <= set(modules)
    nodes = [node.name for node in TractWheel().dump(bert[True]) if "bert_layer" in node.name]
    assert len(nodes) > 30
    for node in nodes:
        begins = [name for name in names if node == name or node.startswith((f"{name}.", f"{name}_"))]
        assert begins, node
        layer = node.split("_bert_layer")[0].replace(
            "last_hidden_state", "encoder_layer_2"
        )  # what it gives is an output
        assert modules[names[max(begins, key=len)]][0].startswith(layer.replace("encoder_layer_", "encoder.layer."))


def test_fragments_are_for_tract(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="for tract alone"):
        export_model_to_nnef(Stack(), (torch.zeros(1, 2, WIDTH),), tmp_path / "x", KhronosNNEF(), fragments=True)
    assert not list(tmp_path.iterdir())


def test_a_difference_inside_of_a_fragment_is_named(tmp_path: Path) -> None:
    """The archive computes another gate than the module whose weights were changed after the export."""
    model = Stack(GatedLayer(), GatedLayer(), GatedLayer())
    torch.manual_seed(0)
    x = torch.randn(2, 5, WIDTH)
    target = TractNNEF(dynamic_axes=AXES)
    archive = export_model_to_nnef(model, (x,), tmp_path / "stack", target, ["x"], ["y"], None, fragments=True)
    prepared = prepare(model.eval(), (x,), target, ("x",), ("y",))
    with torch.no_grad():
        model.layers[1].gate.bias.add_(1.0)
    flat = compose(group_by_module(translate(prepared.graph)), module_classes(model)).flat
    provenance = Provenance(prepared.graph, flat, prepared.stored)
    example = replace(ExampleRun.of(model, (x,)), output_names=("y",))
    found = first_divergence(archive, provenance, example, target.ask, ToleranceLimits(1e-4, 1e-4))
    assert found is not None
    assert found.module_path == "layers.1.gate"
    assert "layers_1" in found.tensor
