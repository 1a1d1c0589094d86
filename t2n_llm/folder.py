"""The output folder: built beside its final place, renamed when whole; and `export.json`, which says what is in it."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OutputExistsError

MANIFEST_NAME = "export.json"
MANIFEST_FORMAT = 1
TESTS_FOLDER = "tests"
_READ_BYTES = 1 << 22


def check_free(target: Path, force: bool) -> None:
    """Refuse an output folder that exists, unless it is an earlier export (or empty) and `force` is set.

    Raises:
        OutputExistsError: the folder exists; the message says what to do.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise OutputExistsError(
            f"{target} exists already.", "Pass --force to replace it, or choose another folder with -o."
        )
    replaceable = target.is_dir() and ((target / MANIFEST_NAME).is_file() or not any(target.iterdir()))
    if not replaceable:
        raise OutputExistsError(
            f"{target} exists and is no earlier export (no {MANIFEST_NAME} in it).",
            "--force replaces earlier exports only; choose another folder with -o.",
        )


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; whatever is still there when the block ends is removed.

    Raises:
        ArchiveError: the parent folder cannot be written.
    """
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=parent))
    except OSError as error:
        raise ArchiveError(f"cannot write in {parent}: {error.strerror}.", "Choose another folder with -o.") from error
    staging.chmod(0o755)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, target: Path) -> None:
    """Give a finished folder its final name, replacing an earlier export in one step."""
    if not target.exists():
        staging.rename(target)
        return
    aside = staging.with_name(staging.name + ".old")
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def file_digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file of a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write `export.json`."""
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read `export.json`.

    Raises:
        ArchiveError: it is missing, or not one that this version understands.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ArchiveError(f"{folder}: no {MANIFEST_NAME}.", "Give a folder made by `t2n-llm export`.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArchiveError(f"{path}: cannot be read: {error}.", "Export the model again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise ArchiveError(f"{path}: not an export manifest of format {MANIFEST_FORMAT}.", "Export the model again.")
    return manifest
