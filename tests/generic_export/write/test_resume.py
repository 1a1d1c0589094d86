"""Folders and tars are continued: what is whole is kept, everything else is written again, and the bytes are the same.

A .tgz starts again.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.write import worker_threads
from generic_export.write.archive import ArchiveWriter, Entry, Resume, archive_format_of
from generic_export.write.journal import Journal, OwnedFile, claim_journals, journal_paths
from tests.systems import needs_posix

LEVELS = [None, 0]
TGZ = 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """One thread, so that it is known which entries come before the interrupt."""
    monkeypatch.setattr(worker_threads, "THREADS", 1)


def payload(index: int) -> bytes:
    return np.random.default_rng(index).integers(0, 60, 1_500_000 - 100_001 * index, np.uint8).tobytes()


PAYLOADS = {"graph.nnef": b"g" * 3_000_000} | {f"w/{index}.dat": payload(index) for index in range(6)}


class Export:
    """Writes the same entries each time; `stop` names the entry in which it is interrupted."""

    def __init__(self, path: Path, level: int | None) -> None:
        self.path, self.level = path, level
        self.read: list[str] = []
        self.said: list[str] = []
        self.recalled: dict[str, object] = {}

    def run(
        self,
        *,
        stop: str | None = None,
        error: type[BaseException] = KeyboardInterrupt,
        resume: bool = True,
        identity: str = "a",
        keep_journal: bool = False,
    ) -> dict[str, bytes]:
        self.read, self.said, self.recalled = [], [], {}

        def chunks(name: str) -> Callable[[], Iterator[bytes]]:
            def give() -> Iterator[bytes]:
                self.read.append(name)
                data = PAYLOADS[name]
                yield data[: len(data) // 2]
                if name == stop:
                    raise error("stop")
                yield data[len(data) // 2 :]

            return give

        entries = [Entry(name, len(data), chunks(name)) for name, data in PAYLOADS.items()]
        settings = Resume(
            identity,
            wanted=resume,
            on_found=self.said.append,
            on_lost=self.said.append,
            note=lambda name: {"of": name},
            recall=self.recalled.__setitem__,
            keep_journal=keep_journal,
        )
        overwrite = keep_journal
        with ArchiveWriter(self.path, self.level, resume=settings, overwrite=overwrite) as writer:
            writer.add_all(entries)
            writer.commit()
        self.path_written = writer.path
        return content(writer.path)


def content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(params=LEVELS, ids=["dir", "tar"])
def level(request) -> int | None:
    return request.param


@pytest.fixture
def whole(tmp_path, level) -> dict[str, bytes]:
    (tmp_path / "whole").mkdir()
    return Export(tmp_path / "whole" / "m", level).run(resume=False)


@pytest.fixture
def export(tmp_path, level, whole) -> Export:
    (tmp_path / "out").mkdir()
    export = Export(tmp_path / "out" / "m", level)
    with pytest.raises(KeyboardInterrupt):
        export.run(stop="w/3.dat")
    return export


def test_an_interrupted_archive_goes_on_where_it_was(export, whole):
    assert all(path.name.startswith(".m") for path in export.path.parent.iterdir())
    assert export.run() == whole
    assert set(export.read) == PAYLOADS.keys() - set(export.recalled)
    assert export.recalled.keys() == {"graph.nnef", "w/0.dat", "w/1.dat", "w/2.dat"}
    assert export.recalled == {name: {"of": name} for name in export.recalled}
    assert "Continuing" in export.said[0]
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_interrupted_twice(export, whole):
    with pytest.raises(KeyboardInterrupt):
        export.run(stop="w/5.dat")
    assert export.run() == whole
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_without_resume_what_was_left_is_deleted(export, whole):
    assert export.run(resume=False) == whole
    assert set(export.read) == set(PAYLOADS)
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_another_identity_starts_again_and_says_so(export, whole):
    assert export.run(identity="b") == whole
    assert set(export.read) == set(PAYLOADS)
    assert "other weights" in export.said[0]
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_nothing_to_continue_is_said(tmp_path, level):
    export = Export(tmp_path / "m", level)
    export.run()
    assert "no interrupted export" in export.said[0]


def test_an_error_leaves_nothing_even_with_resume(tmp_path, level):
    export = Export(tmp_path / "m", level)
    with pytest.raises(ValueError, match="stop"):
        export.run(stop="w/3.dat", error=ValueError)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tensor_is_written_again(export, whole):
    (partial,) = [path for path in export.path.parent.iterdir() if path.suffix != ".journal"]
    file = partial / "w" / "1.dat" if partial.is_dir() else partial
    data = bytearray(file.read_bytes())
    data[data.find(PAYLOADS["w/1.dat"][:64]) + 5] ^= 1
    file.write_bytes(data)
    assert export.run() == whole
    assert export.read.count("w/1.dat") == 1


@pytest.mark.parametrize("place", [512 + 3_000_000 + 1, -1], ids=["behind graph.nnef", "at the end"])
def test_zeros_of_a_tar_are_written_again(tmp_path, place):
    whole = Export(tmp_path / "whole" / "m", 0)
    export = Export(tmp_path / "out" / "m", 0)
    for each in (whole, export):
        each.path.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        export.run(stop="w/3.dat")
    (journal,) = claim_journals(archive_format_of(export.path, 0)[0])
    journal.release()
    data = bytearray(journal.partial.read_bytes())
    data[place] ^= 1
    journal.partial.write_bytes(data)
    assert export.run() == whole.run(resume=False)


def test_a_partial_that_is_gone_starts_again(export, whole):
    (journal,) = claim_journals(archive_format_of(export.path, export.level)[0])
    journal.release()
    journal.partial.rename(export.path.parent / "elsewhere")
    assert export.run() == whole
    assert set(export.read) == set(PAYLOADS)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), level=st.sampled_from(LEVELS))
def test_whatever_happened_to_the_files_the_result_is_right(tmp_path_factory, data, level):
    folder = tmp_path_factory.mktemp("r")
    (folder / "whole").mkdir()
    whole = Export(folder / "whole" / "m", level).run(resume=False)
    (folder / "out").mkdir()
    export = Export(folder / "out" / "m", level)
    with pytest.raises(KeyboardInterrupt):
        export.run(stop=data.draw(st.sampled_from(sorted(PAYLOADS))))
    files = sorted(path for path in export.path.parent.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    text = bytearray(file.read_bytes())
    cut = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        text = text[:cut]
    elif cut < len(text):
        text[cut] ^= data.draw(st.integers(1, 255))
    file.write_bytes(text)
    assert export.run() == whole
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_a_committed_archive_with_its_journal_is_verified_and_kept(tmp_path, level):
    export = Export(tmp_path / "m", level)
    first = export.run(keep_journal=True)
    assert len(journal_paths(export.path_written)) == 1
    assert export.run(keep_journal=True) == first
    assert export.read == []
    assert set(export.recalled) == set(PAYLOADS)


# --- tgz --------------------------------------------------------------------------------------


def test_an_interrupted_tgz_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Export(tmp_path / "m", TGZ).run(stop="w/3.dat")
    assert list(tmp_path.iterdir()) == []


def killed(export: Export, **options) -> None:
    """Run an export in a fork that dies in its fourth tensor."""
    child = os.fork()
    if not child:
        try:
            export.run(stop="w/3.dat", error=lambda _: os._exit(9), **options)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@needs_posix
@pytest.mark.parametrize("resume", [False, True])
def test_a_killed_tgz_starts_again(tmp_path, resume):
    (tmp_path / "whole").mkdir()
    whole = Export(tmp_path / "whole" / "m", TGZ).run(resume=False)
    (tmp_path / "out").mkdir()
    export = Export(tmp_path / "out" / "m", TGZ)
    killed(export, resume=resume)
    left = sorted(path.name for path in export.path.parent.iterdir())
    assert len(left) == 2 and all(name.startswith(".m.tgz.partial-") for name in left)
    assert export.run(resume=resume) == whole
    assert set(export.read) == set(PAYLOADS) and export.recalled == {}
    assert ["cannot be continued" in said for said in export.said] == [True] * resume
    assert list(export.path.parent.iterdir()) == [export.path_written]


def test_a_committed_tgz_keeps_no_journal(tmp_path):
    export = Export(tmp_path / "m", TGZ)
    first = export.run(keep_journal=True)
    assert journal_paths(export.path_written) == []
    assert export.run(keep_journal=True) == first
    assert set(export.read) == set(PAYLOADS)


# --- owners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_partial_whose_owner_lives_is_left_alone(tmp_path, level, resume):
    target = ArchiveWriter(tmp_path / "m", level).path
    living = Journal.create(target, "a")
    living.partial.write_bytes(b"theirs")
    export = Export(tmp_path / "m", level)
    export.run(resume=resume)
    assert living.partial.read_bytes() == b"theirs"
    assert len(journal_paths(target)) == 1
    living.discard()
    assert list(tmp_path.iterdir()) == [target]


def test_partials_of_other_targets_are_left_alone(tmp_path):
    for name in ("m.tar", "m.tar.partial-01234567", "n.tar"):
        journal = Journal.create(tmp_path / name, "a")
        journal.partial.write_bytes(b"x")
        journal.release()
    Export(tmp_path / "m", 0).run(resume=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 5  # the archive, and two of the three partials with their journals
    assert sum(name.startswith(".m.tar.partial-01234567.partial-") for name in left) == 2


def test_a_file_is_owned_by_one(tmp_path):
    owned = OwnedFile.create(tmp_path / "f")
    assert OwnedFile.claim(tmp_path / "f") is None
    owned.release()
    again = OwnedFile.claim(tmp_path / "f")
    assert again is not None
    assert OwnedFile.claim(tmp_path / "nothing") is None
    again.release()


@needs_posix
def test_a_file_that_was_renamed_is_not_in_its_place(tmp_path):
    again = OwnedFile.create(tmp_path / "f")
    os.rename(tmp_path / "f", tmp_path / "g")
    assert not again.is_in_place()
    again.release()
