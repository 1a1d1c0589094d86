"""`verify --deep`: what an export recorded is what its source gives, and a source with one other value is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from t2n_llm import export_llm
from t2n_llm.export.against_source import compare_with_source
from tests.t2n_llm.command_line import call, refused, strict_json
from tests.trained_model import REAL_MODEL

CHANGED = "model.layers.1.mlp.down_proj.weight"


def exported(source: Path, folder: Path, **options: Any) -> Path:
    export_llm(str(source), folder, check=False, require_tokenizer=False, **options)
    return folder


def changed_copy(source: Path, folder: Path, name: str) -> Path:
    """Return a copy of a checkpoint with one other value."""
    copy = Path(shutil.copytree(source, folder))
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[7] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f32"},
        {"dtype": "f16", "archive": "dir"},
        {"compress": "q4_0+embeddings"},
        {"compress": "q4_0", "weights_in_memory": "f16"},
        {"weights_in_memory": "f32"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_export_is_what_its_source_gives(tiny_llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = exported(tiny_llama, tmp_path / "export", **options)
    found = compare_with_source(folder, str(tiny_llama))
    recorded = json.loads((folder / "export.json").read_text())["tensors"]
    assert (found.tensors, found.findings, found.left, found.same_graph) == (len(recorded) - 1, (), {}, True)
    other = compare_with_source(folder, str(changed_copy(tiny_llama, tmp_path / "changed", CHANGED)))
    assert [finding.name for finding in other.findings] == [CHANGED]
    assert other.tensors == found.tensors - 1


def test_what_a_calibration_chose_is_left_out(short_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:6000])
    folder = exported(short_model, tmp_path / "export", compress="q4_0:imatrix", calibration=str(text))
    found = compare_with_source(folder, str(short_model))
    assert not found.findings
    assert found.left[CHANGED] == "imatrix chose its values"
    assert found.tensors > 5


def test_hidden_states_are_compared_too(tiny_llama: Path, tmp_path: Path) -> None:
    folder = exported(tiny_llama, tmp_path / "export", task="feature-extraction")
    found = compare_with_source(folder, str(tiny_llama))
    assert found.tensors > 5 and not found.findings


def test_the_command(tiny_llama: Path, tmp_path: Path) -> None:
    folder = exported(tiny_llama, tmp_path / "export")
    outcome = call("verify", folder, "--deep", "--reference", tiny_llama)
    assert outcome.code == 0, outcome.err
    assert "as the source" in outcome.out and "SHA-256" in outcome.out
    changed = changed_copy(tiny_llama, tmp_path / "changed", CHANGED)
    outcome = call("verify", folder / "model.nnef.tar", "--deep", "--reference", changed, "--json")
    assert outcome.code == 1
    report = strict_json(outcome.out)
    assert not report["passed"]
    assert [finding["name"] for finding in report["source"]["findings"]] == [CHANGED]
    refused(call("verify", folder, "--reference", tiny_llama), "require --deep")
    refused(call("verify", folder, "--deep"), "whose path is not recorded")
