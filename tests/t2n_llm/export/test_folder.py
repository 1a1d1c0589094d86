"""The output folder: whole or absent, whatever happens, and `export.json` in it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
from pathlib import Path

import pytest

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError, T2NError
from t2n_llm.export.folder import (
    MANIFEST_NAME,
    check_free,
    file_digests,
    json_text,
    keep_beside,
    put_in_place,
    read_manifest,
    staging_folder,
    undisturbed,
    write_manifest,
)
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT

MANIFEST = {"format": 1, "source": {}, "graph": {}, "model": {}, "archive": "model.nnef.tar"}


def make_export(folder: Path, text: str = "") -> Path:
    """Make a folder that passes for an export."""
    folder.mkdir(parents=True)
    write_manifest(folder, MANIFEST)
    (folder / "text").write_text(text)
    return folder


# --- is the name free -------------------------------------------------------------------------


def test_a_new_name_is_free(tmp_path: Path) -> None:
    for force in (False, True):
        check_free(tmp_path / "x", force)
        check_free(tmp_path / "a" / "b" / "x", force)


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing", "link to a file"])
def test_what_is_there_and_is_no_export_is_never_free(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    (tmp_path / "mine").write_text("mine")
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    else:
        path.symlink_to("nothing" if kind == "link to nothing" else "mine")
    for force in (False, True):
        with pytest.raises(OutputExistsError, match="x"):
            check_free(path, force)


@pytest.mark.parametrize("kind", ["export", "empty folder"])
def test_an_export_or_an_empty_folder_is_free_by_force(kind: str, tmp_path: Path) -> None:
    make_export(tmp_path / "x") if kind == "export" else (tmp_path / "x").mkdir()
    check_free(tmp_path / "x", force=True)
    with pytest.raises(OutputExistsError) as caught:
        check_free(tmp_path / "x", force=False)
    assert "--force" in str(caught.value.hint)


@pytest.mark.parametrize("name", [".", "..", "/", "x/.."])
def test_a_path_must_name_the_folder(name: str) -> None:
    with pytest.raises(OptionError):
        check_free(Path(name), force=True)


# --- building beside the final place ----------------------------------------------------------


def test_staging_and_placing(tmp_path: Path) -> None:
    target = tmp_path / "a" / "x"
    with staging_folder(target) as staging:
        assert staging.parent == target.parent
        assert staging.name.startswith(".")
        (staging / "file").write_text("new")
        put_in_place(staging, target, force=False)
    assert (target / "file").read_text() == "new"
    assert os.listdir(target.parent) == ["x"]
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_whatever_goes_wrong_nothing_is_left(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), staging_folder(tmp_path / "a" / "b" / "x") as staging:
        (staging / "folder").mkdir()
        (staging / "folder" / "file").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def test_parents_that_others_use_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staging_folder(tmp_path / "a" / "b" / "x"):
        (tmp_path / "a" / "other").mkdir()
        raise RuntimeError
    assert os.listdir(tmp_path / "a") == ["other"]


def test_a_relative_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with staging_folder(Path("x")) as staging:
        put_in_place(staging, Path("x"), force=False)
    assert os.listdir(tmp_path) == ["x"]


def test_a_disk_full_inside_is_said_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError) as caught, staging_folder(tmp_path / "x") as staging:
        (staging / "file").symlink_to("/dev/full")
        (staging / "file").write_bytes(b"0")
    assert caught.value.message == f"{tmp_path / 'x'}: the disk is full."
    assert os.listdir(tmp_path) == []


def test_errors_speak_of_the_target_not_of_the_hidden_folder(tmp_path: Path) -> None:
    with pytest.raises(T2NError) as caught, staging_folder(tmp_path / "x") as staging:
        raise ArchiveError(f"{staging / 'model.nnef.tar'}: bad.")
    assert caught.value.message == f"{tmp_path / 'x' / 'model.nnef.tar'}: bad."


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArchiveError, match="file"), staging_folder(tmp_path / "file" / "x"):
        pass
    assert os.listdir(tmp_path) == ["file"]


# --- putting in place -------------------------------------------------------------------------


def test_force_replaces_an_export(tmp_path: Path) -> None:
    target = make_export(tmp_path / "x", "old")
    with staging_folder(target) as staging:
        (staging / "text").write_text("new")
        put_in_place(staging, target, force=True)
    assert os.listdir(target) == ["text"]
    assert os.listdir(tmp_path) == ["x"]


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    make_export(tmp_path / "real", "old")
    (tmp_path / "x").symlink_to("real")
    with staging_folder(tmp_path / "x") as staging:
        put_in_place(staging, tmp_path / "x", force=True)
    assert (tmp_path / "real" / "text").read_text() == "old"
    assert not (tmp_path / "x").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["real", "x"]


def test_who_comes_second_does_not_replace_who_came_first(tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError), staging_folder(tmp_path / "x") as staging:
        make_export(tmp_path / "x", "of another process")
        put_in_place(staging, tmp_path / "x", force=False)
    assert (tmp_path / "x" / "text").read_text() == "of another process"
    assert os.listdir(tmp_path) == ["x"]


def test_force_does_not_replace_what_is_no_export_any_more(tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError), staging_folder(tmp_path / "x") as staging:
        (tmp_path / "x").write_text("mine")
        put_in_place(staging, tmp_path / "x", force=True)
    assert (tmp_path / "x").read_text() == "mine"


def test_keep_beside(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with staging_folder(tmp_path / "x") as staging:
            write_manifest(staging, MANIFEST)
            (staging / "text").write_text(text)
            assert keep_beside(staging, tmp_path / "x", "failed") == tmp_path / "x.failed"
    assert (tmp_path / "x.failed" / "text").read_text() == "second"
    assert os.listdir(tmp_path) == ["x.failed"]


def test_keep_beside_goes_round_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "x.failed").mkdir()
    (tmp_path / "x.failed-2").write_text("mine")
    with staging_folder(tmp_path / "x") as staging:
        assert keep_beside(staging, tmp_path / "x", "failed") == tmp_path / "x.failed-3"
    assert sorted(os.listdir(tmp_path)) == ["x.failed", "x.failed-2", "x.failed-3"]


# --- interrupts -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_undisturbed(number: signal.Signals) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        with undisturbed():
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_undisturbed_in_another_thread(tmp_path: Path) -> None:
    def work() -> None:
        with staging_folder(tmp_path / "x") as staging:
            put_in_place(staging, tmp_path / "x", force=False)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert os.listdir(tmp_path) == ["x"]


# --- export.json ------------------------------------------------------------------------------


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.npz").write_bytes(b"abc")
    (tmp_path / MANIFEST_NAME).write_text("not of itself")
    assert file_digests(tmp_path) == {"tests/a.npz": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}}


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = MANIFEST | {
        "format": MANIFEST_FORMAT,
        "name": "Ω",
        "path": Path("x"),
        "steps": (1.5, math.inf, -math.inf, math.nan),
    }
    write_manifest(tmp_path, manifest)
    text = (tmp_path / MANIFEST_NAME).read_text(encoding="utf-8")
    assert "Ω" in text
    assert text.endswith("}\n")
    assert read_manifest(tmp_path) == manifest | {"path": "x", "steps": [1.5, None, None, None]}


def test_json_is_json_for_everyone() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = {"a": [{"b": math.nan}], "c": math.inf, "d": True, "e": None, "f": "NaN"}
    assert json.loads(json_text(record), parse_constant=refuse) == record | {"a": [{"b": None}], "c": None}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "no export.json"),
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "format"),
        (b"{}", "format"),
        (b'{"format": 0}', "format"),
        (b'{"format": 1, "source": {}}', "graph, model, archive"),
    ],
)
def test_unreadable_manifests(text: bytes | None, word: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(ArchiveError, match=word) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
