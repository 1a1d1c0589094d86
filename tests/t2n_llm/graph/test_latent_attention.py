"""Exports of a model with latent attention, through all four checks: what is cached, what is stored, and every form of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from kvcache.states.tensors import StateTensor
from t2n_llm import export_llm
from t2n_llm.graph.options import GraphOptions
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.t2n_llm.zoo.attention_families import family_model

FAMILY = "minicpm3"
SIZES = {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "head_dim": 8, "num_hidden_layers": 1}
RANK, ROPE = 64, 8


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    save_tiny_model(family_model(FAMILY, SIZES), folder)
    return folder


def exported(model: Path, folder: Path, **options: Any) -> Any:
    settings = {"dtype": "f32", "archive": "dir", "decode_steps": 4, "require_tokenizer": False} | options
    result = export_llm(str(model), folder, **settings)
    assert result.validation is not None and result.validation.passed
    return result


def graph_of(result: Any) -> str:
    return (Path(result.archive) / "graph.nnef").read_text(encoding="utf-8")


@pytest.mark.parametrize("mla", ["auto", "expanded"])
def test_the_cache_holds_latents(mla: str, latent_model: Path, tmp_path: Path) -> None:
    result = exported(latent_model, tmp_path / "export", mla=mla)
    assert all(check.max_abs_error < 1e-4 for check in result.validation.checks)
    first = result.manifest["graph"]["states"][:2]
    assert [list(state["shape"]) for state in first] == [["B", 1, "P", RANK], ["B", 1, "P", ROPE]]
    absorbed = mla == "auto"
    assert ("kv_b_proj.absorbed_keys" in graph_of(result)) == absorbed
    assert ("kv_b_proj.weight" in graph_of(result)) != absorbed
    assert result.manifest["graph"]["prefill"][0] == {"past": 0, "chunk": 64 if absorbed else 128}


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "sdpa", "batch": True},
        {"stateful": True},
        {"kv_cache": "int8"},
        {"dtype": "f16", "activations": "f16"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_absorbed_in_every_form(options: dict[str, Any], latent_model: Path, tmp_path: Path) -> None:
    exported(latent_model, tmp_path / "export", **options)


def test_a_prompt_read_by_one_form_is_continued_by_the_other(latent_model: Path, tmp_path: Path) -> None:
    forms = {
        mla: export_llm(
            str(latent_model), tmp_path / mla, mla=mla, dtype="f32", check=False, archive="dir", require_tokenizer=False
        )
        for mla in ("auto", "expanded")
    }
    prompt, further = np.arange(3, 12)[None], np.array([[20]])
    states = [StateTensor.from_record(record).at_start(1) for record in forms["auto"].manifest["graph"]["states"]]
    logits = {}
    for reader, other in (("auto", "expanded"), ("expanded", "auto")):
        with TractWheel(timeout_seconds=60).load(forms[reader].archive) as engine:
            _, *after = engine.run([prompt, *states])
        with TractWheel(timeout_seconds=60).load(forms[other].archive) as engine:
            logits[other] = engine.run([further, *after])[0]
    np.testing.assert_allclose(logits["auto"], logits["expanded"], atol=1e-4)
    assert np.abs(logits["auto"]).max() > 0.1


def test_both_parts_of_the_projection_are_blocks(latent_model: Path, tmp_path: Path) -> None:
    """Weights and caches in f16, beside blocks."""
    result = exported(latent_model, tmp_path / "export", dtype="f16", compress="q4_0")
    records = {record["label"]: record for record in result.manifest["compression"]["tensors"]}
    projection = "model.layers.0.self_attn.kv_b_proj"
    for part, shape in (("keys", [4, RANK, 32]), ("values", [4, 32, RANK])):
        record = records[f"{projection}.absorbed_{part}"]
        assert (record["scheme"], list(record["shape"])) == ("q4_0", shape)
        assert list(record["parameters"]) == [f"{projection}.weight"]
    assert f"{projection}.weight" not in records


def test_names_of_forms() -> None:
    forms = {mla: GraphOptions(mla=mla).absorbs_latents for mla in ("auto", "absorbed", "expanded")}
    assert forms == {"auto": True, "absorbed": True, "expanded": False}
    with pytest.raises(OptionError, match="latent attention 'folded' is unknown"):
        GraphOptions(mla="folded")
