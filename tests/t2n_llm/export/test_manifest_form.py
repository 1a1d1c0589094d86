"""Whatever an `export.json` says, a command that reads it works or says what is wrong in one line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t2n_llm.export.card_page import note
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT
from tests.shared_folders import SharedExport
from tests.t2n_llm.command_line import call, refused

_DELETED = object()
_VALUES = [
    None,
    True,
    1.5,
    -1,
    0,
    10**400,
    "",
    "x",
    "\ud800",
    "../x",
    [],
    [0],
    [None],
    {},
    {"x": 1},
    {"name": []},
    _DELETED,
]


@pytest.fixture(scope="module")
def folder(short_model: Path, shared_export: SharedExport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed export with a check, and a measured quality."""
    made = shared_export(short_model, compress="q4_0", decode_steps=2)
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("manifests") / "export"))
    quality = {
        "positions": 5,
        "mean_kl_divergence": 0.1,
        "max_kl_divergence": None,
        "same_top1_share": 0.5,
        "text": "prose",
    }
    note(folder, quality={**quality, "perplexity": 3.0, "reference_perplexity": 2.0})
    return folder


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to everything in a JSON value; of long lists and tables the first items."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    long = len(place) > 1
    for number, (key, item) in enumerate(items):
        if number < 9 or not long:
            yield (*place, key)
            yield from _places(item, (*place, key))


def _changed(manifest: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(manifest)
    inner: Any = made
    for key in place[:-1]:
        inner = inner[key]
    if value is _DELETED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return made


# Arguments after the folder, with which a command ends before it starts an engine.
_COMMANDS: dict[str, tuple[object, ...]] = {
    "verify": (),
    "card": ("--print",),
    "inspect": (),
    "generate": ("--image", "none.png"),
    "chat": ("--template-kwargs", '{"messages": 1}'),
    "validate": ("--reference", "no/such/folder"),
    "quantize-report": ("--reference", "no/such/folder"),
}


def test_no_change_of_an_export_json_is_a_bug(folder: Path) -> None:
    text = (folder / "export.json").read_text()
    manifest = json.loads(text)
    places = list(_places(manifest))

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(place=st.sampled_from(places), value=st.sampled_from(_VALUES), command=st.sampled_from(sorted(_COMMANDS)))
    def check(place: tuple[Any, ...], value: Any, command: str) -> None:
        (folder / "export.json").write_text(json.dumps(_changed(manifest, place, value)))
        outcome = call(command, folder, *_COMMANDS[command])
        assert outcome.code in (0, 1, 2), outcome
        assert outcome.code != 2 or (outcome.line("error") and outcome.line("hint"))

    try:
        check()
    finally:
        (folder / "export.json").write_text(text)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            ("validation", "compressed_vs_original"),
            1.5,
            "validation.compressed_vs_original is a number, not a table or null",
        ),
        (("validation", "checks", 0, "steps"), 3, "validation.checks[0].steps is a whole number, not a list"),
        (("graph", "states", 0, "axis"), "x", "graph.states[0].axis is text, not a whole number or null"),
        (("compression", "tensors", 0, "label"), _DELETED, "compression.tensors[0] says nothing about label"),
        (("files", "config.json", "bytes"), 10**400, "files.config.json.bytes is too large a number"),
        (("model", "vocab_size"), True, "model.vocab_size is true or false, not a whole number or null"),
        (("source",), _DELETED, "it says nothing about source"),
        (("archive",), "../x", "archive is '../x', not the name of a file in the folder"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_is_named(folder: Path, tmp_path: Path, place: tuple[Any, ...], value: Any, words: str) -> None:
    manifest = json.loads((folder / "export.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps(_changed(manifest, place, value)))
    refused(call("card", tmp_path, "--print"), words)


def test_an_export_of_an_early_release_is_read(folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / "export.json").read_text())
    sections = ("format", "source", "graph", "model", "archive", "tensors")
    early = {name: manifest[name] for name in sections} | {"unknown": [1]}
    (tmp_path / "export.json").write_text(json.dumps(early))
    assert read_manifest(tmp_path) == early


def test_a_newer_format_asks_for_an_update(folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / "export.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps(manifest | {"format": MANIFEST_FORMAT + 1}))
    refused(call("card", tmp_path, "--print"), f"reads formats up to {MANIFEST_FORMAT}")
