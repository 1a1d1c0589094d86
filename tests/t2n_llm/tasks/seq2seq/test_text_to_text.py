"""Encoder-decoders that read and write text: two archives in the engine say what transformers says, in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generic_export.errors import EngineLoadError, EngineRunError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.reading import read_graph_text, signature_of
from t2n_llm import export_llm
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.runtime.from_source import GenerationOptions, SourceModel
from t2n_llm.tasks.names import TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model
from tests.word_tokenizers import save_word_tokenizer

TEXT = "w7 w12 w90 w33 w5 w61"


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BART with a tokenizer."""
    folder = tmp_path_factory.mktemp("bart") / "model"
    model = shallow_model("bart", TEXT_TO_TEXT)
    save_tiny_model(model, folder)
    save_word_tokenizer(folder, model.config.vocab_size)
    return folder


@pytest.fixture(scope="module")
def exported(bart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It exported in f32."""
    return export_llm(str(bart), tmp_path_factory.mktemp("bart-f32") / "out", task=TEXT_TO_TEXT, dtype="f32").output_dir


def _own(bart: Path, **options: Any) -> str:
    """Return what transformers' `generate()` makes of the text."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(bart), AutoTokenizer.from_pretrained(bart)
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": 12, **options}
    with torch.no_grad():
        said = model.generate(**tokenizer(TEXT, return_tensors="pt"), **settings)
    return str(tokenizer.decode(said[0, 1:], skip_special_tokens=True))  # without what the decoder started with


def test_the_checks_are_four_for_each_of_two_sources(exported: Path) -> None:
    report = json.loads((exported / "export.json").read_text())["validation"]
    assert report["passed"]
    names = [check["name"] for check in report["checks"]]
    assert len(names) == 8
    assert {name.partition(", ")[0] for name in names} == {"prefill", "chunked prefill", "decode", "greedy"}
    assert max(check["max_abs_error"] for check in report["checks"]) < 1e-4


def test_keys_and_values_of_the_source_are_the_encoder_s(exported: Path) -> None:
    encoder, decoder = (signature_of(read_graph_text(exported / f"{role}.nnef.tar")) for role in ("encoder", "decoder"))
    assert list(encoder.inputs) == ["input_ids"]
    assert all(name.startswith("cross_") for name in encoder.outputs)
    assert set(encoder.outputs) < set(decoder.inputs)
    parts = json.loads((exported / "export.json").read_text())["archives"]
    assert not any("encoder_attn.k_proj" in label for label in parts["decoder"]["tensors"])
    assert not any(label.startswith("model.decoder.layers.0.self_attn") for label in parts["encoder"]["tensors"])


def test_batches_and_logits_of_every_position(bart: Path, tmp_path: Path) -> None:
    result = export_llm(
        str(bart), tmp_path / "out", task="summarization", dtype="f32", batch=True, num_logits_to_keep=0
    )
    assert result.validation is not None
    assert result.validation.passed
    assert sum(check.name == "sources of several lengths" for check in result.validation.checks) == 1


@pytest.fixture(scope="module")
def stateful(bart: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """It exported with states that the engine keeps, and computing in f16."""
    out = tmp_path_factory.mktemp("bart-stateful") / "out"
    return export_llm(str(bart), out, task="summarization", dtype="f16", stateful=True, activations="f16")


def test_states_in_the_engine_and_products_in_f16(stateful: ExportResult) -> None:
    assert stateful.validation is not None
    assert stateful.validation.passed
    assert not any(check.name == "sources of several lengths" for check in stateful.validation.checks)


def test_half_precision_and_blocks(bart: Path, tmp_path: Path) -> None:
    for compress in (None, "q4_0"):
        result = export_llm(str(bart), tmp_path / str(compress), task=TEXT_TO_TEXT, dtype="f16", compress=compress)
        assert result.validation is not None
        assert result.validation.passed
    assert validate_folder(result.output_dir, str(bart)).passed


def test_keys_of_the_source_beyond_f16_have_caches_in_f32(bart: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(bart)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder_attn.k_proj" in name or "encoder_attn.q_proj" in name:
                parameter.mul_(2.0 ** (16 if "k_proj" in name else -16))
    model.save_pretrained(tmp_path / "model")
    result = export_llm(
        str(tmp_path / "model"), tmp_path / "out", task=TEXT_TO_TEXT, dtype="f16", require_tokenizer=False
    )
    assert result.validation is not None and result.validation.passed
    assert result.validation.largest_states["cross_key"] > 65504 > result.validation.largest_states["cache_key"]
    assert {state["dtype"] for state in result.manifest["graph"]["states"]} == {"f32"}


def test_another_model_is_noticed(bart: Path, exported: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(shallow_model("bart", TEXT_TO_TEXT, seed=1), other)
    save_word_tokenizer(other, 160)
    assert not validate_folder(exported, str(other)).passed


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("switch_transformers", {"num_experts": 2}),
        ("nllb-moe", {"num_experts": 3, "encoder_sparse_step": 1, "decoder_sparse_step": 1}),
        pytest.param("t5", {"layers": 2}, marks=pytest.mark.nightly),  # test_calibration.py exports one as well
        pytest.param("marian", {}, marks=pytest.mark.nightly),  # a BART with other positions
    ],
)
def test_families_that_differ(architecture: str, changes: dict[str, int], tmp_path: Path) -> None:
    """T5's second layer takes the positions of its first; experts are the engine's operator, in both stacks."""
    result = _checked_export(architecture, changes, tmp_path)
    if "num_experts" in changes:
        for role in ("encoder", "decoder"):
            assert "= tract_moe_ffn(" in read_graph_text(result.output_dir / f"{role}.nnef.tar")


def _checked_export(architecture: str, changes: dict[str, int], folder: Path) -> ExportResult:
    save_tiny_model(shallow_model(architecture, TEXT_TO_TEXT, **changes), folder / "model")
    result = export_llm(str(folder / "model"), folder / "out", task=TEXT_TO_TEXT, dtype="f32", require_tokenizer=False)
    assert result.validation is not None
    assert all(check.max_abs_error < 1e-4 for check in result.validation.checks)
    return result


def test_a_source_beyond_the_table_of_positions_is_refused(tmp_path: Path) -> None:
    """FSMT enlarges its table there, which an archive cannot do: tract is told where the table ends."""
    with pytest.warns(UserWarning, match=r"modeling_fsmt\.py:\d+: the archive is correct where .*T <= 256"):
        result = _checked_export("fsmt", {}, tmp_path)
    parts = result.manifest["archives"]
    assert {role: part["graph"]["size_constraints"] for role, part in parts.items()} == {
        "encoder": ["T <= 256"],
        "decoder": ["P+S <= 256"],
    }
    with TractWheel(timeout_seconds=60).load(result.output_dir / "encoder.nnef.tar") as engine:
        engine.run([np.full((1, 256), 7, np.int64)])
        with pytest.raises(EngineRunError, match="No possible scenario"):
            engine.run([np.full((1, 257), 7, np.int64)])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_repeat_ngram_size": 2},
        {"forced_bos_token_id": 17, "repetition_penalty": 1.4},
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3},
        {"num_beams": 2, "early_stopping": True, "suppress_tokens": [40, 41, 42]},
    ],
    ids=str,
)
def test_text_is_what_transformers_generates(
    bart: Path, exported: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for file in exported.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((bart / "generation_config.json").read_text()) | settings
    (folder / "generation_config.json").write_text(json.dumps(config))
    model = SourceModel.open(folder)
    said = "".join(model.text_of(GenerationOptions(max_new_tokens=12, beams=None), text=TEXT))
    assert said == _own(bart, **settings)


def test_a_source_of_another_kind_is_refused(exported: Path, tmp_path: Path) -> None:
    model = SourceModel.open(exported)
    with pytest.raises(OptionError, match="exported for text2text-generation"):
        list(model.text_of(GenerationOptions(), audio=tmp_path / "speech.wav"))


def test_beams_need_a_cache_that_is_given(stateful: ExportResult) -> None:
    with pytest.raises(EngineLoadError, match="Export without --stateful"):
        list(SourceModel.open(stateful.output_dir).text_of(GenerationOptions(beams=2), text=TEXT))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window_cache": True}, "window-cache"),
        ({"adapter": "somewhere"}, "does not merge adapters"),
    ],
)
def test_what_cannot_be_combined(bart: Path, tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        export_llm(str(bart), tmp_path / "out", task=TEXT_TO_TEXT, **options)
    assert not (tmp_path / "out").exists()
