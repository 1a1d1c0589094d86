"""An export compared with GGUF files of the same model, on the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from generic_export.errors import OptionError
from t2n_llm.bench.compared_engines.gguf_file import write_gguf
from t2n_llm.cli.report_plot import report_html
from t2n_llm.inspect.gguf_quality import BlockScheme, gguf_named, gguf_quality
from t2n_llm.inspect.quality import compare_windows, torch_predict
from t2n_llm.inspect.quantize_report import quantize_report
from t2n_llm.source.hub import open_source
from t2n_llm.weights.f32_model import load_f32
from tests.families import save_tiny_model
from tests.shared_folders import SharedExport
from tests.t2n_llm.command_line import call

SHORT: dict[str, Any] = {"tokens": 120, "window": 41}


@pytest.fixture(scope="module")
def export(short_model: Path, shared_export: SharedExport) -> Path:
    return shared_export(short_model, check=False, compress="q4_0:min_max", num_logits_to_keep=0)


@pytest.fixture(scope="module")
def schemes(export: Path) -> dict[str, str]:
    records = json.loads((export / "export.json").read_text())["compression"]["tensors"]
    return {name: record["scheme"] for record in records for name in record["parameters"]}


@pytest.fixture(scope="module")
def gguf(schemes: dict[str, str], short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model-Q4_0.gguf"
    write_gguf(open_source(str(short_model)), schemes, path)
    return path


def test_our_blocks_of_ggmls_algorithm_are_ggmls(export: Path, short_model: Path, gguf: Path) -> None:
    """`min_max` is ggml's reference: the archive in the engine, the rounding, and the file say the same."""
    report = quantize_report(export, str(short_model), against=["llama.cpp", f"llama.cpp:{gguf}"], **SHORT)
    rounded, read = report.rivals
    assert report.quality.mean_kl_divergence > 1e-3
    assert rounded.quality.mean_kl_divergence == pytest.approx(report.quality.mean_kl_divergence, rel=0.03)
    assert read.quality.mean_kl_divergence == pytest.approx(rounded.quality.mean_kl_divergence, rel=1e-3)
    assert (rounded.name, read.name) == ("q4_0 of ggml", "model-Q4_0.gguf")
    assert read.bytes == rounded.bytes < gguf.stat().st_size
    assert read.bits_per_weight == pytest.approx(report.bits_per_weight, rel=0.01)
    page = report_html(report)
    assert "Compared with GGUF" in page and "model-Q4_0.gguf" in page


def test_weights_that_lie_input_first_are_rounded_along_their_inputs(tmp_path: Path) -> None:
    folder = save_tiny_model("gpt2", tmp_path / "gpt2")
    source = open_source(str(folder), require_tokenizer=False)
    model = load_f32(folder)
    name = next(name for name, _ in model.named_parameters() if name.endswith("mlp.c_fc.weight"))
    windows = [list(range(1, 20)), list(range(20, 39))]
    along_inputs, along_outputs = (
        gguf_quality(None, source, {name: BlockScheme("q4_0", axes)}, windows, torch_predict(model.eval()))
        for axes in ((1, 0), None)
    )
    assert along_inputs.quality.mean_kl_divergence != along_outputs.quality.mean_kl_divergence
    assert along_inputs.bytes == along_outputs.bytes
    rounded = load_f32(folder)
    weight = dict(rounded.named_parameters())[name].data
    blocks = quantize(np.ascontiguousarray(weight.T.numpy()), GGMLQuantizationType.Q4_0)
    weight.copy_(torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_0)).T)
    expected = compare_windows(windows, torch_predict(model), torch_predict(rounded.eval()))
    assert along_inputs.quality.mean_kl_divergence == pytest.approx(expected.mean_kl_divergence, rel=1e-6)


def test_a_file_of_another_model(export: Path, short_model: Path, tmp_path: Path) -> None:
    other = save_tiny_model("llama", tmp_path / "llama")
    write_gguf(open_source(str(other), require_tokenizer=False), {}, tmp_path / "other.gguf")
    with pytest.raises(OptionError, match=r"other\.gguf: tensor token_embd"):
        quantize_report(export, str(short_model), against=[f"llama.cpp:{tmp_path / 'other.gguf'}"], **SHORT)


def test_what_cannot_be_compared(export: Path, short_model: Path, shared_export: SharedExport) -> None:
    with pytest.raises(OptionError, match="unknown engine"):
        gguf_named("onnxruntime")
    with pytest.raises(OptionError, match="does not exist"):
        gguf_named("llama.cpp:missing.gguf")
    with pytest.raises(OptionError, match="needs the reference model"):
        quantize_report(export, str(export), against=["llama.cpp"], **SHORT)
    plain = shared_export(short_model, check=False, num_logits_to_keep=0)
    with pytest.raises(OptionError, match="no block-quantized tensors"):
        quantize_report(plain, str(short_model), against=["llama.cpp"], **SHORT)


def test_the_command(export: Path, short_model: Path) -> None:
    arguments = ["quantize-report", export, "--reference", short_model, "--tokens", 60, "--window", 31]
    outcome = call(*arguments, "--against", "llama.cpp", "--json")
    assert outcome.code == 0, outcome.err
    (rival,) = json.loads(outcome.out)["rivals"]
    assert rival["name"] == "q4_0 of ggml" and rival["quality"]["positions"] == 60
    shown = call(*arguments, "--against", "llama.cpp")
    assert "compared with GGUF" in shown.out and "q4_0 of ggml" in shown.out
    refused = call(*arguments, "--against", "ollama")
    assert refused.code == 2 and "unknown engine" in refused.err
