"""NNEF archives on disk: a folder, a .tar or a .tgz, visible under its name only once it is whole.

In: entries, as bytes or as streams of chunks, in the caller's order. Out: the archive; on any failure, nothing.
Layout: `graph.nnef` at the root and one `.dat` a tensor beside or below it (tract 0.23.9, nnef/src/framework.rs).
"""

from __future__ import annotations

import enum
import errno
import os
import queue
import secrets
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from zlib_ng import gzip_ng_threaded

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError

GRAPH_FILE = "graph.nnef"
DEFAULT_TGZ_LEVEL = 2  # what zlib-ng calls its trade-off; weights gain almost nothing from more

_QUEUED_CHUNKS = 3  # chunks that may wait for the disk
_GZIP_THREADS = min(os.cpu_count() or 1, 4)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Buffer: TypeAlias = bytes | bytearray | memoryview


class ArchiveFormat(enum.Enum):
    """The containers that tract loads."""

    DIRECTORY = "directory"
    TAR = "tar"
    TGZ = "tgz"


_SUFFIXES = ((".tar", ArchiveFormat.TAR), (".tgz", ArchiveFormat.TGZ), (".tar.gz", ArchiveFormat.TGZ))


def archive_format_of(path: str | os.PathLike[str], compression_level: int | None = None) -> tuple[Path, ArchiveFormat]:
    """Where an archive goes and in which form.

    Args:
        path: the path asked for. A suffix `.tar`, `.tgz` or `.tar.gz` decides the form; any other name gets the
            suffix that the level calls for (`model.nnef` and level 5 give `model.nnef.tgz`).
        compression_level: 0 is a tar, 1 to 9 a compressed tar, None says nothing: a folder, unless the suffix of
            `path` says otherwise.

    Raises:
        OptionError: suffix and level contradict each other, or the level is not None and not 0 to 9.
    """
    path = Path(path)
    if path.name in ("", ".."):
        raise OptionError(f"{path}: not a name for an archive.", "Give the path of a file or of a new folder.")
    level_format = _format_of_level(compression_level)
    for suffix, suffix_format in _SUFFIXES:
        if path.name.endswith(suffix):
            if compression_level is not None and suffix_format is not level_format:
                raise OptionError(
                    f"{path}: suffix {suffix} contradicts compression level {compression_level}.",
                    "Level 0 is a .tar, 1 to 9 a .tgz; drop the level or change the suffix.",
                )
            return path, suffix_format
    if level_format is ArchiveFormat.DIRECTORY:
        return path, level_format
    return path.with_name(f"{path.name}.{level_format.value}"), level_format


def check_free_space(path: str | os.PathLike[str], needed_bytes: int) -> None:
    """Refuse early what cannot fit.

    Args:
        path: the file or folder to be written; it need not exist yet.
        needed_bytes: how much will be written.

    Raises:
        DiskFullError: the disk that holds `path` has less than that free.
    """
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise DiskFullError(
            f"{path}: needs {needed_bytes} bytes, {free} are free on its disk.",
            "Free some space or choose another output path.",
        )


class ArchiveWriter:
    """Writes one archive beside its final place, and puts it there when it is whole.

    Use it as a context manager and call `commit()` last; leaving the block in any other way removes what was
    written. Bytes are written by one background thread, so that the caller prepares the next chunk meanwhile.

    Args:
        path, compression_level: as `archive_format_of`; the outcome is in `.path` and `.format`.
        overwrite: replace an existing archive, at `commit()` and not before.
        needed_bytes: total to be written, when the caller knows it; checked against the free space.

    Raises:
        OptionError: as `archive_format_of`.
        OutputExistsError: the target exists and `overwrite` is off, or it is a folder that is no archive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        compression_level: int | None = None,
        *,
        overwrite: bool = False,
        needed_bytes: int | None = None,
    ) -> None:
        self.path, self.format = archive_format_of(path, compression_level)
        self._level = compression_level or DEFAULT_TGZ_LEVEL
        self._overwrite = overwrite
        self._needed_bytes = needed_bytes
        self._target = self.path.absolute()
        self._partial = self._target.with_name(f".{self.path.name}.partial-{secrets.token_hex(4)}")
        self._names: dict[str, bool] = {}
        self._damage: str | None = None
        self._sink: _DirectorySink | _TarSink | None = None
        self._behind = _WriteBehind()
        _check_target(self.path, overwrite)

    def __enter__(self) -> ArchiveWriter:
        if not self.path.parent.is_dir():
            raise ArchiveError(f"{self.path}: the folder {self.path.parent} does not exist.", "Create it first.")
        if self._needed_bytes is not None:
            check_free_space(self.path, self._needed_bytes)
        try:
            if self.format is ArchiveFormat.DIRECTORY:
                self._sink = _DirectorySink(self._partial)
            else:
                self._sink = _TarSink(self._partial, self._level if self.format is ArchiveFormat.TGZ else None)
            self._behind.start()
        except OSError as error:
            self._discard()
            raise self._advice(error) from error
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sink is not None:
            self._discard()

    def add_bytes(self, name: str, data: Buffer) -> None:
        """Add an entry whose bytes are at hand. Raises as `add_stream`."""
        self.add_stream(name, memoryview(data).nbytes, (data,))

    def add_stream(self, name: str, size: int, chunks: Iterable[Buffer]) -> None:
        """Add an entry of `size` bytes from chunks that are written as they arrive.

        Args:
            name: path inside the archive, `/` between folders; tract's label of a tensor plus `.dat`.
            size: length in bytes, needed before the bytes are.
            chunks: the bytes, best in pieces of 8 to 32 MiB. They are queued, not copied: their memory must not
                change once they are handed over.

        Raises:
            ArchiveError: the name is not acceptable, or the chunks do not amount to `size`.
            DiskFullError: the disk is full.
        """
        sink = self._open_sink()
        _add_name(self._names, name)
        self._damage = f"entry {name} was not completed"
        self._submit(sink.begin_entry, name, size)
        received = 0
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            received += len(data)
            if received > size:
                break
            if data:
                self._submit(sink.write, data)
        if received != size:
            more = "at least " if received > size else ""
            raise ArchiveError(f"{self.path}: entry {name} was announced with {size} bytes, got {more}{received}.")
        self._submit(sink.end_entry, size)
        self._damage = None

    def commit(self) -> None:
        """Finish the archive, flush it to the disk and give it its final name.

        Raises:
            ArchiveError: an entry failed before, there is no `graph.nnef`, or the disk refuses.
            DiskFullError: the disk is full.
            OutputExistsError: something has taken the target's name meanwhile, and `overwrite` is off.
        """
        sink = self._open_sink()
        if GRAPH_FILE not in self._names:
            raise ArchiveError(f"{self.path}: an archive without {GRAPH_FILE} cannot be loaded.", "Add it first.")
        self._submit(sink.finish)
        try:
            self._behind.drain()
            _check_target(self._target, self._overwrite)
            _put_in_place(self._partial, self._target)
        except OSError as error:
            raise self._advice(error) from error
        _sync_folder(self._target.parent)
        self._behind.stop()
        self._sink = None

    def _open_sink(self) -> _DirectorySink | _TarSink:
        if self._sink is None:
            raise ArchiveError(f"{self.path}: the archive is not open.", "Write inside `with ArchiveWriter(...)`.")
        if self._damage is not None:
            raise ArchiveError(f"{self.path}: cannot go on, {self._damage}.", "Start the archive again.")
        return self._sink

    def _submit(self, action: Callable[..., None], *args: Any) -> None:
        try:
            self._behind.submit(action, *args)
        except OSError as error:
            raise self._advice(error) from error

    def _discard(self) -> None:
        try:
            self._behind.stop()
            if self._sink is not None:
                self._sink.abandon()
        finally:  # also when a second Ctrl-C arrives meanwhile
            self._sink = None
            _delete(self._partial)

    def _advice(self, error: OSError) -> ArchiveError:
        """The error to raise for a failed file operation."""
        if error.errno in _DISK_FULL:
            needed = "" if self._needed_bytes is None else f" (the archive needs {self._needed_bytes} bytes)"
            return DiskFullError(
                f"{self.path}: the disk is full{needed}.",
                "Nothing was left behind; free some space or choose another output path.",
            )
        return ArchiveError(f"{self.path}: cannot be written: {error.strerror or error}.", "Nothing was left behind.")


# --- names ------------------------------------------------------------------------------------


def _add_name(names: dict[str, bool], name: str) -> None:
    """Check the name of a new entry against what tract does with it, and note it: path -> whether it is a file."""
    parts = name.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    reason = None
    if "" in parts:
        reason = "the name must be a relative path without empty components"
    elif any(part.startswith(".") for part in parts):
        reason = "a component starts with a dot, and tract skips such entries"
    elif "\0" in name or not _is_unicode(name):
        reason = "the name contains a NUL or is not valid Unicode"
    elif parts[-1] == GRAPH_FILE and folders:
        reason = f"tract takes a {GRAPH_FILE} in a sub-folder for another model"
    elif names.get(name):
        reason = "it is in the archive already"
    elif name in names or any(names.get(folder) for folder in folders):
        reason = "it is a file and a folder at once"
    if reason:
        raise ArchiveError(f"archive entry {name!r}: {reason}.", "Rename the tensor or the file.")
    names.update(dict.fromkeys(folders, False))
    names[name] = True


def _is_unicode(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # a lone surrogate, from a file name that is not UTF-8
        return False


# --- writing: everything below but `abandon` runs in the writer thread -------------------------


class _WriteBehind:
    """One thread that runs submitted actions in order; its first error is raised at the next submit or drain."""

    def __init__(self) -> None:
        self._actions: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(_QUEUED_CHUNKS)
        self._thread = threading.Thread(target=self._run, name="archive-writer", daemon=True)
        self._error: BaseException | None = None
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, action: Callable[..., None], *args: Any) -> None:
        self._raise_error()
        self._actions.put((action, args))

    def drain(self) -> None:
        self._actions.join()
        self._raise_error()

    def stop(self) -> None:
        """Drop what is still queued and end the thread; the action under way is waited for."""
        self._stopping = True
        if self._thread.is_alive():
            self._actions.put(None)
            self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._actions.get()) is not None:
            action, args = item
            try:
                if self._error is None and not self._stopping:
                    action(*args)
            except BaseException as error:  # raised again in the caller's thread
                self._error = error
            finally:
                del item, action, args  # a waiting thread must not keep a chunk alive
                self._actions.task_done()


class _OutputFile:
    """An unbuffered file: chunks go to the kernel as they are."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def write(self, data: Buffer) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered; the gzip writer asks."""

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class _DirectorySink:
    """A folder with one file an entry."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._file: _OutputFile | None = None
        self._files: list[Path] = []

    def begin_entry(self, name: str, size: int) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _OutputFile(path)
        self._files.append(path)

    def write(self, data: memoryview) -> None:
        if self._file is not None:
            self._file.write(data)

    def end_entry(self, size: int) -> None:
        self.abandon()

    def finish(self) -> None:
        # All at the end: the first fsync commits the file system's journal for every file, the others are cheap.
        folders = {folder for path in self._files for folder in path.parents if folder.is_relative_to(self._folder)}
        for path in self._files:
            _sync(path)
        for folder in folders:
            _sync_folder(folder)

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _TarSink:
    """A GNU tar, plain or through gzip, the same bytes for the same entries: no times, owners or modes."""

    def __init__(self, path: Path, gzip_level: int | None) -> None:
        self._file = _OutputFile(path)
        self._stream: Any = self._file
        if gzip_level is not None:
            self._stream = gzip_ng_threaded.open(self._file, "wb", gzip_level, threads=_GZIP_THREADS)
        self._position = 0

    def begin_entry(self, name: str, size: int) -> None:
        header = tarfile.TarInfo(name)
        header.size = size
        self.write(memoryview(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")))

    def write(self, data: memoryview) -> None:
        self._stream.write(data)
        self._position += len(data)

    def end_entry(self, size: int) -> None:
        self._pad(tarfile.BLOCKSIZE)

    def finish(self) -> None:
        self.write(memoryview(bytes(2 * tarfile.BLOCKSIZE)))
        self._pad(tarfile.RECORDSIZE)
        if self._stream is not self._file:
            self._stream.close()
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        with suppress(Exception):  # the gzip writer raises its earlier error again
            self._stream.close()
        self._file.close()

    def _pad(self, block: int) -> None:
        self.write(memoryview(bytes(-self._position % block)))


# --- the target -------------------------------------------------------------------------------


def _format_of_level(level: int | None) -> ArchiveFormat:
    if level is None:
        return ArchiveFormat.DIRECTORY
    if type(level) is not int or not 0 <= level <= 9:
        raise OptionError(f"compression level {level!r}: expected 0 (tar), 1 to 9 (tgz), or none (folder).")
    return ArchiveFormat.TGZ if level else ArchiveFormat.TAR


def _check_target(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise OutputExistsError(f"{path}: exists already.", "Ask to overwrite it, or choose another output path.")
    if path.is_dir() and any(path.iterdir()) and not (path / GRAPH_FILE).exists():
        raise OutputExistsError(f"{path}: a folder that is no NNEF archive is not replaced.", "Choose another path.")


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; a target that a rename cannot replace is moved aside first, then deleted."""
    replaceable = partial.is_file() and (target.is_symlink() or not target.is_dir())
    if replaceable or not os.path.lexists(target):
        os.replace(partial, target)
        return
    aside = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    os.rename(target, aside)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(aside, target)
        raise
    _delete(aside)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    if os.name != "posix":  # other systems flush folders by themselves, and files only when opened for writing
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems (FUSE, SMB) cannot flush a folder
        _sync(path)


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
