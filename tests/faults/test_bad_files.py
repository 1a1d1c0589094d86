"""Files that somebody damaged or made to harm: an error of one line with a hint, at once; no traceback, no hang."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from generic_export.errors import OptionError, T2NError
from quant.recipe import read_recipe
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.verify import verify_export
from tests.t2n_llm.command_line import Outcome, call, refused, unchanged
from tests.trained_model import REAL_MODEL

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)) + "name: *a39\n"
RECIPES = {
    "a date that is none": ("tensors: 2001-13-45", "tensors"),
    "400 digits": ("target_size: " + "9" * 400, "no size"),
    "more digits than Python reads": ("target_size: " + "9" * 5000, "recipe"),
    "brackets": ("[" * 3000, "brackets"),
    "an empty type": ("name: !!timestamp 5", "timestamp"),
    "a number that is none": ("name: !!int x", "int"),
    "code": ("name: !!python/object/apply:os.system ['true']", "python"),
    "aliases of aliases": (BOMB, "*a0"),
    "itself": ("tensors: &a {b: *a}", "*a"),
    "a long file": ("# " + "x" * (2 << 20), "longer than"),
    "a table as a key": ("? [1, {a: 2}]\n: 3", "unhashable"),
}


def told(outcome: Outcome, *words: str) -> None:
    """As `refused`, and the error is no longer than somebody reads."""
    refused(outcome, *words)
    assert len(outcome.line("error")) < 700 and len(outcome.line("hint")) < 300


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, tmp_path: Path) -> None:
    text, word = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(OptionError) as caught:
        read_recipe(tmp_path / "recipe.yaml", ("search",))
    assert time.monotonic() - started < 10
    assert word in caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 700
    assert caught.value.hint


def test_a_recipe_named_like_a_date(tmp_path: Path) -> None:
    for name in ("2001-12-14", "2001-13-45"):
        (tmp_path / "recipe.yaml").write_text(f"name: {name}\ntensors: {{'@linears': q4_0}}")
        assert read_recipe(tmp_path / "recipe.yaml", ("search",)).name == name


def test_a_recipe_on_the_command_line(tiny_llama: Path, parent: Path) -> None:
    recipe = parent / "recipe.yaml"
    recipe.write_text(BOMB)
    with unchanged(parent):
        told(call("export", tiny_llama, "-o", parent / "x", "--recipe", recipe, "--no-tokenizer"), "recipe.yaml")


@pytest.mark.parametrize("content", ["[]", "5", '"x"'])
def test_a_generation_config_of_another_form(content: str, model: Path, parent: Path) -> None:
    (model / "generation_config.json").write_text(content)
    with unchanged(parent):
        told(call("export", model, "-o", parent / "x", "--no-tokenizer"), "generation_config.json")


@pytest.mark.parametrize("arguments", [(), ("--no-check",)])
def test_a_tokenizer_of_another_model(arguments: tuple[str, ...], parent: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(REAL_MODEL, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    small = {name: each[:50].clone() if len(each) == config["vocab_size"] else each for name, each in tensors.items()}
    save_file(small, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with unchanged(parent):
        told(call("export", model, "-o", parent / "x", *arguments), "4096 tokens", "50")


@pytest.mark.parametrize("name", ["n" * 300, "n" * 240, "n" * 300 + "/x"])
def test_long_names_of_outputs(name: str, tiny_llama: Path, parent: Path) -> None:
    with unchanged(parent):
        told(call("export", tiny_llama, "-o", parent / name, "--no-tokenizer", "--no-check"), "too long")


def test_long_names_of_shards(model: Path, parent: Path) -> None:
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "s" * 5000 + ".safetensors"}}))
    with unchanged(parent):
        told(call("export", model, "-o", parent / "x", "--no-tokenizer"), index.name, "longer than")


@pytest.mark.parametrize("command", ["verify", "validate", "inspect", "export", "generate"])
def test_long_names_of_anything(command: str) -> None:
    told(call(command, "a" * 5000, *(["text"] if command == "generate" else [])), "aaa...aaa")


# --- sizes that no model has ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1001, 10**6, 2**63, 10**400])
@pytest.mark.parametrize("command", ["export", "coverage"])
def test_layers_without_end(command: str, count: int, model: Path, parent: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    arguments = ("-o", parent / "x", "--no-tokenizer") if command == "export" else ()
    started = time.monotonic()
    with unchanged(parent):
        outcome = call(command, model, *arguments)
    told(outcome, "num_hidden_layers", "1000")
    assert "--max-layers" in outcome.line("hint")
    assert time.monotonic() - started < 20


def test_a_limit_can_be_moved(tiny_llama: Path, parent: Path) -> None:
    arguments = ("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--no-check")
    told(call(*arguments, "--max-layers", 1), "num_hidden_layers is 2")
    assert call(*arguments, "--max-layers", 2).code == 0


def test_layers_inside_another_config(model: Path, parent: Path) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 10**7}}
    (model / "config.json").write_text(json.dumps(config))
    told(call("export", model, "-o", parent / "x", "--no-tokenizer"), "num_hidden_layers is 10000000")


# --- export.json ------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = ([], "x", 5, None, {"a": 1}, [1], True, 1.5, {"a": {"b": []}})


def damaged(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every section with values of other types, and names that are none."""
    made = {f"{key}={value!r}": {**manifest, key: value} for key in manifest for value in VALUES}
    for part in ("source", "graph", "model", "options"):
        for key in manifest[part]:
            made |= {f"{part}.{key}={v!r}": {**manifest, part: {**manifest[part], key: v}} for v in ([], 5, {"a": 1})}
    for name in ("a" * 5000, "a\0b", "../../x", "/etc/passwd", ""):
        made[f"archive={name[:20]!r}"] = {**manifest, "archive": name}
        made[f"files={name[:20]!r}"] = {**manifest, "files": {name: {"bytes": 1, "sha256": "x"}}}
        made[f"archives={name[:20]!r}"] = {**manifest, "archives": {"model": {"archive": name}}}
    return made | {"archives": {**manifest, "archives": {"model": 5}}, "nesting": {**manifest, "notes": [[[]]] * 50}}


def test_an_edited_manifest(tiny_export: Path, tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_export, tmp_path / "x"))
    manifest = json.loads((folder / "export.json").read_text())
    cases = list(damaged(manifest).items())
    for what, content in random.Random(0).sample(cases, 20) + cases[-5:]:
        (folder / "export.json").write_text(json.dumps(content))
        for command in (("verify", folder), ("validate", folder, "--reference", tiny_llama / "nowhere")):
            outcome = call(*command)
            assert outcome.code in (0, 1, 2), f"{command[0]}: {what}: {outcome.err}"
            assert "Traceback" not in outcome.err
            if outcome.code == 2:
                told(outcome)


def test_a_manifest_of_brackets(tiny_export: Path, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text("[" * 100_000)
    with pytest.raises(T2NError, match=r"export\.json"):
        read_manifest(tmp_path)
    assert verify_export(tiny_export).passed
