"""Export folders of format 1, as release 0.1 wrote them, are read by every command; `format_1` holds two of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from t2n_llm.export.card_page import note
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT, upgrade_manifest
from t2n_llm.graph.interface import recorded_states
from t2n_llm.tasks.media.encoder_input import EncoderInput
from tests.t2n_llm.command_line import call, strict_json

STORED = Path(__file__).parent / "format_1"
LANGUAGE_MODEL, SPEECH = STORED / "language-model", STORED / "speech"


def _stored(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "export.json").read_text())
    assert manifest["format"] == 1
    return manifest


@pytest.mark.parametrize("folder", [LANGUAGE_MODEL, SPEECH], ids=lambda folder: folder.name)
def test_it_is_verified_inspected_and_described(folder: Path) -> None:
    _stored(folder)
    assert call("verify", folder).code == 0
    assert strict_json(call("inspect", folder, "--json").out)
    card = call("card", folder, "--print")
    assert card.code == 0 and "agrees" in card.out


def test_fields_of_a_language_model_have_their_present_names() -> None:
    earlier, manifest = _stored(LANGUAGE_MODEL), read_manifest(LANGUAGE_MODEL)
    assert manifest["format"] == MANIFEST_FORMAT
    assert manifest["copied_files"] == earlier["companions"]
    assert manifest["graph"]["size_constraints"] == earlier["graph"]["sizes"]
    original = earlier["validation"]["original"]
    assert manifest["validation"]["compressed_vs_original"] == {
        **{key: value for key, value in original.items() if key != "same_top1"},
        "same_top1_count": original["same_top1"],
    }
    assert [check["same_top1_count"] for check in manifest["validation"]["checks"]] == [
        check["same_top1"] for check in earlier["validation"]["checks"]
    ]
    assert manifest["quality"]["max_kl_divergence"] == earlier["quality"]["max_kl"]
    assert [tensor["kept_reason"] for tensor in manifest["compression"]["tensors"]] == [
        tensor["kept"] for tensor in earlier["compression"]["tensors"]
    ]


def test_fields_of_a_speech_model_have_their_present_names() -> None:
    earlier, manifest = _stored(SPEECH), read_manifest(SPEECH)
    assert list(manifest["archives"]) == list(earlier["parts"]) == ["frontend", "encoder", "decoder"]
    assert manifest["encoder_decoder"]["encoder_inputs"] == earlier["encoder_decoder"]["source"]
    sensed = EncoderInput.of(SPEECH, manifest, "input_features")
    assert sensed is not None and sensed.samples == earlier["frontend"]["samples"]
    assert [state.kind for state in recorded_states(manifest)] == ["cache_key", "cache_value"]


def test_it_generates() -> None:
    outcome = call("generate", LANGUAGE_MODEL, "w5 w6", "--max-new-tokens", 3)
    assert outcome.code == 0 and outcome.out, outcome


def test_a_record_that_is_added_writes_the_present_format(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LANGUAGE_MODEL, tmp_path / "export"))
    note(folder, quality=None)
    written = json.loads((folder / "export.json").read_text())
    assert written["format"] == MANIFEST_FORMAT and "companions" not in written
    assert call("verify", folder).code == 0


def test_sections_of_another_type_are_left_to_the_parser() -> None:
    manifest = {"format": 1, "graph": [], "validation": {"checks": 3}, "quality": None, "parts": {"a": {"graph": 1}}}
    assert upgrade_manifest(dict(manifest)) == {
        "format": MANIFEST_FORMAT,
        "graph": [],
        "validation": {"checks": 3},
        "quality": None,
        "archives": {"a": {"graph": 1}},
    }


def test_early_releases_called_the_states_caches() -> None:
    assert upgrade_manifest({"format": 1, "graph": {"caches": [1]}})["graph"] == {"states": [1]}
