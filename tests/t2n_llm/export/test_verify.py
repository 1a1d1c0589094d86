"""Verification: what is as written passes, and whatever is not is named, in every form of archive."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from generic_export.errors import ArchiveError
from generic_export.files import sha256
from t2n_llm.export.verify import verify_export
from tests.shared_folders import SharedExport
from tests.systems import needs_posix
from tests.t2n_llm.command_line import call, refused, strict_json, unchanged

ARCHIVES = {"dir": "model.nnef", "tar": "model.nnef.tar", "tgz": "model.nnef.tgz"}
BAD = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def exports(tiny_llama: Path, shared_export: SharedExport) -> Callable[[str], Path]:
    """Return the random Llama exported in a form."""
    return lambda form: shared_export(tiny_llama, archive=form, check=False, require_tokenizer=False)


@pytest.fixture(params=ARCHIVES)
def export(request: pytest.FixtureRequest, exports: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports(request.param), tmp_path / request.param))


def rewrite(export: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change what an archive holds, as somebody would who unpacks and packs it again."""
    archive = export / ARCHIVES[export.name]
    if archive.is_dir():
        entries = {path.name: path.read_bytes() for path in archive.iterdir()}
        change(entries)
        shutil.rmtree(archive)
        archive.mkdir()
        for name, data in entries.items():
            (archive / name).write_bytes(data)
        return
    with tarfile.open(archive) as tar:
        entries = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    change(entries)
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in entries.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, BytesIO(data))
    archive.write_bytes(gzip.compress(stream.getvalue()) if export.name == "tgz" else stream.getvalue())


def problems(export: Path) -> dict[str, str]:
    """Return name -> problem; the archive's own length is left out."""
    return {
        finding.name: finding.problem
        for finding in verify_export(export).findings
        if " bytes, expected " not in finding.detail
    }


def test_an_export_is_as_written(export: Path) -> None:
    manifest = json.loads((export / "export.json").read_text())
    with unchanged(export):
        for path in (export, export / ARCHIVES[export.name]):
            report = verify_export(path)
            assert report.passed, report.findings
            assert report.tensors == len(manifest["tensors"]) > 20
            assert report.bytes == sum(entry["bytes"] for entry in manifest["tensors"].values())


def test_a_changed_tensor_is_named(export: Path) -> None:
    def change(entries: dict[str, bytes]) -> None:
        data = bytearray(entries[f"{BAD}.dat"])
        data[-1] ^= 1
        entries[f"{BAD}.dat"] = bytes(data)

    rewrite(export, change)
    found = {finding.name: finding.problem for finding in verify_export(export / ARCHIVES[export.name]).findings}
    assert found.pop(BAD) == "damaged"
    assert found in ({}, {ARCHIVES[export.name]: "damaged"})  # a .tgz has another length now


def test_missing_and_extra_tensors_are_named(export: Path) -> None:
    def change(entries: dict[str, bytes]) -> None:
        entries["other.dat"] = entries.pop(f"{BAD}.dat")
        entries["graph.nnef.dat"] = b"not a graph"

    rewrite(export, change)
    found = problems(export)
    assert found == {BAD: "missing", "other.dat": "extra", "graph.nnef.dat": "extra"}


def test_a_tensor_of_another_length_is_damaged(export: Path) -> None:
    rewrite(export, lambda entries: entries.update({f"{BAD}.dat": entries[f"{BAD}.dat"] + b"x"}))
    (finding,) = [finding for finding in verify_export(export).findings if finding.name == BAD]
    assert finding.problem == "damaged"
    assert "bytes" in finding.detail


@pytest.mark.parametrize("form", ["tar", "tgz"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_damaged_and_names_what_is_missing(
    form: str, part: float, exports: Callable[[str], Path], tmp_path: Path
) -> None:
    export = Path(shutil.copytree(exports(form), tmp_path / form))
    archive = export / ARCHIVES[form]
    archive.write_bytes(archive.read_bytes()[: int(part * archive.stat().st_size)])
    report = verify_export(export)
    assert archive.name in {finding.name for finding in report.findings}
    missing = [finding for finding in report.findings if finding.problem == "missing"]
    assert missing or part > 0.99
    assert report.tensors + len({finding.name for finding in report.findings} - {archive.name}) > 20
    assert report.tensors > 0 or part < 0.5


@pytest.mark.parametrize("from_end", [1, 400])
def test_what_follows_the_end_of_a_tar_is_found(from_end: int, exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    archive = export / ARCHIVES["tar"]
    data = bytearray(archive.read_bytes())
    assert not any(data[-1024:]), "a tar ends in two blocks of zeros"
    data[-from_end] = 7
    archive.write_bytes(data)
    report = verify_export(export)
    assert [finding.problem for finding in report.findings] == ["damaged"]


def test_every_flipped_byte_of_a_tgz_is_found(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tgz"), tmp_path / "tgz"))
    archive = export / ARCHIVES["tgz"]
    whole = archive.read_bytes()
    for spot in range(10, len(whole), len(whole) // 40):
        archive.write_bytes(whole[:spot] + bytes([whole[spot] ^ 0x55]) + whole[spot + 1 :])
        assert not verify_export(archive).passed, spot


def test_files_beside_the_archive(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    (export / "config.json").write_text("{}")
    (export / "generation_config.json").unlink()
    assert problems(export) == {"config.json": "damaged", "generation_config.json": "missing"}
    assert verify_export(export / ARCHIVES["tar"]).passed


def test_links_and_files_that_no_export_wrote(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    archive = export / ARCHIVES["tar"]
    archive.rename(tmp_path / "elsewhere.tar")
    archive.symlink_to(tmp_path / "elsewhere.tar")
    (export / "modeling.py").write_text("1")
    (export / ".gitattributes").write_text("")
    assert problems(export) == {ARCHIVES["tar"]: "linked"}
    assert verify_export(export).others == ("modeling.py",)
    outcome = call("verify", export)
    assert outcome.code == 1 and f"linked: {ARCHIVES['tar']}: it links to" in outcome.err
    assert "warning: not part of the export: modeling.py." in outcome.err and "as written" not in outcome.out
    assert strict_json(call("verify", export, "--json").out)["others"] == ["modeling.py"]
    assert [each.problem for each in verify_export(archive).findings] == ["linked"]


def test_python_code_that_a_manifest_names(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("dir"), tmp_path / "dir"))
    (export / "modeling.py").write_text("1")
    manifest = json.loads((export / "export.json").read_text())
    manifest["files"]["modeling.py"] = {"bytes": 1, "sha256": sha256(export / "modeling.py")}
    (export / "export.json").write_text(json.dumps(manifest))
    (export / ARCHIVES["dir"] / "hook.py").write_text("1")
    assert problems(export) == {"modeling.py": "extra", "hook.py": "extra"}


@needs_posix
def test_an_archive_that_is_a_pipe_is_not_read(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    (export / ARCHIVES["tar"]).unlink()
    os.mkfifo(export / ARCHIVES["tar"])
    assert problems(export) == {ARCHIVES["tar"]: "damaged"}


def test_an_archive_that_is_gone(exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    (export / ARCHIVES["tar"]).unlink()
    assert problems(export) == {ARCHIVES["tar"]: "missing"}


def test_exit_codes(export: Path, tmp_path: Path) -> None:
    good = call("verify", export)
    assert (good.code, good.err) == (0, "")
    assert "as written" in good.out
    assert strict_json(call("verify", export, "--json").out)["passed"] is True
    quiet = call("verify", export, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    rewrite(export, lambda entries: entries.pop(f"{BAD}.dat") and None)
    bad = call("verify", export)
    assert bad.code == 1
    assert f"missing: {BAD}" in bad.err
    in_json = call("verify", export, "--json")
    assert (in_json.code, in_json.err) == (1, "")
    assert {"name": BAD, "problem": "missing", "detail": ""} in strict_json(in_json.out)["findings"]


def test_what_is_no_export_is_bad_input(tmp_path: Path) -> None:
    refused(call("verify", tmp_path / "nowhere"), "no such folder")
    refused(call("verify", tmp_path), "export.json")
    (tmp_path / "alone.tar").write_bytes(b"")
    with pytest.raises(ArchiveError, match=r"export\.json"):
        verify_export(tmp_path / "alone.tar")


@pytest.mark.parametrize("tensors", [None, {}, {"w": 1}, {"w": {"bytes": "x", "sha256": ""}}])
def test_a_manifest_without_digests_is_bad_input(
    tensors: object, exports: Callable[[str], Path], tmp_path: Path
) -> None:
    export = Path(shutil.copytree(exports("tar"), tmp_path / "tar"))
    manifest = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps(manifest | {"tensors": tensors}))
    with pytest.raises(ArchiveError, match=r"records no checksums|tensors.* is .*, not a "):
        verify_export(export)
