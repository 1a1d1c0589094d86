"""`--fragments`: language models whose layers are calls of one fragment, beside the same models without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.documents import module_classes
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.composition import compose
from generic_export.nnef.text import graph_text
from generic_export.read.contents import read_contents
from generic_export.read.expansion import flat_text
from generic_export.read.outline import read_outline
from t2n_llm import export_llm
from t2n_llm.check.runner import STATEFUL_TRANSFORM
from t2n_llm.export.against_source import compare_with_source
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.export.verify import verify_export
from t2n_llm.inspect.inspection import inspect_archive, stateful_transforms
from tests.families import FAMILIES, config, save_tiny_model
from tests.model_graphs import model_graph

# One dense layer, and experts in the others; two layers of each kind.
MIXED = config("qwen3_moe", num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 2])

PROMPT, NEXT = np.arange(3, 14)[None], np.array([[7]])


def exported(source: Path, folder: Path, **choices: Any) -> Path:
    return export_llm(
        str(source), folder, fragments=True, check=False, require_tokenizer=False, archive="dir", **choices
    ).archive


def logits(archive: Path) -> list[np.ndarray]:
    """Return those of a prompt and of a token behind it, the engine keeping the cache."""
    transforms = stateful_transforms(read_outline(read_contents(archive).graph_text))
    with TractWheel().load(archive, transforms=transforms) as model:
        session = model.spawn_state()
        return [session.run([tokens])[0] for tokens in (PROMPT, NEXT)]


# family, options, fragments; where there are several kinds of layers, each says where it is
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "engine state": ("llama", {"stateful": True}, {"llama_decoder_layer": "# LlamaDecoderLayer: model.layers.0-1"}),
    "blocks": ("llama", {"compress": "q4_0"}, {"llama_decoder_layer": "# LlamaDecoderLayer: model.layers.0-1"}),
    "sliding and full": ("gemma3_text", {}, {"gemma3_decoder_layer": "# Gemma3DecoderLayer: model.layers.0-1"}),
    "dense and experts": (
        "mixed",
        {"dtype": "f32"},
        {
            "qwen3_moe_decoder_layer": "# Qwen3MoeDecoderLayer: model.layers.0, 2",
            "qwen3_moe_decoder_layer_1": "# Qwen3MoeDecoderLayer: model.layers.1, 3",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_without_fragments(case: str, tmp_path: Path) -> None:
    family, choices, fragments = CASES[case]
    source = save_tiny_model(family, tmp_path / "source", configs=FAMILIES | {"mixed": MIXED})
    composed = exported(source, tmp_path / "export", **choices)
    flat = Path(shutil.copytree(composed, tmp_path / "flat.nnef"))
    text = read_contents(composed).graph_text
    (flat / "graph.nnef").write_text(flat_text(text))
    assert read_outline(text).fragments == ("tract_core_properties", *fragments)
    assert read_outline(flat_text(text)).fragments == ("tract_core_properties",)
    for fragment, title in fragments.items():
        assert f"{title}\nfragment {fragment}(" in text
    for ours, theirs in zip(logits(composed), logits(flat), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("gpt_neox", marks=pytest.mark.nightly)])
def test_round_trip_of_families(family: str) -> None:
    model = model_graph(FAMILIES[family]())
    graph = model.document
    forms = compose(graph, module_classes(model.network))
    assert flat_text(graph_text(forms.composed)) == graph_text(forms.flat)
    assert len(forms.composed.fragments) == len(graph.fragments) + 1


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> tuple[Path, Path]:
    """The source, and its export with fragments, whose checks passed."""
    folder = tmp_path_factory.mktemp("fragments") / "export"
    result = export_llm(str(tiny_llama), folder, fragments=True, decode_steps=8, require_tokenizer=False, archive="dir")
    assert result.validation is not None and result.validation.passed
    assert len(result.validation.checks) == 4
    return tiny_llama, folder


def test_what_reads_exports_reads_these(checked: tuple[Path, Path]) -> None:
    source, folder = checked
    assert verify_export(folder).passed
    compared = compare_with_source(folder, str(source))
    assert compared.same_graph and not compared.findings
    archive = locate_archive(folder)
    inspection = inspect_archive(archive)
    assert inspection.problems == () and inspection.outline.unknown == ()
    assert inspection.cache is not None and inspection.cache.tensors == 4
    assert inspection.outline.fragments[-1] == "llama_decoder_layer"
    assert dict(inspection.outline.operators)["tract_transformers_apply_rope"] == 4
    with TractWheel().load(archive.path, transforms=[STATEFUL_TRANSFORM]) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids"]
        assert model.operators()["DynamicKeyValueCache"] == 4


def test_an_export_without_fragments_gives_the_same_bits(checked: tuple[Path, Path], tmp_path: Path) -> None:
    source, folder = checked
    flat = export_llm(str(source), tmp_path / "flat", check=False, require_tokenizer=False).archive
    assert "module_fragments" not in dict(read_outline(read_contents(flat).graph_text).properties)
    for ours, theirs in zip(logits(locate_archive(folder).path), logits(flat), strict=True):
        assert np.array_equal(ours, theirs)
