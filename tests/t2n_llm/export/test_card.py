"""The card of an export: true, safe to share, executed as it stands, and nobody's edits are lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from generic_export.weights.pinned_file import PinnedFile
from t2n_llm import export_llm
from t2n_llm.export.card import ModelCard, read_card
from t2n_llm.export.card_page import card_text, render_card
from t2n_llm.export.folder import read_manifest
from t2n_llm.source.source_card import SourceCard, front_matter, source_card
from t2n_llm.tasks.names import TEXT_CLASSIFICATION, TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import save_tiny_model as save_model
from tests.recurrent_families import RECURRENT_FAMILIES
from tests.shallow_models import shallow_model
from tests.shared_folders import content
from tests.t2n_llm.command_line import call, refused, strict_json, unchanged
from tests.trained_model import REAL_MODEL
from tests.word_tokenizers import save_word_tokenizer

README = """---
license: other
license_name: a-licence
license_link: LICENSE
language: [en, "no"]
base_model: owner/base
---
# Somebody's model
"""


def executed(folder: Path) -> str:
    """Run the Python snippet of a card in its folder, and return what it printed."""
    (code,) = re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def greedy(source: Path, ids: list[int], count: int) -> list[int]:
    """Return what PyTorch says after some tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for _ in range(count):
            ids = [*ids, int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[-count:]


# --- what it shows runs ---------------------------------------------------------------------------


def test_the_snippet_of_a_language_model_says_what_pytorch_says(tiny_llama: Path, tiny_export: Path) -> None:
    assert json.loads(executed(tiny_export)) == greedy(tiny_llama, [1, 2, 3], 20)


def test_the_snippet_with_a_tokenizer_says_what_pytorch_says(real_export: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL)
    ids = tokenizer("Once upon a time")["input_ids"]
    assert executed(real_export) == tokenizer.decode(greedy(REAL_MODEL, ids, 20), skip_special_tokens=True).strip()


@pytest.mark.parametrize("batch", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_snippet_feeds_states_of_fixed_size_back(batch: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(RECURRENT_FAMILIES["mamba"]()).save_pretrained(tmp_path / "mamba")
    options: dict[str, Any] = {"dtype": "f32", "require_tokenizer": False, "check": False, "batch": batch}
    folder = export_llm(str(tmp_path / "mamba"), tmp_path / "out", **options).output_dir
    assert json.loads(executed(folder)) == greedy(tmp_path / "mamba", [1, 2, 3], 20)


def test_the_snippet_of_an_encoder_decoder_says_what_pytorch_says(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = shallow_model("bart", TEXT_TO_TEXT)
    save_model(model, tmp_path / "bart")
    save_word_tokenizer(tmp_path / "bart", model.config.vocab_size)
    options: dict[str, Any] = {"task": TEXT_TO_TEXT, "dtype": "f32", "check": False}
    folder = export_llm(str(tmp_path / "bart"), tmp_path / "out", **options).output_dir
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("A text.")
    ids = [model.config.decoder_start_token_id]
    with torch.no_grad():
        for _ in range(20):
            told = {"input_ids": torch.tensor([encoded.ids]), "attention_mask": torch.tensor([encoded.attention_mask])}
            logits = model.eval()(**told, decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
    assert executed(folder) == Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids[1:]).strip()


def test_the_snippet_of_a_classifier_says_what_pytorch_says(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = shallow_model("bert", TEXT_CLASSIFICATION)
    save_model(model, tmp_path / "bert")
    save_word_tokenizer(tmp_path / "bert", model.config.vocab_size)
    options: dict[str, Any] = {"task": TEXT_CLASSIFICATION, "dtype": "f32", "check": False}
    folder = export_llm(str(tmp_path / "bert"), tmp_path / "out", **options).output_dir
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("A text.")
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([encoded.ids])).logits[0].numpy()
    printed = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", executed(folder).partition(" ")[2])]
    np.testing.assert_allclose(printed, logits, atol=1e-4)


# --- what it says ---------------------------------------------------------------------------------


def test_front_matter_and_tables(tiny_export: Path) -> None:
    text = (tiny_export / "README.md").read_text()
    assert front_matter(text) == {
        "library_name": "tract",
        "pipeline_tag": "text-generation",
        "tags": ["tract", "nnef", "t2n-llm", "llama"],
    }
    for row in (
        r"^\| greedy \| 64 \| .* \| 64/64 \| agrees \|$",
        r"^\| `model\.nnef\.tar` \| .* [kM]B \| archive for tract \|$",
        r"^\| input \| `input_ids` \| i64 \| `\[1, S\]` \| \|$",
        r"^\| output \| `outputs` \| f32 \| `\[1, 1, 160\]` \|",
        r"^\| output \| `out_cache_key_0` \| f32 \| `\[1, 2, S\+P, 16\]` \| next call: `in_cache_key_0` \|$",
        r"^\| license of the source \| not stated; check it before you share this \|$",
    ):
        assert re.search(row, text, re.MULTILINE), row
    assert "**" not in text.partition("## Files")[0]


def test_two_exports_have_the_same_card_and_no_path_of_this_machine(tiny_llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"check": False, "require_tokenizer": False}
    one = export_llm(str(tiny_llama), tmp_path / "one", **options).output_dir
    (tmp_path / "below").mkdir()
    other = export_llm(str(tiny_llama), tmp_path / "below" / "other", **options).output_dir
    text = (one / "README.md").read_text()
    assert text == (other / "README.md").read_text() == card_text(one)
    for path in (tiny_llama.parent, tmp_path):
        assert str(path) not in text
    assert "**Not validated against PyTorch.**" in text


def test_the_source_s_licence_and_card_come_along(model: Path, tmp_path: Path) -> None:
    (model / "README.md").write_text(README)
    folder = export_llm(str(model), tmp_path / "out", check=False, require_tokenizer=False).output_dir
    assert (folder / "README.source.md").read_text() == README
    front = front_matter((folder / "README.md").read_text())
    assert (front["license"], front["license_name"]) == ("other", "a-licence")
    assert front["language"] == ["en", "no"]
    assert front["base_model"] == "owner/base"
    assert "license_link" not in front, "the file that it names is not here"
    assert call("verify", folder).code == 0
    (folder / "README.source.md").write_text("another")
    assert "README.source.md" in call("verify", folder).err


def test_a_model_of_the_hub_is_the_base(tiny_export: Path) -> None:
    card = read_card(tiny_export, read_manifest(tiny_export))
    said = SourceCard(license=("other",), license_link="LICENSE.md", base_model=("owner/before",))
    source = replace(card.source, name="owner/name", revision="abc", said=said)
    text = render_card(replace(card, source=source))
    front = front_matter(text)
    assert front["base_model"] == "owner/name" and front["base_model_relation"] == "quantized"
    assert front["license_link"] == "https://huggingface.co/owner/name/blob/abc/LICENSE.md"
    assert "(https://huggingface.co/owner/name/tree/abc)" in text
    adapted = front_matter(render_card(replace(card, source=replace(source, adapter="owner/adapter"))))
    assert adapted["base_model"] == ["owner/name", "owner/adapter"] and "base_model_relation" not in adapted


def test_a_failed_check_is_said_aloud(tiny_export: Path) -> None:
    card = read_card(tiny_export, read_manifest(tiny_export))
    checks = (replace(card.checks[0], passed=False), *card.checks[1:])
    text = render_card(replace(card, checks=checks))
    assert "do not use these archives" in text and "**DIFFERS**" in text


@pytest.mark.parametrize(
    "text", ["", "---\n", "---\n[\n---\n", "---\n- a\n---\n", "---\nlicense: [1, {}]\nbase_model: /home/me/x\n---\n"]
)
def test_a_card_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert source_card([PinnedFile(tmp_path / "README.md")]) == SourceCard()


def test_a_licence_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    assert source_card([PinnedFile(tmp_path / "config.json")]).license == ("mit",)


_WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def card(tiny_export: Path) -> ModelCard:
    return read_card(tiny_export, read_manifest(tiny_export))


@settings(max_examples=50, deadline=None)
@given(name=_WORDS, licence=_WORDS)
@example(name="a", licence="\x85")
def test_names_cannot_break_out(card: ModelCard, name: str, licence: str) -> None:
    said = SourceCard(license=(licence,))
    text = render_card(replace(card, source=replace(card.source, name=name, said=said)))
    assert front_matter(text)["license"] == licence
    title = " ".join(name.split())
    (row,) = [line for line in text.split("\n") if line.startswith("| source | ")]
    assert row.endswith(", a local folder or file |")
    assert len(re.findall(r"(?<!\\)\|", row)) == 3, (title, row)


# --- whose it is ----------------------------------------------------------------------------------


@pytest.fixture
def export(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "x"))


def test_a_card_is_written_for_an_older_export(export: Path) -> None:
    whole = (export / "README.md").read_bytes()
    (export / "README.md").unlink()
    manifest = read_manifest(export)
    for section in ("card", "source_card"):
        del manifest[section]
    (export / "export.json").write_text(json.dumps(manifest))
    assert call("verify", export).code == 0
    printed = call("card", export, "--print")
    assert printed.out.encode() == whole and not (export / "README.md").exists()
    outcome = call("card", export)
    assert (outcome.code, outcome.out) == (0, f"written   {export / 'README.md'}\n")
    assert (export / "README.md").read_bytes() == whole
    assert call("verify", export).code == 0
    assert call("card", export, "--quiet").out == ""
    assert strict_json(call("card", export, "--json").out)["card"].encode() == whole


def test_an_edited_card_stays(export: Path) -> None:
    ours = (export / "README.md").read_bytes()
    with (export / "README.md").open("a") as file:
        file.write("What I use it for.\n")
    with unchanged(export):
        refused(call("card", export), "README.md", "edited")
        assert call("verify", export).code == 0
    refused(call("card", export, "--print", "--force"), "--force")
    assert call("card", export, "--force").code == 0
    assert (export / "README.md").read_bytes() == ours
    refused(call("card", export.parent), "export.json")


def test_an_edited_card_outlives_the_export_under_it(tiny_llama: Path, export: Path) -> None:
    (export / "README.md").write_text("mine")
    words = ("export", tiny_llama, "-o", export, "--no-tokenizer", "--no-check", "--force", "--quiet")
    assert "README.edited.md" in call(*words).err
    assert (export / "README.edited.md").read_text() == "mine"
    assert "for tract" in (export / "README.md").read_text()
    assert call(*words).err == "", "it is kept without a word"
    assert (export / "README.edited.md").read_text() == "mine"
    assert call("verify", export).code == 0


def test_validate_notes_what_it_finds(tiny_llama: Path, tmp_path: Path) -> None:
    folder = export_llm(str(tiny_llama), tmp_path / "x", dtype="f32", check=False, require_tokenizer=False).output_dir
    words = ("validate", folder, "--reference", tiny_llama, "--decode-steps", "4")
    before = content(folder)
    assert call(*words).code == 0 and content(folder) == before
    refused(call(*words, "--record", "--atol", "1"), "--record")
    assert call(*words, "--record").code == 0
    assert "| greedy | 4 |" in (folder / "README.md").read_text()
    assert read_manifest(folder)["validation"]["passed"] is True
    assert call("verify", folder).code == 0


def test_quality_is_noted(export: Path) -> None:
    from t2n_llm.export.card_page import note

    measured: Mapping[str, Any] = {
        "positions": 200,
        "mean_kl_divergence": 0.01,
        "p99_kl_divergence": 0.1,
        "max_kl_divergence": 0.2,
        "same_top1_share": 0.975,
        "perplexity": 12.5,
        "reference_perplexity": 12.0,
        "text": "prose.txt",
        "engine": "tract",
    }
    assert note(export, quality=measured)
    assert (
        "| `quantize-report` on prose.txt | 200 | 1.00e-02 | 2.00e-01 | 97.5 % | 12.50 (was 12.00) |"
        in (export / "README.md").read_text()
    )
