# ruff: noqa: E402 - an older transformers has none of what these import
"""One folder for both: exports of `t2n-llm export` in `ExportedModel`, those of `save_pretrained` in `verify` and `generate`."""

from tests.exporter_backends import skip_without_backends

skip_without_backends()

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.exporters import ExportedModel

import t2n_llm.exporters  # noqa: F401 - registers the backend
from generic_export.errors import ArchiveError, OptionError
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.verify import verify_export
from t2n_llm.exporters import TractConfig, TractExporter
from t2n_llm.runtime.generate import ExportedModel as GeneratingModel
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model
from tests.shared_folders import SharedExport

PROMPT = "Once upon a time"
STEPS = 6


@pytest.fixture(scope="module")
def saved(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's first layers, exported for generation by transformers' interface, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(short_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(short_model)
    inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    folder = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # axes that are static
        exported = TractExporter().export_for_generation(
            model, copy.deepcopy(inputs), TractConfig(dynamic=True), multi_token_decode=True
        )
    exported.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_generate_reads_what_transformers_saved(saved: Path, short_model: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(short_model, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(short_model),
    )
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    wanted = model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, ids.shape[1] :]
    found = GeneratingModel.open(saved).generate(PROMPT, max_new_tokens=STEPS, chat=False)
    assert "".join(found) == tokenizer.decode(wanted, skip_special_tokens=True)


def test_verify_reads_what_transformers_saved(saved: Path, tmp_path: Path) -> None:
    report = verify_export(saved)
    assert report.passed
    assert report.tensors > 20
    copied = Path(shutil.copytree(saved, tmp_path / "copy"))
    archive = copied / "decode.nnef.tar"
    damaged = bytearray(archive.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    archive.write_bytes(damaged)
    assert [finding.problem for finding in verify_export(copied).findings] == ["damaged"]


def test_other_commands_name_it(saved: Path) -> None:
    with pytest.raises(ArchiveError, match=r"an export of transformers .* verify. and .generate. can"):
        read_manifest(saved)


def test_an_export_for_another_engine_is_named(tmp_path: Path) -> None:
    record = {"schema_version": 1, "export_format": "onnx", "components": {}}
    (tmp_path / "export.json").write_text(json.dumps(record))
    with pytest.raises(ArchiveError, match="for 'onnx', not for tract"):
        verify_export(tmp_path)


def test_a_cache_that_the_engine_holds(saved: Path, short_model: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(short_model, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(short_model),
    )
    loaded = ExportedModel.from_pretrained(saved, engine_cache=True)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        start = model(ids)
        cache = start.past_key_values
        decode, token = loaded.runners["decode"], start.logits[:, -1:].argmax(-1)
        with pytest.raises(OptionError, match="no cache, which the engine is to keep"):
            decode(input_ids=token, position_ids=torch.tensor([[ids.shape[1]]]))
        given: dict[str, Any] = {"cache": copy.deepcopy(cache)}
        for step in range(3):
            answer = decode(input_ids=token, position_ids=torch.tensor([[ids.shape[1] + step]]), **given)
            wanted = model(token, past_key_values=cache)
            assert torch.allclose(answer.logits, wanted.logits, rtol=1e-3, atol=1e-3)
            assert answer.past_key_values is None
            given, token = {}, wanted.logits[:, -1:].argmax(-1)


def test_a_language_model_of_ours(tiny_export: Path, tiny_llama: Path) -> None:
    model, loaded = AutoModelForCausalLM.from_pretrained(tiny_llama).eval(), ExportedModel.from_pretrained(tiny_export)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        wanted, found = model(ids), loaded(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert torch.allclose(found.logits[:, -1], wanted.logits[:, -1], atol=1e-4)
        token = wanted.logits[:, -1:].argmax(-1)
        found = loaded(input_ids=token, past_key_values=found.past_key_values)
        wanted = model(token, past_key_values=wanted.past_key_values)
    assert torch.allclose(found.logits[:, -1], wanted.logits[:, -1], atol=1e-4)
    with pytest.raises(OptionError, match="attention_mask hides tokens"):
        loaded(input_ids=ids, attention_mask=torch.zeros_like(ids))
    assert verify_export(tiny_export).passed


def test_single_passes_of_ours(shared_export: SharedExport, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    source, task = tmp_path / "bert", "text-classification"
    save_tiny_model(shallow_model("bert", task), source, task)
    export = shared_export(source, task=task, dtype="f32", require_tokenizer=False)
    ids = torch.arange(9, 23).reshape(2, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    model = AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.no_grad():
        wanted = model(**inputs)
    found = ExportedModel.from_pretrained(export)(**inputs)
    assert type(found) is type(wanted)
    assert torch.allclose(found.logits, wanted.logits, atol=1e-4)
