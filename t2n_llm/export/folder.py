"""The output folder: built beside its final place, renamed when whole; and `export.json`, which says what is in it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError, T2NError
from generic_export.files import exchange, is_below, is_disk_full, sha256
from generic_export.interrupts import SIGNALS, raise_if_interrupted
from generic_export.write.journal import OwnedFile, claim_abandoned, create_owned
from t2n_llm.export.manifest_form import (
    ArchiveRecord,
    ExportManifest,
    parse_manifest,
    parse_transformers_manifest,
)
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT, upgrade_manifest
from t2n_llm.tasks.names import TEXT_GENERATION

MANIFEST_NAME = "export.json"
PIPELINE_NAME = "pipeline.json"  # of an export of several models
CARD_FILE = "README.md"  # a text for people: theirs to edit, so that it is no part of what is verified
EDITED_CARD_FILE = "README.edited.md"  # where an edited card of the previous export is kept
SOURCE_CARD_FILE = "README.source.md"  # the card of the source, unchanged
Manifest = dict[str, Any]
"""The content of `export.json`."""
_LARGEST_MANIFEST = 1 << 28  # bytes; one of a model of 100,000 tensors has 20 million
DECODE_COMPONENT = "decode"
"""The program of `export_for_generation` that reads new tokens after a cache."""
TRANSFORMERS_TASK = "transformers"
"""What an export of transformers is for that does not generate."""
TESTS_FOLDER = "tests"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST_NAME = 210  # bytes; the hidden names beside it are longer, and may have 255
# An earlier export, in the moment of its replacement where the system cannot exchange two folders.
_ASIDE_SUFFIX = ".old"
_OTHER_ASIDE_SUFFIX = ".failed-old"  # the same of one that failed its check, which nobody misses
OWNER_SUFFIX = ".owner"  # a locked file beside a staging folder: whoever holds it is still at work


def check_free(target: Path, force: bool) -> None:
    """Refuse an output folder that exists, unless it is an earlier export (or empty) and `force` is set.

    Raises:
        OptionError: the path has no name of its own, such as `.` or `..`.
        OutputExistsError: the folder exists; the message says what to do.
    """
    if target.name in ("", ".."):
        raise OptionError(f"{target}: not a name for an output folder.", "Name a new folder with -o.")
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise OptionError(
            f"{target.name}: too long; the name of an output folder has at most {_LONGEST_NAME} bytes.",
            "Use a shorter name with -o.",
        )
    if not target.exists() and not target.is_symlink():
        return
    earlier = any((target / name).is_file() for name in (MANIFEST_NAME, PIPELINE_NAME))
    replaceable = target.is_dir() and (earlier or not any(target.iterdir()))
    if not replaceable:
        raise OutputExistsError(
            f"{target} exists and is not an export (it has no {MANIFEST_NAME}).",
            "--force replaces exports only; choose another folder with -o.",
        )
    if not force:
        raise OutputExistsError(
            f"{target} exists already.", "Pass --force to replace it, or choose another folder with -o."
        )


@contextmanager
def staging_folder(target: Path, *, resume: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `target`; what is still there when the block ends is removed.

    Parent folders that were missing are made, and removed again when nothing came to lie in them. Folders that killed
    exports of the same target left behind are removed, unless `resume` is set.

    Args:
        target: the final place.
        resume: yield the folder that a killed export of that target left behind, if there is one, with what is in it;
            and keep it when the block is interrupted (Ctrl-C). Then the interrupt gets an attribute `kept`, the folder.

    Raises:
        ArchiveError: the parent folder cannot be written.
        DiskFullError: the block ran out of disk space.
    """
    parent = target.absolute().parent
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    staging, owner, keep = None, None, False
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            recover(target)
            staging, owner = _open_staging(parent / target.name, resume)
            staging.mkdir(exist_ok=True)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ArchiveError(
                f"cannot write in {parent}: {error.strerror}.", "Choose another folder with -o."
            ) from error
        yield staging
    except T2NError as error:  # the user asked for another name
        error.message = error.message.replace(str(staging), str(target))
        raise
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(target) from error
        if not is_below(error, parent):
            raise
        raise ArchiveError(
            f"{target}: not exported, {str(error.filename).replace(str(staging), str(target))}: {error.strerror}.",
            "Check that the disk is healthy and writable, or choose another folder with -o.",
        ) from error
    except BaseException as interrupt:
        keep = resume and staging is not None and not isinstance(interrupt, Exception)
        if keep and getattr(interrupt, "kept", None) is None:
            interrupt.kept = staging  # type: ignore[attr-defined]
        raise
    finally:
        with undisturbed():
            if staging is not None and owner is not None:
                _leave(staging, owner, parent / target.name, keep)
            for folder in made:
                with suppress(OSError):  # not empty: the export is there
                    folder.rmdir()


@contextmanager
def calibration_folder(target: Path, *, resume: bool = False) -> Iterator[Path]:
    """Yield a folder beside `target` in which a calibration works; see `staging_folder`.

    Args:
        target: the final place of the export that it is for.
        resume: as of `staging_folder`.
    """
    with staging_folder(calibration_target(target), resume=resume) as folder:
        folder.chmod(0o700)  # weights, which not everybody may read
        yield folder


def remove_calibrations(target: Path) -> None:
    """Remove what calibrations of killed exports of the same target left behind; one that is at work is left alone."""
    for folder, owner in claim_abandoned(calibration_target(target.absolute()), OWNER_SUFFIX):
        _leave(folder, owner, calibration_target(target.absolute()), keep=False)


def calibration_target(target: Path) -> Path:
    """Return what the calibration of an export is called by, beside it."""
    return target.with_name(f"{target.name}.calibration")


def _open_staging(target: Path, resume: bool) -> tuple[Path, OwnedFile]:
    """Take over what a killed export left, or choose a new name; remove whatever else is dead."""
    found: tuple[Path, OwnedFile] | None = None
    for staging, owner in claim_abandoned(target, OWNER_SUFFIX):
        if resume and found is None and staging.is_dir():
            found = staging, owner
        else:
            _leave(staging, owner, target, keep=False)
    return found or create_owned(target, OWNER_SUFFIX)


def _leave(staging: Path, owner: OwnedFile, target: Path, keep: bool) -> None:
    if keep:
        owner.release()
    else:
        _remove(staging)
        _remove(staging.with_name(staging.name + _OTHER_ASIDE_SUFFIX))
        if target.exists() or target.is_symlink():  # else it is the one copy of an earlier export
            _remove(staging.with_name(staging.name + _ASIDE_SUFFIX))
        owner.remove()


def clear_staging(staging: Path, *archives: str) -> None:
    """Remove everything from a staging folder but archives, their partials and the journals of those."""
    partials = tuple(f".{archive}.partial-" for archive in archives)
    for path in staging.iterdir():
        if path.name not in archives and not path.name.startswith(partials):
            _remove(path)


def put_in_place(staging: Path, target: Path, force: bool) -> None:
    """Give a finished folder its final name, replacing an earlier export in one step.

    Raises:
        OutputExistsError: something took the name meanwhile, see `check_free`.
    """
    check_free(target, force)
    raise_if_interrupted()  # for the last time: then it is done
    with undisturbed():
        if not target.exists() and not target.is_symlink():
            staging.rename(target)
            return
        if exchange(staging, target):
            _remove(staging)  # what was there before; who dies here leaves it to the next export
            return
        suffix = _ASIDE_SUFFIX if staging.name.startswith(f".{target.name}.partial-") else _OTHER_ASIDE_SUFFIX
        aside = staging.with_name(staging.name + suffix)
        target.rename(aside)  # a process that dies here leaves no target: see `recover`
        try:
            staging.rename(target)
        except OSError:
            aside.rename(target)
            raise
        _remove(aside)


def recover(target: Path) -> bool:
    """Put an earlier export back under its name, where a process died in the moment of replacing it.

    Returns:
        Whether there was one.
    """
    if not target.name or target.exists() or target.is_symlink():
        return False
    for staging, owner in claim_abandoned(target.absolute(), OWNER_SUFFIX):
        aside = staging.with_name(staging.name + _ASIDE_SUFFIX)
        try:
            if aside.exists() or aside.is_symlink():
                with undisturbed():
                    aside.rename(target)
                return True
        finally:
            owner.release()
    return False


def keep_beside(staging: Path, target: Path, suffix: str) -> Path:
    """Keep a finished folder as `<target>.<suffix>`, replacing an earlier one of that name; return its path.

    A folder of that name that is no export is somebody else's: then a number is added to the name.
    """
    kept = target.with_name(f"{target.name}.{suffix}")
    number = 1
    while (kept.exists() or kept.is_symlink()) and not (kept / MANIFEST_NAME).is_file():
        number += 1
        kept = target.with_name(f"{target.name}.{suffix}-{number}")
    put_in_place(staging, kept, force=True)
    return kept


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for the moment of a rename or a removal that must not be cut in half."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def disk_full(path: Path) -> DiskFullError:
    """Return the error to raise when what was being written to `path` did not fit."""
    return DiskFullError(
        f"{path}: the disk is full.",
        "Nothing was left behind; free some space or choose another output path.",
    )


def file_digests(folder: Path, *archives: str) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file of a folder, by its relative path; archives in it are left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for name, path in named.items()
        if name.split("/")[0] not in archives
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write `export.json`."""
    (folder / MANIFEST_NAME).write_text(json_text(manifest, indent=2) + "\n", encoding="utf-8")


def json_text(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a record as JSON that every reader accepts: numbers that are not finite become null."""
    return json.dumps(_finite(record), indent=indent, ensure_ascii=False, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def no_export(folder: Path) -> ArchiveError:
    """Return the error that a path is no export: a model is to be exported first, with this command."""
    is_hub_id = _HUB_ID.fullmatch(str(folder)) is not None and not folder.parent.exists()
    if is_hub_id or (folder / "config.json").is_file():
        model, target = shlex.quote(str(folder)), shlex.quote(f"{folder.name}-tract")
        what = f"no {MANIFEST_NAME}" if folder.exists() else "no such folder"
        hint = f"Run t2n-llm export {model} -o {target}, then use {target}."
        return ArchiveError(f"{folder}: {what}; export the model first.", hint)
    if not folder.exists():
        what = "file" if folder.suffix else "folder"
        return ArchiveError(f"{folder}: no such {what}.", "Use a folder made by `t2n-llm export`.")
    return ArchiveError(f"{folder}: no {MANIFEST_NAME}.", "Use a folder made by `t2n-llm export`.")


def read_manifest(folder: Path) -> ExportManifest:
    """Read the `export.json` of `t2n-llm export`; every command reads it here.

    Raises:
        ArchiveError: it is missing, or not one that this version understands.
    """
    path, manifest = _read_json(folder)
    if _is_of_transformers(manifest):
        parse_transformers_manifest(manifest, path)
        raise ArchiveError(
            f"{folder}: an export of transformers (ExportedModel.save_pretrained), which this command cannot use.",
            "Only t2n-llm verify and generate can; for other commands, export the model with t2n-llm export.",
        )
    return _parsed(manifest, path)


def read_any_manifest(folder: Path) -> ExportManifest:
    """Read an `export.json`, that of transformers for tract too: its components are parts, and its decode program is the archive.

    Raises:
        ArchiveError: as `read_manifest`; or the export is for another engine.
    """
    path, manifest = _read_json(folder)
    if not _is_of_transformers(manifest):
        return _parsed(manifest, path)
    components = parse_transformers_manifest(manifest, path)["components"]
    if not components:
        raise ArchiveError(f"{path}: no component is listed.", "Export the model again.")
    chosen = components.get(DECODE_COMPONENT) or next(iter(components.values()))
    parts: dict[str, ArchiveRecord] = {
        name: {"archive": each["file"], "tensors": each["metadata"].get("tensors", {})}
        for name, each in components.items()
    }
    return {
        "format": MANIFEST_FORMAT,
        "task": TEXT_GENERATION if DECODE_COMPONENT in components else TRANSFORMERS_TASK,
        "source": {},
        "graph": {},
        "model": {},
        "archive": chosen["file"],
        "archives": parts,
        "components": components,
    }


def _is_of_transformers(manifest: Mapping[str, Any]) -> bool:
    return "format" not in manifest and "export_format" in manifest


def _read_json(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise no_export(folder)
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise ArchiveError(f"{path}: larger than any export.json.", "Export the model again.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(manifest, ensure_ascii=False).encode()  # texts may hold half of a character
    except (ValueError, OSError, RecursionError) as error:
        raise ArchiveError(f"{path}: cannot be read: {error}.", "Export the model again.") from error
    if not isinstance(manifest, dict):
        raise ArchiveError(f"{path}: not an export manifest of format {MANIFEST_FORMAT}.", "Export the model again.")
    return path, manifest


def _parsed(manifest: dict[str, Any], path: Path) -> ExportManifest:
    found = manifest.get("format")
    if type(found) is not int or found < 1:
        raise ArchiveError(f"{path}: not an export manifest of format {MANIFEST_FORMAT}.", "Export the model again.")
    if found > MANIFEST_FORMAT:
        raise ArchiveError(
            f"{path}: written by a newer release; this one reads formats up to {MANIFEST_FORMAT}.",
            "Update with pip install -U t2n-llm.",
        )
    return parse_manifest(upgrade_manifest(manifest), path)


def archive_in(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the archive that an export folder's manifest names.

    Raises:
        ArchiveError: it is not there.
    """
    archive = folder / str(manifest.get("archive"))
    if not archive.exists():
        raise ArchiveError(f"{folder}: the archive {archive.name} is missing.", "Export the model again.")
    return archive
