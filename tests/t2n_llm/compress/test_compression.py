"""Compressed exports: what recipes make of real graphs, and whether the engine says what the dequantised model says."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from generic_export.errors import ArchiveError, OptionError, ValidationError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.dat import HEADER_BYTES, read_block_dat
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.half import CastReport
from generic_export.weights.source import BlockTensorSource, InMemoryTensor, TensorSource
from generic_export.weights.values import read_tensor
from quant.algorithms import BUILT_IN
from quant.budget import TargetSize
from quant.packing import pack_q4_0, unpack_q4_0
from quant.recipe import Recipe, named_recipe, parse_recipe
from quant.stream import PackedBlocks
from t2n_llm.compress.apply import compress
from t2n_llm.compress.plan import CompressionPlan, plan_compression
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.export.against_source import compare_with_source
from t2n_llm.export.options import ExportOptions, ValidateOptions
from t2n_llm.export.pipeline import ExportResult, export_llm
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.model_graph import ModelGraph
from t2n_llm.weights.archive_weights import ArchiveWeights, StoredParameter
from tests.families import FAMILIES, config, save_tiny_model
from tests.model_graphs import model_graph
from tests.trained_model import REAL_MODEL

ALGORITHMS = (*BUILT_IN, "imatrix")
STEPS = 6


@functools.cache
def captured(family: str) -> ModelGraph:
    """The graph of a family, without weights; captured once."""
    return model_graph(FAMILIES[family]())


def planned(family: str, recipe: Recipe) -> tuple[CompressionPlan, ModelGraph]:
    """A recipe applied to a random model of a family."""
    torch.manual_seed(0)
    model = captured(family)
    shapes = {variable.label: variable.shape for variable in model.document.variables}
    sources: dict[str, TensorSource] = {
        label: InMemoryTensor(label, torch.randn(shape, dtype=torch.float16)) for label, shape in shapes.items()
    }
    model = replace(model, sources=sources)
    return plan_compression(recipe, model), model


def rules(**tensors: str) -> Recipe:
    return parse_recipe({"tensors": tensors}, "test", ALGORITHMS)


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_linears_are_quantised_and_embeddings_and_head_are_not(family: str) -> None:
    plan, _ = planned(family, named_recipe("q4_0", ALGORITHMS))
    matrices = {variable.label for variable in plan.graph.variables if len(variable.shape) == 2}
    outside = matrices - plan.formats.keys()
    assert plan.formats and set(plan.formats.values()) == {"q4_0"}
    assert all("layers." in label or ".h." in label for label in plan.formats)
    assert not any("layers." in label or ".h." in label for label in outside)
    assert all("q4_0+embeddings" in plan.kept[label] for label in outside)


def test_linear_layers_that_are_products_with_a_transposed_weight_are_quantised() -> None:
    model = model_graph(config("falcon")())
    sources: dict[str, TensorSource] = {
        variable.label: InMemoryTensor(variable.label, torch.zeros(variable.shape, dtype=torch.float16))
        for variable in model.document.variables
    }
    plan = plan_compression(named_recipe("q4_0", ALGORITHMS), replace(model, sources=sources))
    assert len(plan.formats) == 8 and not any(plan.axes[label] for label in plan.formats)


def test_the_transposed_weights_of_gpt2_are_turned() -> None:
    plan, _ = planned("gpt2", named_recipe("q4_0", ALGORITHMS))
    label = "transformer.h.0.attn.c_attn.weight"
    assert plan.axes[label] == (1, 0)
    assert next(variable.shape for variable in plan.graph.variables if variable.label == label) == (192, 64)


def test_a_tied_table_is_stored_once_where_both_uses_agree() -> None:
    plan, _ = planned("llama", named_recipe("q4_0+embeddings", ALGORITHMS))
    assert plan.formats["model.embed_tokens.weight"] == "q4_0"
    assert plan.parameters["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    assert not plan.shared


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [
        (rules(lm_head="q4_0"), {"lm_head.weight": "q4_0"}),
        (rules(embed_tokens="q8_1"), {"model.embed_tokens.weight": "q8_1"}),
        (
            rules(embed_tokens="q8_1", lm_head="q4_0"),
            {"model.embed_tokens.weight": "q8_1", "lm_head.weight": "q4_0"},
        ),
    ],
)
def test_a_tied_table_is_stored_twice_where_they_differ(recipe: Recipe, formats: dict[str, str]) -> None:
    plan, model = planned("llama", recipe)
    assert plan.formats == formats
    assert plan.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    compression = compress(plan, model)
    for variable in plan.graph.variables:
        assert compression.model.sources[variable.label].shape == variable.shape
    parameters = {record.label: record.parameters for record in compression.records}
    assert parameters["model.embed_tokens.weight"] == ("model.embed_tokens.weight",)
    assert parameters["lm_head.weight"] == ("lm_head.weight",)


def test_what_cannot_be_quantised_is_kept_and_says_why() -> None:
    plan, _ = planned("llama", rules(**{"*": "q8_1"}))
    assert set(plan.formats.values()) == {"q8_1"}
    assert set(plan.formats) == {"model.embed_tokens.weight"}
    assert plan.kept["model.layers.0.self_attn.q_proj.weight"] == "tract has no matmul with q8_1 weights"


def test_f32_in_an_f16_graph_names_the_option_for_it() -> None:
    with pytest.raises(OptionError, match="--keep-f32"):
        planned("llama", rules(lm_head="f32"))


def test_a_size_is_filled_but_not_exceeded() -> None:
    smallest, model = planned("llama", named_recipe("q4_0+embeddings", ALGORITHMS))
    least = sum(source.nbytes for source in compress(smallest, model).model.sources.values())
    for budget in (least, least + 20_000, 10**9):
        plan, model = planned("llama", named_recipe("q4_0-mixed", ALGORITHMS, TargetSize(budget)))
        size = sum(source.nbytes for source in compress(plan, model).model.sources.values())
        assert size <= budget
        assert bool(plan.formats) == (budget < 10**9)
        assert (size == least) == (budget == least)
    with pytest.raises(OptionError, match="--target-size"):
        planned("llama", named_recipe("q4_0-mixed", ALGORITHMS, TargetSize(least - 1)))


def test_overrides_take_the_place_of_sources() -> None:
    plan, model = planned("llama", named_recipe("q4_0:imatrix", ALGORITHMS))
    label = "model.layers.0.mlp.down_proj.weight"
    assert plan.calibrated().keys() == plan.formats.keys()
    weight = read_tensor(model.sources[label]).float()
    packed = PackedBlocks(InMemoryTensor(label, pack_q4_0(BUILT_IN["min_max"].quantize(weight))))
    norm = InMemoryTensor("n", torch.full((64,), 2.0))
    made = compress(
        plan,
        model,
        overrides={label: packed, "model.norm.weight": norm},
        output_errors={label: 0.5},
    )
    assert made.model.sources[label] is packed
    assert isinstance(packed, BlockTensorSource)
    assert made.model.sources["model.norm.weight"].dtype is torch.float32  # a vector
    records = {record.label: record for record in made.records}
    assert (records[label].algorithm, records[label].output_error, records[label].replaced) == ("imatrix", 0.5, True)
    assert records["model.norm.weight"].replaced
    left = records["model.layers.1.mlp.down_proj.weight"]
    assert (left.algorithm, left.replaced) == ("search", False)


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "q4_0", "file": Path("r.yaml")}, "--compress and --recipe exclude"),
        ({"target_size": "1GB"}, "requires a recipe"),
        ({"name": "q4_1"}, "recipe 'q4_1' is unknown"),
        ({"name": "q4_0:gtpq"}, "Did you mean 'gptq'"),
        ({"name": "q4_0", "quantizers": "nothing"}, "does not name a table"),
    ],
)
def test_wrong_options_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompressionOptions(**options)


@pytest.mark.parametrize("option", ["budget", "calibration_seed"])
def test_a_removed_option_names_what_took_its_place(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} was removed: .*tuned|{option} was removed: .*fixed seed"):
        ExportOptions.of(compress="q4_0:tuned", **{option: 1})


def test_recipes_that_quantise_nothing_say_which_element_type() -> None:
    assert CompressionOptions("f32").dtype() == "f32"
    assert CompressionOptions("q4_0").dtype() is None
    assert CompressionOptions().recipe() is None


def test_recorded_options_name_no_place_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("tensors: {}")
    recorded = CompressionOptions(file=file, calibration=str(tmp_path / "calib.txt")).recorded()
    assert str(tmp_path) not in json.dumps(recorded)
    assert (recorded["file"], recorded["calibration"]) == ("mine.yaml", "calib.txt")


# --- exports, in the engine --------------------------------------------------------------------------


def exported(source: Path, target: Path, **options: Any) -> ExportResult:
    defaults: dict[str, Any] = {"archive": "dir", "decode_steps": STEPS, "require_tokenizer": False}
    return export_llm(str(source), target, **(defaults | options))


@pytest.fixture(scope="module")
def compressed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """The random Llama with everything in Q4_0."""
    return exported(tiny_llama, tmp_path_factory.mktemp("q4") / "export", compress="q4_0+embeddings")


def test_a_compressed_archive_agrees_with_the_dequantised_model(compressed: ExportResult) -> None:
    report = compressed.validation
    assert report is not None and report.passed
    assert report.original is not None
    # The random model is far from the original, and within the f16 tolerance of its own dequantised weights.
    assert report.original.mean_kl_divergence > 10 * max(check.max_kl_divergence for check in report.checks)


def test_blocks_in_the_archive_are_those_of_the_algorithm(compressed: ExportResult, tiny_llama: Path) -> None:
    label = "model.layers.1.mlp.down_proj.weight"
    weight = read_tensor(open_checkpoint(tiny_llama).tensors[label])
    found = unpack_q4_0(read_block_dat(compressed.archive / f"{label}.dat").data)
    expected = BUILT_IN["search"].quantize(weight)
    assert torch.equal(found.d, expected.d.reshape(-1))
    assert torch.equal(found.q.reshape(expected.q.shape), expected.q)


def test_the_manifest_records_every_tensor_and_the_recipe_lies_beside(compressed: ExportResult) -> None:
    record = compressed.manifest["compression"]
    files = {path.relative_to(compressed.archive).as_posix() for path in compressed.archive.rglob("*.dat")}
    assert {f"{tensor['label']}.dat" for tensor in record["tensors"]} == files
    sizes = sum((compressed.archive / name).stat().st_size - HEADER_BYTES for name in files)
    assert record["bytes"] == sizes
    assert 4.5 < record["bits_per_weight"] < 5
    quantized = [tensor for tensor in record["tensors"] if tensor["scheme"] == "q4_0"]
    assert all(0.003 < tensor["relative_error"] < 0.01 and tensor["bits_per_weight"] == 4.5 for tensor in quantized)
    recipe = yaml.safe_load((compressed.output_dir / "recipe.yaml").read_text())
    assert parse_recipe(recipe, "r", ALGORITHMS) == named_recipe("q4_0+embeddings", ALGORITHMS)


def test_a_compressed_folder_is_validated_again(compressed: ExportResult, tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(compressed.output_dir, tmp_path / "export")
    manifest = json.loads((folder / "export.json").read_text())
    manifest["options"]["compression"] |= {"budget": "30min", "calibration_seed": 3}  # as earlier releases recorded
    (folder / "export.json").write_text(json.dumps(manifest))
    report = validate_folder(folder, str(tiny_llama), options=ValidateOptions.of(decode_steps=STEPS))
    assert report.passed and report.original is not None
    assert not compare_with_source(folder, str(tiny_llama)).findings


def test_the_command_line_engine_agrees_too(compressed: ExportResult, tiny_llama: Path) -> None:
    from generic_export.inference_target.tract.releases.install import find_tract_cli

    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    report = validate_folder(
        compressed.output_dir,
        str(tiny_llama),
        options=ValidateOptions.of(decode_steps=STEPS, engine="cli"),
    )
    assert report.passed


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"compress": "q4_0+embeddings", "archive": "tar"}),
        ("phi3", {"compress": "q4_0:min_max", "archive": "tgz", "dtype": "f32"}),
        ("gemma3_text", {"compress": "q4_0", "f32_linear_accumulation": True}),
    ],
)
def test_families_and_archive_forms(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    source = save_tiny_model(family, tmp_path / family)
    result = exported(source, tmp_path / "export", **options)
    assert result.validation is not None and result.validation.passed
    assert result.validation.original is not None


@pytest.mark.parametrize(("memory", "activations"), [("f16", "f16"), ("f16", "f32"), ("f32", "f32")])
def test_weights_that_are_wider_in_memory_are_the_same_in_the_file(
    compressed: ExportResult, tiny_llama: Path, tmp_path: Path, memory: str, activations: str
) -> None:
    options = {"compress": "q4_0+embeddings", "weights_in_memory": memory, "activations": activations}
    result = exported(tiny_llama, tmp_path / "export", **options)
    assert result.validation is not None and result.validation.passed
    label = "model.layers.1.mlp.down_proj.weight"
    assert digest_of(result, label) == digest_of(compressed, label)
    with TractWheel().load(compressed.archive) as packed, TractWheel().load(result.archive) as wider:
        assert wider.operators()["Gather"] == packed.operators()["Gather"]  # folded away at load
        # With f32 activations, a product in each of the two layers rounds the keys.
        rounding = 2 if activations == "f16" else 0
        assert wider.operators()["OptMatMul"] + rounding == packed.operators()["OptMatMul"]


def test_weights_of_f16_are_f32_in_memory(tiny_llama: Path, tmp_path: Path) -> None:
    plain = exported(tiny_llama, tmp_path / "plain")
    result = exported(tiny_llama, tmp_path / "export", weights_in_memory="f32")
    assert result.validation is not None and result.validation.passed
    assert {name: each["sha256"] for name, each in result.manifest["tensors"].items() if name.endswith("weight")} == {
        name: each["sha256"] for name, each in plain.manifest["tensors"].items() if name.endswith("weight")
    }
    with TractWheel().load(plain.archive) as narrow, TractWheel().load(result.archive) as wider:
        counted = [(engine.operators()["Cast"], engine.operators()["OptMatMul"]) for engine in (narrow, wider)]
    assert counted[0] == counted[1]  # casts of constants are folded away at load


def digest_of(result: ExportResult, label: str) -> str:
    """Return the SHA-256 of a stored tensor."""
    return str(result.manifest["tensors"][label]["sha256"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_in_memory": "f16"}, "no tensor is stored in fewer"),
        ({"weights_in_memory": "f32", "activations": "f16"}, "with f16 activations"),
        ({"weights_in_memory": "f32", "dtype": "f32"}, "stored in f32 already"),
        ({"weights_in_memory": "bf16"}, "dtype in memory 'bf16' is unknown"),
    ],
)
def test_what_cannot_be_wider_in_memory(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        exported(tiny_llama, tmp_path / "export", **options)
    assert not list(tmp_path.iterdir())


def test_a_recipe_file_and_a_users_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from quant.algorithms import BUILT_IN\nTABLE = {'mine': BUILT_IN['min_max']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "algorithm: mine\ntensors:\n  '@linears': q4_0\n  embed_tokens: q8_1\n  lm_head: q4_0:search\n  layers.0: f16\n"
    )
    result = exported(tiny_llama, tmp_path / "export", recipe=recipe, quantizers="plugin:TABLE")
    assert result.validation is not None and result.validation.passed
    schemes = {
        tensor["label"]: (tensor["scheme"], tensor["algorithm"]) for tensor in result.manifest["compression"]["tensors"]
    }
    assert schemes["model.layers.0.mlp.up_proj.weight"] == ("f16", "")
    assert schemes["model.layers.1.mlp.up_proj.weight"] == ("q4_0", "mine")
    assert schemes["model.embed_tokens.weight"] == ("q8_1", "")
    assert schemes["lm_head.weight"] == ("q4_0", "search")


@pytest.mark.parametrize("algorithm", ["best", "tuned"])
def test_trained_weights_with_calibration(algorithm: str, short_model: Path, tmp_path: Path) -> None:
    # Few tokens: what is tested is that calibration's tensors arrive, not how good they are.
    text = tmp_path / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:3000])
    result = export_llm(
        str(short_model), tmp_path / "export", compress=f"q4_0:{algorithm}", calibration=str(text), decode_steps=STEPS
    )
    assert result.validation is not None and result.validation.passed
    tensors = result.manifest["compression"]["tensors"]
    quantized = [tensor for tensor in tensors if tensor["scheme"] == "q4_0"]
    assert all(tensor["replaced"] and 0 < tensor["output_error"] < 0.05 for tensor in quantized)
    folded = [tensor["label"] for tensor in tensors if tensor["replaced"] and tensor["scheme"] == "f32"]
    assert any("layernorm" in label for label in folded)


# --- the archive's weights in PyTorch ----------------------------------------------------------------


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights_of(result: ExportResult, archive: Path | None = None) -> ArchiveWeights:
    return ArchiveWeights.of_records(archive or result.archive, result.manifest["compression"]["tensors"])


def test_a_model_gets_the_values_of_the_archive(compressed: ExportResult, tiny_llama: Path) -> None:
    model = model_of(tiny_llama)
    original = model.model.layers[0].mlp.up_proj.weight.clone()
    norm = model.model.norm.weight.clone()
    weights_of(compressed).apply(model)
    expected = BUILT_IN["search"].quantize(original).dequantize()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)
    assert torch.equal(model.model.norm.weight, norm)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_values_that_do_not_resemble_the_model_are_refused(
    compressed: ExportResult, tiny_llama: Path, tmp_path: Path
) -> None:
    archive = Path(shutil.copytree(compressed.archive, tmp_path / "model.nnef"))
    file = archive / "model.layers.1.mlp.up_proj.weight.dat"
    data = bytearray(file.read_bytes())
    half = HEADER_BYTES + (len(data) - HEADER_BYTES) // 2
    file.write_bytes(data[:HEADER_BYTES] + data[half:] + data[HEADER_BYTES:half])
    with pytest.raises(ValidationError, match=r"layers\.1\.mlp\.up_proj\.weight: the stored values differ"):
        weights_of(compressed, archive).apply(model_of(tiny_llama))


def test_a_missing_or_damaged_archive_is_explained(compressed: ExportResult, tiny_llama: Path, tmp_path: Path) -> None:
    model = model_of(tiny_llama)
    unknown = ArchiveWeights(compressed.archive, (StoredParameter("nothing", ("model.norm.weight",)),))
    with pytest.raises(ArchiveError, match=r"no tensor 'nothing\.dat'"):
        unknown.apply(model)
    other = ArchiveWeights(compressed.archive, (StoredParameter("model.norm.weight", ("model.nothing",)),))
    with pytest.raises(ValidationError, match=r"no parameter model\.nothing"):
        other.apply(model)
    (tmp_path / "model.nnef.tar").write_bytes(b"no tar")
    with pytest.raises(ArchiveError, match="cannot be read"):
        weights_of(compressed, tmp_path / "model.nnef.tar").apply(model)


def test_what_is_quantised_is_read_before_it_is_cast(tiny_llama: Path) -> None:
    model = captured("llama").with_parameters(open_checkpoint(tiny_llama)).with_sources(CastReport())
    made = compress(plan_compression(named_recipe("q4_0", ALGORITHMS), model), model)
    label = "model.layers.0.mlp.up_proj.weight"
    weight = read_tensor(open_checkpoint(tiny_llama).tensors[label])
    expected = pack_q4_0(BUILT_IN["search"].quantize(weight)).numpy().tobytes()
    assert b"".join(made.model.sources[label].chunks()) == expected
    assert not (weight == weight.half().float()).all()
