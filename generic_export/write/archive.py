"""NNEF archives on disk: a folder, a .tar or a .tgz, visible under its name only once it is whole.

In: entries, as bytes or as streams of chunks, in the caller's order. Out: the archive and its entries' SHA-256; on any
failure, nothing. Layout: `graph.nnef` at the root and one `.dat` a tensor beside or below it (tract 0.23.9,
nnef/src/framework.rs).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from generic_export.errors import ArchiveError, DiskFullError
from generic_export.files import is_disk_full, sync_folder
from generic_export.interrupts import raise_if_interrupted
from generic_export.write.direct_file import Buffer, Staging
from generic_export.write.journal import EntryRecord, Journal, claim_journals, occupied_bytes
from generic_export.write.output_path import (
    GRAPH_FILE,
    ArchiveFormat,
    add_name,
    archive_format_of,
    check_free_space,
    check_target,
    put_in_place,
)
from generic_export.write.sinks import ArchiveSink, DirectorySink, EntryPlace, TarSink, TgzSink
from generic_export.write.worker_threads import WorkerThreads

__all__ = [
    "DEFAULT_TGZ_LEVEL",
    "GRAPH_FILE",
    "ArchiveFormat",
    "ArchiveWriter",
    "Entry",
    "EntryDigest",
    "Resume",
    "WriteProgress",
    "archive_format_of",
    "check_free_space",
]
DEFAULT_TGZ_LEVEL = 2  # what zlib-ng calls its trade-off; weights gain almost nothing from more


@dataclass(frozen=True)
class Entry:
    """One file of an archive.

    Args:
        name: path inside the archive, `/` between folders; tract's label of a tensor plus `.dat`.
        size: length in bytes.
        chunks: gives the bytes, in pieces of any length; called when they are needed, in any thread.
    """

    name: str
    size: int
    chunks: Callable[[], Iterable[Buffer]]


@dataclass(frozen=True)
class EntryDigest:
    """What was written of an entry: how many bytes, and their SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class WriteProgress:
    """How far writing is.

    Args:
        label: the entry that began last.
        done_bytes, total_bytes: of the entries.
        done_entries, total_entries: how many are whole.
    """

    label: str
    done_bytes: int
    total_bytes: int
    done_entries: int
    total_entries: int


@dataclass(frozen=True)
class Resume:
    """How an export that was cut short may be continued. A .tgz is one compressed stream and always starts again.

    Args:
        identity: text that is equal for two exports exactly when they would write the same archive.
        wanted: continue a partial of that identity, and keep one when the user interrupts; otherwise partials that
            were left behind are deleted.
        on_found: told in a sentence what is continued.
        on_lost: told why nothing can be continued.
        note: asked, once an entry is whole, for plain data to keep with its name.
        recall: told that name and data when the entry is kept by an export that goes on.
        keep_journal: leave the journal beside the finished archive, which is then continued like a partial one. The
            caller deletes it, see `journal.journal_paths`.
    """

    identity: str
    wanted: bool = False
    on_found: Callable[[str], None] = lambda message: None
    on_lost: Callable[[str], None] = lambda message: None
    note: Callable[[str], Any] = lambda name: None
    recall: Callable[[str, Any], None] = lambda name, note: None
    keep_journal: bool = False


class ArchiveWriter:
    """Writes one archive beside its final place, and puts it there when it is whole.

    Use it as a context manager and call `commit()` last; leaving the block in any other way removes what was
    written, except that an interrupt (Ctrl-C) keeps a folder or a tar where `resume.wanted` says so. A process that is killed
    leaves a hidden partial and its journal; the next writer of the same target deletes or continues them.

    Args:
        path, compression_level: as `archive_format_of`; the outcome is in `.path` and `.format`.
        overwrite: replace an existing archive, at `commit()` and not before.
        needed_bytes: total to be written, when the caller knows it; checked against the free space.
        resume: makes the export one that can be continued. Then `add_all` must be given every entry, once.

    Attributes:
        digests: entry name -> `EntryDigest`, of the entries that are whole.

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
        resume: Resume | None = None,
    ) -> None:
        self.path, self.format = archive_format_of(path, compression_level)
        self.digests: dict[str, EntryDigest] = {}
        self._level = compression_level or DEFAULT_TGZ_LEVEL
        self._overwrite = overwrite
        self._needed_bytes = needed_bytes
        self._resume = self._resumable(resume)
        self._target = self.path.absolute()
        self._names: dict[str, bool] = {}
        self._damage: str | None = None
        self._journal: Journal | None = None
        self._sink: ArchiveSink | None = None
        self._staging: Staging | None = None
        check_target(self.path, overwrite)

    def __enter__(self) -> ArchiveWriter:
        if not self.path.parent.is_dir():
            raise ArchiveError(f"{self.path}: the folder {self.path.parent} does not exist.", "Create it first.")
        try:
            with self._advising():
                self._journal = self._open_journal()
                if self._needed_bytes is not None:
                    check_free_space(self.path, self._needed_bytes - occupied_bytes(self._journal.partial))
                self._sink = self._new_sink(self._journal)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        if interrupted and self._resume is not None and self._resume.wanted:
            self._keep()
        else:
            self._discard()

    def add_bytes(self, name: str, data: Buffer) -> None:
        """Add an entry whose bytes are at hand. Raises as `add_stream`."""
        self.add_stream(name, memoryview(data).nbytes, (data,))

    def add_stream(self, name: str, size: int, chunks: Iterable[Buffer]) -> None:
        """Add an entry of `size` bytes from chunks that are written as they arrive.

        Args:
            name, size: see `Entry`.
            chunks: the bytes, best in pieces of some MiB; their memory may change once the next one is asked for.

        Raises:
            ArchiveError: the name is not acceptable, or the chunks do not amount to `size`.
            DiskFullError: the disk is full.
        """
        _, sink = self._opened()
        add_name(self._names, name)
        self._damage = f"entry {name} was not completed"
        self._staging = self._staging or Staging()
        with self._advising():
            self._write(Entry(name, size, lambda: chunks), sink.place(name, size), self._staging, _nobody)
        self._damage = None

    def add_all(self, entries: Sequence[Entry], progress: Callable[[WriteProgress], None] | None = None) -> None:
        """Add many entries; where the container allows it, several are written at a time.

        Args:
            entries: in the archive's order.
            progress: told now and then how far it is, in the calling thread.

        Raises:
            ArchiveError, DiskFullError: as `add_stream`.
        """
        sizes = {entry.name: entry.size for entry in entries}
        tally = _Tally(sizes, progress)
        with self._advising():
            journal, sink = self._opened()
            for entry in entries:
                add_name(self._names, entry.name)
            self._damage = "not every entry was completed"
            sink.allocate(sizes)
            records = journal.entries
            work = [(entry, sink.place(entry.name, entry.size), records.get(entry.name)) for entry in entries]
            tally.tell()
            if sink.parallel:
                work.sort(key=lambda item: -item[0].size)  # the longest first, so that all threads end together
                WorkerThreads().run([partial(self._complete, *item, tally) for item in work], tally.tell)
            else:
                for item in work:
                    self._complete(*item, tally, None)
        tally.tell()
        self._damage = None

    def commit(self) -> None:
        """Finish the archive, flush it to the disk and give it its final name.

        Raises:
            ArchiveError: an entry failed before, there is no `graph.nnef`, or the disk refuses.
            DiskFullError: the disk is full.
            OutputExistsError: something has taken the target's name meanwhile, and `overwrite` is off.
        """
        journal, sink = self._opened()
        if GRAPH_FILE not in self._names:
            raise ArchiveError(f"{self.path}: an archive without {GRAPH_FILE} cannot be loaded.", "Add it first.")
        with self._advising():
            sink.finish()
            check_target(self._target, self._overwrite)
            put_in_place(journal.partial, self._target)
        sync_folder(self._target.parent)
        if self._resume is not None and self._resume.keep_journal:
            journal.release()
        else:
            journal.remove()
        self._sink = self._journal = None

    # --- partials -----------------------------------------------------------------------------

    def _resumable(self, resume: Resume | None) -> Resume | None:
        """Return the settings that hold for this form: a .tgz is never continued."""
        if resume is None or self.format is not ArchiveFormat.TGZ:
            return resume
        if resume.wanted:
            resume.on_lost("a .tgz is one compressed stream and cannot be continued: starting from the beginning.")
        return None

    def _open_journal(self) -> Journal:
        """Clear away what dead writers left; continue one of theirs where that is wanted and possible."""
        resume = self._resume
        wanted = resume is not None and resume.wanted
        found, strangers = None, 0
        for journal in claim_journals(self._target):
            if wanted and found is None and self._continues(journal):
                found = journal
            else:
                strangers += 1
                journal.discard()
        if resume is not None and wanted:
            if found is not None:
                resume.on_found(f"Continuing: {len(found.entries)} tensors are there, and are verified first")
            elif strangers:
                resume.on_lost(
                    "what an earlier export left behind has other weights, options or versions: starting again."
                )
            else:
                resume.on_lost("no interrupted export to continue: starting from the beginning.")
        return found or Journal.create(self._target, resume.identity if resume is not None else None)

    def _continues(self, journal: Journal) -> bool:
        """Say whether a journal is of this export, and has its partial.

        An archive that was committed with its journal becomes a partial again.
        """
        if self._resume is None or journal.identity != self._resume.identity:
            return False
        committed = self._resume.keep_journal and not os.path.lexists(journal.partial)
        if committed and os.path.lexists(self._target):
            os.rename(self._target, journal.partial)
        return os.path.lexists(journal.partial)

    def _new_sink(self, journal: Journal) -> ArchiveSink:
        """Open the container: a new one, or the partial of a journal."""
        path, existing = journal.partial, os.path.lexists(journal.partial)
        if self.format is ArchiveFormat.DIRECTORY:
            return DirectorySink(path, existing=existing)
        if self.format is ArchiveFormat.TAR:
            return TarSink(path, existing=existing)
        return TgzSink(path, self._level)

    def _keep(self) -> None:
        """Close everything, and leave the partial to an export that continues it."""
        journal, self._journal = self._journal, None
        try:
            self._close_sink()
        finally:
            if journal is not None:
                journal.release()

    def _discard(self) -> None:
        journal, self._journal = self._journal, None
        try:
            self._close_sink()
        finally:  # also when a second Ctrl-C arrives meanwhile
            if journal is not None:
                journal.discard()

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abandon()

    # --- entries ------------------------------------------------------------------------------

    def _opened(self) -> tuple[Journal, ArchiveSink]:
        if self._journal is None or self._sink is None:
            raise ArchiveError(f"{self.path}: the archive is not open.", "Write inside `with ArchiveWriter(...)`.")
        if self._damage is not None:
            raise ArchiveError(f"{self.path}: cannot go on, {self._damage}.", "Start the archive again.")
        return self._journal, self._sink

    def _complete(
        self, entry: Entry, place: EntryPlace, record: EntryRecord | None, tally: _Tally, threads: WorkerThreads | None
    ) -> None:
        """Write one of many entries, unless an earlier writer did; in one of the threads, if there are any.

        Args:
            entry, place: what to write, and where.
            record: what an earlier writer noted of it.
            tally: counts the bytes.
            threads: the threads; None in the calling thread.
        """
        tally.begin(entry.name)
        if record is not None and record.bytes == entry.size and place.holds(record.sha256):
            self.digests[entry.name] = EntryDigest(record.bytes, record.sha256)
            if self._resume is not None:
                self._resume.recall(entry.name, record.note)
            tally.add(entry.size)
        elif threads is not None:

            def written(count: int) -> None:
                threads.check()
                tally.add(count)

            self._write(entry, place, threads.own(Staging), written)
        else:
            self._staging = self._staging or Staging()
            self._write(entry, place, self._staging, tally.add_and_tell)
        tally.end()

    def _write(self, entry: Entry, place: EntryPlace, staging: Staging, written: Callable[[int], None]) -> None:
        """Write one entry at its place; `written` is told about each piece, and may raise."""
        digest, received, whole = hashlib.sha256(), 0, False
        stream = place.open(staging)
        try:
            for chunk in entry.chunks():
                data = memoryview(chunk).cast("B")
                received += len(data)
                if received > entry.size:
                    break
                digest.update(data)
                stream.write(data)
                written(len(data))
            whole = received == entry.size
        finally:
            if not whole:
                stream.abandon()
        if not whole:
            more = "at least " if received > entry.size else ""
            raise ArchiveError(
                f"{self.path}: entry {entry.name} was announced with {entry.size} bytes, got {more}{received}."
            )
        stream.close()
        self._finished(entry.name, EntryDigest(entry.size, digest.hexdigest()))

    def _finished(self, name: str, digest: EntryDigest) -> None:
        self.digests[name] = digest
        if self._journal is not None and self._resume is not None:
            self._journal.record(name, EntryRecord(digest.bytes, digest.sha256, self._resume.note(name)))

    # --- errors -------------------------------------------------------------------------------

    @contextmanager
    def _advising(self) -> Iterator[None]:
        """Turn a failed file operation into the error to tell the user."""
        try:
            yield
        except OSError as error:
            raise self._advice(error) from error

    def _advice(self, error: OSError) -> ArchiveError:
        if is_disk_full(error):
            needed = "" if self._needed_bytes is None else f" (the archive needs {self._needed_bytes} bytes)"
            return DiskFullError(
                f"{self.path}: the disk is full{needed}.",
                "Nothing was left behind; free some space or choose another output path.",
            )
        return ArchiveError(f"{self.path}: cannot be written: {error.strerror or error}.", "Nothing was left behind.")


class _Tally:
    """Counts what several threads write, for the thread that tells the user."""

    def __init__(self, sizes: Mapping[str, int], progress: Callable[[WriteProgress], None] | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._label = ""
        self._bytes = self._entries = 0
        self._total_bytes, self._total_entries = sum(sizes.values()), len(sizes)

    def begin(self, label: str) -> None:
        """An entry begins."""
        self._label = label

    def add(self, count: int) -> None:
        """Some bytes of an entry are written."""
        with self._lock:
            self._bytes += count

    def add_and_tell(self, count: int) -> None:
        """Some bytes are written in the thread that tells."""
        self.add(count)
        self.tell()

    def end(self) -> None:
        """An entry is whole."""
        with self._lock:
            self._entries += 1

    def tell(self) -> None:
        """Tell the user, who may have something to say too."""
        raise_if_interrupted()
        if self._progress is not None:
            with self._lock:
                state = WriteProgress(self._label, self._bytes, self._total_bytes, self._entries, self._total_entries)
            self._progress(state)


def _nobody(count: int) -> None:
    """Take note of nothing."""
