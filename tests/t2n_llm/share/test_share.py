"""Exports on the hub, by the real client over real HTTP: sent once, fetched whole, refused where nobody should get them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from t2n_llm.export.folder import read_manifest, write_manifest
from tests.t2n_llm.command_line import Outcome, call, refused, strict_json, unchanged
from tests.t2n_llm.share.hub_server import READER, WRITER, HubServer, Repository, running_hub

NAME = "owner/model"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server


@pytest.fixture
def export(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "x"))


def said(hub: HubServer, commands: Sequence[Sequence[object]], home: Path, token: str = WRITER) -> list[Outcome]:
    """Run commands with this hub, in the plain protocol, with nothing cached."""
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "HF_TOKEN": token}
    return [call(*command, variables=variables) for command in commands]


def test_an_export_travels_to_the_hub_and_back(hub: HubServer, export: Path, tmp_path: Path) -> None:
    (export / "notes.txt").write_text("mine")
    (export / ".env").write_text("secret")
    commands: list[list[object]] = [
        ["push", export, NAME],
        ["push", export, NAME, "--json"],
        ["pull", NAME, tmp_path / "back"],
        ["pull", NAME, tmp_path / "back"],
        ["pull", NAME, tmp_path / "back", "--force", "--json"],
        ["push", export, NAME, "--public", "--quiet"],
    ]
    with unchanged(export):
        first, second, pulled, taken, again, public = said(hub, commands, tmp_path / "home")
    assert first.code == 0, first
    assert f"pushed    {hub.endpoint}/{NAME} (private), commit " in first.out
    assert "not uploaded, because they are not part of the export: notes.txt." in first.err
    repository = hub.repositories[NAME]
    assert repository.private
    ours = {path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()}
    assert set(repository.files) == ours - {"notes.txt", ".env"}
    assert len(hub.uploaded) == len(set(hub.uploaded)) > 1, "nothing large is sent twice"
    assert strict_json(second.out)["private"] is True
    assert pulled.code == 0 and "verified" in pulled.out, pulled
    assert {
        path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*") if path.is_file()
    } == (set(repository.files))
    for name, data in repository.files.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    refused(taken, "back", "exists")
    assert again.code == 0 and strict_json(again.out)["checked"] is True, again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "home", "x"]
    assert (public.code, public.out) == (0, "") and "stays private" in public.err


def test_what_nobody_should_get_is_refused(hub: HubServer, export: Path, tmp_path: Path) -> None:
    unchecked, wrong, damaged = (Path(shutil.copytree(export, tmp_path / name)) for name in ("u", "w", "d"))
    failed = Path(shutil.copytree(export, tmp_path / "x.failed-2"))
    write_manifest(unchecked, read_manifest(unchecked) | {"validation": None})
    manifest = read_manifest(wrong)
    write_manifest(wrong, manifest | {"validation": manifest["validation"] | {"passed": False}})
    archive = damaged / "model.nnef.tar"
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    hub.repositories["owner/public"] = Repository(private=False)
    commands: list[list[object]] = [
        ["push", failed, NAME, "--unchecked"],
        ["push", wrong, NAME, "--unchecked"],
        ["push", unchecked, NAME],
        ["push", damaged, NAME],
        ["push", tmp_path, NAME],
        ["push", export, "model"],
        ["push", export, "owner/public"],
        ["push", export, "somebody/model"],
        ["push", export, NAME, "--token", READER],
        ["push", export, NAME, "--token", "hf_wrong"],
        ["push", unchecked, NAME, "--unchecked", "--public"],
    ]
    *no, yes = said(hub, commands, tmp_path / "home")
    words = [
        ("validation failed",),
        ("validation failed",),
        ("not validated",),
        ("changed since the export",),
        ("export.json",),
        ("'model'", "name"),
        ("owner/public", "is public"),
        ("somebody/model", "no write access"),
        (NAME, "no write access"),
        (NAME, "rejected the token"),
    ]
    for outcome, expected in zip(no, words, strict=True):
        assert outcome.code == 2, (expected, outcome)
        refused(Outcome(outcome.code, outcome.out, _without_stages(outcome.err)), *expected)
    assert yes.code == 0 and not hub.repositories[NAME].private, yes
    assert hub.repositories["owner/public"].files == {}


def test_a_line_that_goes_dead_is_taken_up_again(hub: HubServer, export: Path, tmp_path: Path) -> None:
    hub.uploads_left = 1
    (cut,) = said(hub, [["push", export, NAME]], tmp_path / "home")
    refused(Outcome(cut.code, cut.out, _without_stages(cut.err)), NAME, "connection", hub.endpoint)
    assert "not sent again" in cut.line("hint")
    (before,) = hub.uploaded
    hub.uploads_left = None
    (whole,) = said(hub, [["push", export, NAME]], tmp_path / "home")
    assert whole.code == 0, whole
    assert hub.uploaded.count(before) == 1

    hub.bytes_left = 50_000
    (cut,) = said(hub, [["pull", NAME, tmp_path / "back"]], tmp_path / "home")
    refused(Outcome(cut.code, cut.out, _without_stages(cut.err)), NAME, hub.endpoint)
    assert not (tmp_path / "back").exists()
    hub.bytes_left, first = None, set(hub.asked)
    hub.asked.clear()
    (whole,) = said(hub, [["pull", NAME, tmp_path / "back"]], tmp_path / "home")
    assert whole.code == 0, whole
    assert {"model.nnef.tar", "config.json"} <= first and "model.nnef.tar" in hub.asked
    assert "config.json" not in hub.asked, "what came whole is not fetched again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "home", "x"]


def test_what_cannot_be_fetched(hub: HubServer, export: Path, tmp_path: Path) -> None:
    hub.repositories["owner/other"] = Repository(private=False, files={"README.md": b"#"})
    files = {path.relative_to(export).as_posix(): path.read_bytes() for path in export.rglob("*") if path.is_file()}
    hub.repositories["owner/damaged"] = Repository(private=False, files=files | {"config.json": b"{ }"})
    evil = json.loads(files["export.json"]) | {"archive": "../model.nnef.tar"}
    hub.repositories["owner/evil"] = Repository(private=False, files=files | {"export.json": json.dumps(evil).encode()})
    hub.repositories["owner/private"] = Repository(private=True, files=files)
    commands: list[list[object]] = [
        ["pull", name, tmp_path / "back"]
        for name in ("owner/absent", "owner/private", "owner/other", "owner/damaged", "owner/evil", "owner")
    ]
    outcomes = said(hub, commands, tmp_path / "home", token="hf_wrong")
    words = ["owner/absent", "owner/private", "no export.json", "config.json is damaged", "archive", "'owner'"]
    for outcome, word in zip(outcomes, words, strict=True):
        refused(Outcome(outcome.code, outcome.out, _without_stages(outcome.err)), word)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("x", "home")]


def test_export_and_push_at_once(hub: HubServer, tiny_llama: Path, tmp_path: Path) -> None:
    words: list[object] = [
        "export",
        tiny_llama,
        "-o",
        tmp_path / "out",
        "--no-tokenizer",
        "--decode-steps",
        "2",
        "--dtype",
        "f32",
    ]
    none, unchecked, public, denied, done = said(
        hub,
        [
            [*words, "--push", "model"],
            [*words, "--push", NAME, "--no-check"],
            [*words, "--public"],
            [*words, "--push", "somebody/model", "--quiet"],
            [*words, "--push", NAME, "--force", "--json"],
        ],
        tmp_path / "home",
    )
    refused(none, "'model'")
    refused(unchecked, "--push")
    refused(public, "--public")
    refused(denied, "somebody/model", "no write access")
    assert f"t2n-llm push {tmp_path / 'out'} somebody/model" in denied.line("hint")
    record = strict_json(done.out)
    assert record["pushed"]["repository"] == NAME and record["validation"]["passed"]
    assert set(hub.repositories[NAME].files) >= {"README.md", "export.json", "model.nnef.tar"}


def test_without_a_token_and_with_a_card_that_the_hub_refuses(hub: HubServer, export: Path, tmp_path: Path) -> None:
    (outcome,) = said(hub, [["push", export, NAME]], tmp_path / "home", token="")
    refused(outcome, NAME, "no hub token")
    text = (export / "README.md").read_text()
    (export / "README.md").write_text(text.replace("---\n", "---\nlicense: nobody's\n", 1))
    (outcome,) = said(hub, [["push", export, NAME]], tmp_path / "home")
    refused(Outcome(outcome.code, outcome.out, _without_stages(outcome.err)), "model card", "license")


def _without_stages(text: str) -> str:
    """Leave out what was told before the end: stages, and warnings."""
    return "\n".join(line for line in text.splitlines() if line.strip().startswith(("error:", "hint:")))
