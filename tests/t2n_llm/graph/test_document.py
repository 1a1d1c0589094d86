"""The document of a language model: interface, operators before and after the engine's detection, sizes, memory."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.text import graph_text
from generic_export.read.contents import read_contents
from t2n_llm import export_llm
from t2n_llm.check.runner import STATEFUL_TRANSFORM, WheelRunner
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.graph.options import GraphOptions
from t2n_llm.zoo.configs import tiny_config
from tests.families import FAMILIES, save_tiny_model
from tests.model_graphs import model_graph
from tests.trained_model import REAL_MODEL

LAYERS = 2


@cache
def graph_of(options: GraphOptions) -> NnefGraph:
    """Return the graph of the trained model's config, with two layers."""
    config = AutoConfig.from_pretrained(REAL_MODEL, num_hidden_layers=LAYERS)
    return model_graph(config, options, revision="abc").document


def text_of(options: GraphOptions) -> str:
    return graph_text(graph_of(options))


# What was the default before activations were f32: for GPUs, and for processors with f16 arithmetic.
HALF = {"activations": "f16", "attention": "sdpa"}


@pytest.fixture
def exported(real_export: Path) -> Path:
    return locate_archive(real_export).path


@pytest.fixture
def exported_in_half(half_export: Path) -> Path:
    return locate_archive(half_export).path


def test_interface_names_symbols_and_properties() -> None:
    graph = graph_of(GraphOptions())
    assert graph.inputs[:3] == ("input_ids", "in_cache_key_0", "in_cache_value_0")
    assert graph.outputs[:3] == ("outputs", "out_cache_key_0", "out_cache_value_0")
    assert len(graph.inputs) == len(graph.outputs) == 1 + 2 * LAYERS
    assert graph.symbols == ("S", "P")
    properties = dict(graph.properties)
    assert properties["source_model"] == "example"
    assert properties["source_revision"] == "abc"
    assert {"producer", "producer_version", "torch_version", "transformers_version", "architecture"} <= set(properties)


def test_no_example_size_reaches_the_graph() -> None:
    text = text_of(GraphOptions())
    for line in text.partition("\ngraph ")[2].splitlines():
        if " = " in line and "external" not in line and "variable" not in line:
            assert not re.search(r"\b(5|7|12)\b(?!\])", re.sub(r"_\d+|layers_\d+", "", line.split("#")[0])), line


def test_the_engine_reads_its_own_cache_in_two_products(exported: Path) -> None:
    with TractWheel().load(exported, transforms=[STATEFUL_TRANSFORM]) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids"]
        operators = model.operators()
    layers = 6
    assert operators["DynamicKeyValueCache"] == 2 * layers
    assert operators["Softmax"] == layers
    assert operators["FlashSDPA"] == operators["ScaledMaskedSoftmax"] == 0
    # Weights and caches are multiplied as they are, and products round new keys and values: what is cast is the table's rows.
    assert operators["Cast"] <= 2


def test_weights_are_f16_and_everything_between_f32() -> None:
    graph = graph_of(GraphOptions())
    assert {variable.dtype for variable in graph.variables if len(variable.shape) > 1} == {"f16"}
    assert {variable.dtype for variable in graph.variables if len(variable.shape) == 1} == {"f32"}
    products = [line for line in graph_text(graph).splitlines() if "tract_core_einsum(" in line]
    rounded = [line for line in products if 'acc="f16"' in line]
    assert len(rounded) == LAYERS and all("out_cache_key" in line and "identity" in line for line in rounded)
    assert len(products) > len(rounded) and all('acc="f32"' in line for line in products if line not in rounded)
    caches = [line for line in graph_text(graph).splitlines() if "in_cache_" in line and "external" in line]
    assert len(caches) == 2 * LAYERS and all('datum_type="f16"' in line for line in caches)


def test_one_mask_serves_all_layers() -> None:
    assert text_of(GraphOptions()).count(" = le(") == 1


def test_activations_and_attention_are_chosen_apart(short_model: Path, tmp_path: Path) -> None:
    result = export_llm(
        str(short_model), tmp_path / "export", activations="f32", attention="sdpa", decode_steps=8, stateful=True
    )
    assert result.validation is not None and result.validation.passed
    with pytest.raises(OptionError, match="--activations f16 does not apply to f32 weights"):
        GraphOptions(dtype="f32", activations="f16")


def test_the_engine_sees_one_input_and_its_own_operators(exported_in_half: Path) -> None:
    with TractWheel().load(exported_in_half, transforms=[STATEFUL_TRANSFORM]) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids"]
        operators = model.operators()
    layers = 6
    assert operators["ApplyRope"] == 2 * layers
    assert operators["RmsNorm"] == 2 * layers + 1
    assert operators["InPlaceKvSdpa"] == layers
    assert operators["Silu"] == layers
    for spelled_out in ("Softmax", "Rsqrt", "Sigmoid", "MultiBroadcastTo", "RotateHalf", "Square"):
        assert operators[spelled_out] == 0, spelled_out


def test_without_the_transform_attention_is_flash_and_caches_are_concatenated(exported_in_half: Path) -> None:
    with TractWheel().load(exported_in_half) as model:
        operators = model.operators()
    assert operators["FlashSDPA"] == 6
    assert operators["Concat"] >= 12


def test_grouped_query_heads_are_not_repeated() -> None:
    text = text_of(GraphOptions(attention="sdpa"))
    assert "tile(" not in text + text_of(GraphOptions())
    assert re.search(r"tract_transformers_sdpa\(\w+, out_cache_key_0, out_cache_value_0", text)


def test_rotary_tables_are_computed_in_f32_and_rounded_last() -> None:
    text = text_of(GraphOptions(dtype="f16", activations="f16"))
    for function in ("cos", "sin"):
        (line,) = [line for line in text.splitlines() if f"= {function}(" in line]
        assert "# f32 " in line


def test_tied_embeddings_reach_the_gather_as_a_constant_of_their_own() -> None:
    text = text_of(GraphOptions())
    assert text.count('label="model.embed_tokens.weight"') == 1
    table = re.search(r"tract_core_gather\((\w+), input_ids", text)
    assert table is not None
    assert re.search(rf"{table.group(1)} = reshape\(", text)


def test_one_commented_block_per_module() -> None:
    titles = re.findall(r"^  # (\S+): \w+$", text_of(GraphOptions()), flags=re.MULTILINE)
    leaves = [title for title in titles if title.endswith(("_proj", "layernorm", "self_attn"))]
    assert len(leaves) == len(set(leaves)) == LAYERS * (7 + 2 + 1)


@pytest.mark.parametrize(
    ("switch", "pattern"),
    [
        ("f32_linear_accumulation", r'expr="abk,nk->abn", acc="f32"'),
        ("f32_attention", r'tract_transformers_sdpa\(.*, datum_type="f32"'),
        ("f32_norm", r"input_layernorm_rms_norm = tract_core_rms_norm\(.*# f32"),
    ],
)
def test_numerics_switches_show_and_run(
    switch: str, pattern: str, exported_in_half: Path, short_model: Path, tmp_path: Path
) -> None:
    result = export_llm(str(short_model), tmp_path / "export", dtype="f16", decode_steps=8, **HALF, **{switch: True})
    assert result.validation is not None
    assert result.validation.passed
    assert re.search(pattern, read_contents(result.archive).graph_text)
    assert not re.search(pattern, read_contents(exported_in_half).graph_text)


@pytest.mark.parametrize("keep", [0, 3])
def test_more_logits(keep: int, short_model: Path, tmp_path: Path) -> None:
    """0 keeps all positions; N keeps the last N, or all of a shorter call (a decode step)."""
    result = export_llm(str(short_model), tmp_path / "export", dtype="f32", decode_steps=8, num_logits_to_keep=keep)
    assert result.validation is not None
    assert result.validation.passed
    prefill = result.validation.checks[0]
    assert len(prefill.steps) == (keep or 29)
    with WheelRunner(result.archive) as runner:
        rows = [len(logits) for logits in runner.run_turns([[1, 2], [3], [4, 5, 6, 7]], stateful=True)]
    assert rows == ([2, 1, 4] if keep == 0 else [2, 1, 3])


@pytest.mark.parametrize("compress", [None, "q4_0"])
def test_batch_symbol(compress: str | None, short_model: Path, tmp_path: Path) -> None:
    result = export_llm(
        str(short_model), tmp_path / "export", dtype="f32", decode_steps=8, batch=True, compress=compress
    )
    assert result.validation is not None
    assert result.validation.passed
    assert result.manifest["graph"]["symbols"] == ["B", "S", "P"]
    ids = np.array([[5, 6, 7], [8, 9, 10], [11, 12, 13]], np.int64)
    with TractWheel().load(result.archive) as model:
        empty = [np.zeros((3, 4, 0, 32), np.float32)] * (2 * LAYERS)
        singles = [model.run([ids[row : row + 1], *[cache[:1] for cache in empty]])[0] for row in range(3)]
        for batch in (2, 3):
            together = model.run([ids[:batch], *[cache[:batch] for cache in empty]])[0]
            np.testing.assert_allclose(together, np.concatenate(singles[:batch]), atol=1e-4)


def test_f16_agrees_on_every_greedy_token_of_64(real_export: Path) -> None:
    report = validate_folder(real_export, str(REAL_MODEL), options=ValidateOptions.of(decode_steps=64))
    for name in ("decode", "greedy"):
        check = next(check for check in report.checks if check.name == name)
        assert (check.same_top1_count, len(check.steps)) == (64, 64)


def test_caches_fold_where_attention_is_spelled_out(tmp_path: Path) -> None:
    """The greedy check of test_families needs one input; here attention is spelled out, and caches still fold."""
    source = save_tiny_model("gemma2", tmp_path / "model")
    archive = export_llm(str(source), tmp_path / "export", check=False, require_tokenizer=False).archive
    with TractWheel().load(archive, transforms=[STATEFUL_TRANSFORM]) as model:
        assert len(model.inputs) == 1
        assert model.operators()["DynamicKeyValueCache"] == 2 * FAMILIES["gemma2"]().num_hidden_layers


SKELETON = """
    import resource, sys
    import torch, transformers
    from transformers import LlamaConfig
    from generic_export.nnef.text import graph_text
    from t2n_llm.graph.causal_lm import build_graph
    from t2n_llm.graph.options import GraphOptions
    from t2n_llm.graph.storage import finish_model
    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rope_parameters=rope)
    before = peak()
    graph = finish_model(build_graph(config, GraphOptions(), name="Llama-3.1-8B"), GraphOptions()).document
    text = graph_text(graph)
    print(peak() - before, len(text.splitlines()), sum(len(v.shape) > 1 for v in graph.variables))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak memory")
@pytest.mark.nightly
def test_an_8b_skeleton_never_holds_a_weight() -> None:
    """Config to text of a 32-layer Llama-3.1-8B; its smallest projection alone would be 8 MiB, the model 16 GB."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SKELETON)], check=True, capture_output=True, text=True
    )
    growth_mib, lines, matrices = map(int, run.stdout.split())
    assert matrices == 32 * 7 + 2
    assert lines > 1000
    assert growth_mib < 400


@pytest.mark.nightly
def test_blocks_of_real_size_bound_no_length() -> None:
    """DeepSeek-V4 sums up 128 tokens: an example of fewer than two such blocks would leave it with one.

    Small blocks are in test_attention_families.py.
    """
    config = tiny_config("deepseek_v4")
    config.compress_rates["heavily_compressed_attention"] = 128
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 1, ["heavily_compressed_attention"], ["moe"]
    text = graph_text(model_graph(config, GraphOptions(dtype="f32")).document)
    assert "tract_assert P >= 0;" in text
    assert "tract_assert P <=" not in text and "tract_assert S <=" not in text
