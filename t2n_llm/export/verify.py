"""`t2n-llm verify`: an export read again, and compared with the digests in its `export.json`.

In: an export folder, or the archive in one. Out: a report that names each tensor that is damaged, missing or extra.
Archives are read once, front to back, in pieces; nothing is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from zlib_ng import gzip_ng

from generic_export.errors import ArchiveError
from generic_export.files import sha256
from generic_export.interrupts import raise_if_interrupted
from generic_export.read.entries import READ_ERRORS
from generic_export.write.archive import GRAPH_FILE, WriteProgress
from t2n_llm.export.contents import other_files
from t2n_llm.export.folder import MANIFEST_NAME, read_any_manifest
from t2n_llm.export.manifest_form import ExportManifest

_SUFFIX = ".dat"
_CODE = (".py", ".pyc", ".pth", ".so")
_READ_BYTES = 1 << 22
_TAR_BYTES = 1 << 16  # what a truncated stream loses before its end
_GZIP_MAGIC = b"\x1f\x8b"

DAMAGED = "damaged"
MISSING = "missing"
EXTRA = "extra"
LINKED = "linked"


@dataclass(frozen=True)
class Finding:
    """Something that is not as recorded.

    Args:
        name: label of a tensor, `graph.nnef`, or a file of the folder.
        problem: `DAMAGED`, `MISSING`, `EXTRA`, or `LINKED` for a symbolic link, whose target may change.
        detail: what was expected and what was found; may be empty.
    """

    name: str
    problem: str
    detail: str = ""


@dataclass(frozen=True)
class SourceComparison:
    """An export beside its source.

    Attributes:
        source: name of the model.
        tensors: how many are what the source gives.
        bytes: their length.
        left: label -> why it cannot be told, of the others.
        same_graph: `graph.nnef` is what these releases of the packages write; None where it was not compared.
        findings: tensors that are not what the source gives.
    """

    source: str
    tensors: int
    bytes: int
    left: Mapping[str, str]
    same_graph: bool | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class IntegrityReport:
    """What a verification found.

    Args:
        path: what was verified.
        tensors: how many tensors (and graphs) are as recorded.
        bytes: their length.
        findings: everything that is not.
        manifest_sha256: of the `export.json` that it was held against.
        others: files of the folder that `export.json` does not name; they are nobody's damage.
        source: the same beside the model that it was made from, where that was asked for.
    """

    path: Path
    tensors: int
    bytes: int
    findings: tuple[Finding, ...]
    manifest_sha256: str
    others: tuple[str, ...] = ()
    source: SourceComparison | None = None

    @property
    def passed(self) -> bool:
        """Whether everything is as recorded, and what the source gives."""
        return not self.findings and not (self.source is not None and self.source.findings)

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self) | {"path": str(self.path), "passed": self.passed}


@dataclass(frozen=True)
class _Entry:
    name: str
    size: int
    chunks: Iterable[bytes]


def verify_export(path: Path, progress: Callable[[WriteProgress], None] | None = None) -> IntegrityReport:
    """Compare the files of an export with the sizes and SHA-256 in its `export.json`.

    Args:
        path: an export folder, whose archives and other files are verified; or one archive in it, which is verified alone.
        progress: receives the progress; None for no reports.

    Raises:
        ArchiveError: the path is not an export, or its `export.json` records no checksums.
    """
    folder = export_folder(path)
    manifest = read_any_manifest(folder)
    whole = folder == path
    archives = _archives(folder, manifest)
    checks = [
        _Check(folder / name, recorded, progress) for name, recorded in archives.items() if whole or name == path.name
    ]
    for check in checks:
        check.run()
    findings = [finding for check in checks for finding in check.findings]
    findings += _file_findings(folder, manifest, [check.archive.name for check in checks], beside=whole)
    looked_at = [folder] if whole else [check.archive for check in checks]
    findings += [
        Finding(link.relative_to(folder).as_posix(), LINKED, f"it leads to {os.readlink(link)}")
        for root in looked_at
        for link in _links(root, whole)
    ]
    findings += _named_code(manifest) if whole else []
    # Early releases did not record which files are of the export.
    others = tuple(other_files(folder, manifest)) if whole and "files" in manifest else ()
    good, size = sum(check.good for check in checks), sum(check.good_bytes for check in checks)
    return IntegrityReport(path, good, size, tuple(findings), sha256(folder / MANIFEST_NAME), others)


def _archives(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, str]]]:
    """Return, by the name of each archive of a folder, what was recorded of its tensors."""
    parts = manifest.get("archives")
    records = list(parts.values()) if isinstance(parts, Mapping) else [manifest]
    return {str(record["archive"]): _recorded(folder, record) for record in records}


def export_folder(path: Path) -> Path:
    """Return the folder with the `export.json` that speaks of `path`."""
    if (path / MANIFEST_NAME).is_file():
        return path
    beside = path.exists() and (path.parent / MANIFEST_NAME).is_file()
    if beside and path.name in _archives(path.parent, read_any_manifest(path.parent)):
        return path.parent
    raise ArchiveError(
        f"{path}: no {MANIFEST_NAME} that says what should be in it.",
        "Give a folder made by `t2n-llm export`, or the archive in it.",
    )


def _recorded(folder: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    tensors = manifest.get("tensors")
    try:
        if isinstance(tensors, Mapping) and tensors:
            return {str(label): (int(entry["bytes"]), str(entry["sha256"])) for label, entry in tensors.items()}
    except (KeyError, TypeError, ValueError):
        pass
    raise ArchiveError(f"{folder / MANIFEST_NAME}: records no digests of tensors.", "Export the model again.")


class _Check:
    """One pass over an archive."""

    def __init__(
        self,
        archive: Path,
        recorded: Mapping[str, tuple[int, str]],
        progress: Callable[[WriteProgress], None] | None,
    ) -> None:
        self.findings: list[Finding] = []
        self.good = self.good_bytes = 0
        self.archive = archive
        self._recorded = recorded
        self._progress = progress
        self._seen: set[str] = set()
        self._read = 0
        self._total = sum(size for size, _ in recorded.values())

    def run(self) -> None:
        if not self.archive.exists():
            self._find(self.archive.name, MISSING)
            return
        if not (self.archive.is_file() or self.archive.is_dir()):  # a pipe, which would never end
            self._find(self.archive.name, DAMAGED, "neither a file nor a folder")
            return
        try:
            with ExitStack() as stack:
                for entry in _entries(self.archive, stack):
                    self._look_at(entry)
        except READ_ERRORS as error:
            self._find(self.archive.name, DAMAGED, f"cannot be read on: {error}")
        for label in self._recorded:
            if label not in self._seen:
                self._find(label, MISSING)

    def _look_at(self, entry: _Entry) -> None:
        label = entry.name.removesuffix(_SUFFIX) if entry.name.endswith(_SUFFIX) else entry.name
        expected = self._recorded.get(label)
        known = expected is not None and (label == entry.name) == (label == GRAPH_FILE)
        if not known or label in self._seen or expected is None:
            self._find(entry.name, EXTRA)
            return
        self._seen.add(label)
        digest = hashlib.sha256()
        try:
            for chunk in entry.chunks:
                digest.update(chunk)
                self._tell(label, len(chunk))
        except READ_ERRORS as error:
            self._find(label, DAMAGED, f"cannot be read: {error}")
            if not isinstance(error, OSError) or not self.archive.is_dir():
                raise
            return
        if entry.size != expected[0]:
            self._find(label, DAMAGED, f"{entry.size} bytes, {expected[0]} were written")
        elif digest.hexdigest() != expected[1]:
            self._find(label, DAMAGED, f"SHA-256 {digest.hexdigest()[:16]}..., {expected[1][:16]}... was written")
        else:
            self.good += 1
            self.good_bytes += entry.size

    def _find(self, name: str, problem: str, detail: str = "") -> None:
        self.findings.append(Finding(name, problem, detail))

    def _tell(self, label: str, count: int) -> None:
        raise_if_interrupted()
        self._read += count
        if self._progress is not None:
            done = min(self._read, self._total)
            self._progress(WriteProgress(label, done, self._total, len(self._seen), len(self._recorded)))


# --- reading ----------------------------------------------------------------------------------


def _entries(archive: Path, stack: ExitStack) -> Iterator[_Entry]:
    """Yield what an archive holds, in order; each entry's chunks must be read before the next entry is asked for."""
    if archive.is_dir():
        for path in sorted(path for path in archive.rglob("*") if path.is_file()):
            file = stack.enter_context(path.open("rb", buffering=0)) if path.stat().st_size else None
            yield _Entry(path.relative_to(archive).as_posix(), path.stat().st_size, _pieces(file))
            stack.close()
        return
    stream: Any = stack.enter_context(archive.open("rb"))
    if stream.peek(2)[:2] == _GZIP_MAGIC:
        stream = stack.enter_context(gzip_ng.open(stream, "rb"))
    tar = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", bufsize=_TAR_BYTES))  # noqa: SIM115
    for member in tar:
        yield _Entry(member.name, member.size, _pieces(tar.extractfile(member)))
    left: Any = tar.fileobj  # tarfile reads ahead
    for rest in _pieces(left):  # to the end, where gzip has its checksum
        if rest.count(0) != len(rest):
            raise tarfile.ReadError("something follows the end of the tar")


def _pieces(file: IO[bytes] | None) -> Iterator[bytes]:
    while file is not None and (chunk := file.read(_READ_BYTES)):
        yield chunk


def _file_findings(
    folder: Path, manifest: Mapping[str, Any], archives: Sequence[str], *, beside: bool
) -> list[Finding]:
    """Compare the archives' lengths, and the files `beside` them."""
    findings: list[Finding] = []
    files = manifest.get("files")
    for name, entry in files.items() if isinstance(files, Mapping) else ():
        path = folder / str(name)
        if name in archives:
            size = path.stat().st_size if path.is_file() else None
            if size is not None and size != entry.get("bytes"):
                findings.append(Finding(name, DAMAGED, f"{size} bytes, {entry.get('bytes')} were written"))
        elif beside and not path.is_file():
            findings.append(Finding(name, MISSING))
        elif beside and not _same_file(path, entry):
            findings.append(Finding(name, DAMAGED, "its SHA-256 is another one"))
    return findings


def _named_code(manifest: ExportManifest) -> list[Finding]:
    names = [name for name in manifest.get("files", {}) if name.endswith(_CODE)]
    return [Finding(name, EXTRA, "no export holds Python code, though export.json names it") for name in names]


def _links(root: Path, whole: bool) -> list[Path]:
    """Return the symbolic links of an export, or in and of one archive."""
    inside = sorted(path for path in root.rglob("*") if path.is_symlink()) if root.is_dir() else []
    return inside if whole or not root.is_symlink() else [root, *inside]


def _same_file(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.stat().st_size == entry.get("bytes") and sha256(path) == entry.get("sha256")
