"""Archives: the three containers, exact entries, and nothing left behind when anything fails."""

import errno
import gzip
import hashlib
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tarfile
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError
from generic_export.nnef import dat
from generic_export.write import gzip_stream, output_path, worker_threads
from generic_export.write.archive import ArchiveFormat, ArchiveWriter, archive_format_of, check_free_space
from generic_export.write.sinks import tar_header
from tests.systems import needs_links, needs_posix

LEVELS = [None, 0, 5]


def write(path: Path, level: int | None, entries: dict[str, bytes], **options) -> Path:
    with ArchiveWriter(path, level, **options) as writer:
        for name, data in entries.items():
            writer.add_bytes(name, data)
        writer.commit()
    return writer.path


def read(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}


@pytest.mark.parametrize(
    ("path", "level", "expected", "form"),
    [
        ("model.nnef", None, "model.nnef", ArchiveFormat.DIRECTORY),
        ("model.nnef", 0, "model.nnef.tar", ArchiveFormat.TAR),
        ("model.nnef", 5, "model.nnef.tgz", ArchiveFormat.TGZ),
        ("out/model", 0, "out/model.tar", ArchiveFormat.TAR),
        ("model-1.5", 9, "model-1.5.tgz", ArchiveFormat.TGZ),
        ("model.tar", 0, "model.tar", ArchiveFormat.TAR),
        ("model.tar", None, "model.tar", ArchiveFormat.TAR),
        ("model.nnef.tgz", 1, "model.nnef.tgz", ArchiveFormat.TGZ),
        ("model.tar.gz", 9, "model.tar.gz", ArchiveFormat.TGZ),
        ("model.tgz", None, "model.tgz", ArchiveFormat.TGZ),
    ],
)
def test_suffix_and_level_decide_the_form(path, level, expected, form):
    assert archive_format_of(path, level) == (Path(expected), form)


@pytest.mark.parametrize(
    ("path", "level"),
    [("m.tar", 1), ("m.tgz", 0), ("m.tar.gz", 0), ("m", 10), ("m", -1), ("m", True), ("m", 1.0), ("..", 0), ("/", 0)],
)
def test_contradictions_and_bad_levels_are_refused(path, level):
    with pytest.raises(OptionError):
        archive_format_of(path, level)


@pytest.mark.parametrize("level", LEVELS)
def test_entries_come_back_byte_for_byte(tmp_path, level):
    entries = {
        "graph.nnef": b"version 1.0;\n",
        "w.dat": bytes(range(256)) * 700,
        "a/b.c/d e.dat": b"",
        "é" * 60 + "/" + "long" * 30 + ".dat": b"x" * 513,
        "README.md": b"y" * 512,
    }
    path = write(tmp_path / "m.nnef", level, entries)
    assert read(path) == entries
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("level", LEVELS)
def test_everything_is_flushed_to_the_disk_before_it_is_there(tmp_path, monkeypatch, level):
    flushed, flush, (path, _) = {}, os.fsync, archive_format_of(tmp_path / "m", level)

    def fsync(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and not path.exists():
            flushed[status.st_ino] = status.st_size
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    entries = {"graph.nnef": b"version 1.0;\n", "w.dat": bytes(3_000_000), "a/b.dat": b"x"}
    write(tmp_path / "m", level, entries)
    files = [file for file in path.rglob("*") if file.is_file()] if level is None else [path]
    assert len(files) == (3 if level is None else 1)
    assert all(flushed.get(file.stat().st_ino) == file.stat().st_size for file in files)


@pytest.mark.parametrize("level", LEVELS)
def test_a_stream_of_uneven_chunks_is_one_entry(tmp_path, level):
    data = os.urandom(3_000_001)
    with ArchiveWriter(tmp_path / "m", level) as writer:
        writer.add_bytes("graph.nnef", bytearray(b"g"))
        writer.add_stream("w.dat", len(data), (memoryview(data)[i : i + 700_001] for i in range(0, len(data), 700_001)))
        writer.commit()
    assert read(writer.path)["w.dat"] == data


@pytest.mark.parametrize("level", [0, 1, 6])
def test_same_entries_give_the_same_file_whatever_the_time_and_the_threads(tmp_path, monkeypatch, level):
    entries = {"graph.nnef": b"g", "w.dat": bytes(range(256)) * 20_000}
    digests = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(gzip_stream, "THREADS", threads)
        monkeypatch.setattr(worker_threads, "THREADS", threads)
        path = write(tmp_path / f"m{threads}", level, entries)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_tar_is_plain_gnu_without_owner_or_time(tmp_path):
    with tarfile.open(write(tmp_path / "m", 0, {"graph.nnef": b"g"})) as tar:
        member = tar.getmember("graph.nnef")
    assert (member.mtime, member.uid, member.gid, member.mode, member.uname) == (0, 0, 0, 0o644, "")
    assert (tmp_path / "m.tar").stat().st_size % tarfile.RECORDSIZE == 0


def test_tgz_is_one_gzip_stream_that_the_standard_library_reads(tmp_path):
    path = write(tmp_path / "m", 9, {"graph.nnef": b"g" * 5_000_000})
    assert path.stat().st_size < 100_000
    assert len(gzip.decompress(path.read_bytes())) > 5_000_000


def test_header_of_an_entry_above_8_gib_is_a_tar_header():
    header = tarfile.TarInfo.frombuf(tar_header("w.dat", 9 * 2**30), "utf-8", "strict")
    assert (header.name, header.size) == ("w.dat", 9 * 2**30)


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("", "/w.dat", "a//b", "a/", "../w", "a/../b", ".hidden", "a/.b/c", "./w", "a\0b", "sub/graph.nnef"),
        *("graph.nnef", "taken", "taken/below", "folder", "\ud800"),
    ],
)
def test_a_name_that_tract_would_lose_or_confuse_is_refused(tmp_path, name):
    with ArchiveWriter(tmp_path / "m", 0) as writer:
        for taken in ("graph.nnef", "taken", "folder/w.dat"):
            writer.add_bytes(taken, b"")
        with pytest.raises(ArchiveError, match="archive entry"):
            writer.add_bytes(name, b"")
        writer.commit()
    assert set(read(writer.path)) == {"graph.nnef", "taken", "folder/w.dat"}


@pytest.mark.parametrize("names", [("W.dat", "w.dat"), ("layer/a.dat", "Layer/b.dat")])
def test_a_disk_that_ignores_case_takes_no_two_names_for_one(tmp_path, monkeypatch, names):
    entries = dict.fromkeys(("graph.nnef", *names), b"")
    if not output_path._ignores_case(tmp_path):
        assert set(read(write(tmp_path / "both.nnef", None, entries))) == set(entries)
    monkeypatch.setattr(output_path, "_ignores_case", lambda folder: True)
    with pytest.raises(ArchiveError, match="one name on this disk"):
        write(tmp_path / "one.nnef", None, entries)
    assert not (tmp_path / "one.nnef").exists()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab./\0é "), max_size=6), max_size=8), st.sampled_from([None, 0]))
def test_accepted_names_are_exactly_the_names_in_the_archive(tmp_path_factory, names, level):
    accepted = {"graph.nnef": b""}
    with ArchiveWriter(tmp_path_factory.mktemp("a") / "m", level) as writer:
        writer.add_bytes("graph.nnef", b"")
        for name in names:
            try:
                writer.add_bytes(name, name.encode())
            except ArchiveError:
                continue
            accepted[name] = name.encode()
        writer.commit()
    assert read(writer.path) == accepted


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("chunks", "got"), [([b"abc"], "got 3"), ([b"abc", b"de"], "got at least 5"), ([], "got 0")])
def test_a_stream_of_another_length_is_refused_and_spoils_the_archive(tmp_path, level, chunks, got):
    with ArchiveWriter(tmp_path / "m", level) as writer:
        writer.add_bytes("graph.nnef", b"g")
        with pytest.raises(ArchiveError, match=f"entry w.dat was announced with 4 bytes, {got}"):
            writer.add_stream("w.dat", 4, chunks)
        with pytest.raises(ArchiveError, match=r"entry w.dat was not completed"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_stream_leaves_nothing(tmp_path, level, kind):
    def chunks():
        yield bytes(1_000_000)
        raise kind("stop")

    with pytest.raises(kind, match="stop"), ArchiveWriter(tmp_path / "m", level) as writer:
        writer.add_bytes("graph.nnef", b"g")
        writer.add_stream("w.dat", 2_000_000, chunks())
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with ArchiveWriter(tmp_path / "m", 0) as writer:
        writer.add_bytes("graph.nnef", b"g")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_without_a_graph_is_not_committed(tmp_path):
    with ArchiveWriter(tmp_path / "m") as writer, pytest.raises(ArchiveError, match=r"without graph.nnef"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_is_used_inside_its_block_only(tmp_path):
    writer = ArchiveWriter(tmp_path / "m", 0)
    with pytest.raises(ArchiveError, match="not open"):
        writer.add_bytes("graph.nnef", b"g")
    with writer:
        writer.add_bytes("graph.nnef", b"g")
        writer.commit()
        with pytest.raises(ArchiveError, match="not open"):
            writer.add_bytes("w.dat", b"")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ArchiveError, match=r"the folder .*absent does not exist"), ArchiveWriter(tmp_path / "absent/m"):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_an_existing_target_is_untouched_without_overwrite(tmp_path, level):
    path = write(tmp_path / "m", level, {"graph.nnef": b"old"})
    with pytest.raises(OutputExistsError):
        ArchiveWriter(tmp_path / "m", level)
    assert read(path) == {"graph.nnef": b"old"}


@pytest.mark.parametrize("level", LEVELS)
def test_a_target_that_appears_meanwhile_is_untouched(tmp_path, level):
    with ArchiveWriter(tmp_path / "m", level) as writer:
        writer.add_bytes("graph.nnef", b"new")
        writer.path.write_bytes(b"theirs")
        with pytest.raises(OutputExistsError):
            writer.commit()
    assert writer.path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [writer.path]


@pytest.mark.parametrize("level", LEVELS)
def test_overwrite_swaps_at_commit_and_not_before(tmp_path, level):
    path = write(tmp_path / "m", level, {"graph.nnef": b"old", "w.dat": b"1"})
    with ArchiveWriter(tmp_path / "m", level, overwrite=True) as writer:
        writer.add_bytes("graph.nnef", b"new")
        assert read(path)["graph.nnef"] == b"old"
        writer.commit()
    assert read(path) == {"graph.nnef": b"new"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_overwrite_keeps_the_old_archive(tmp_path, level):
    path = write(tmp_path / "m", level, {"graph.nnef": b"old"})
    with pytest.raises(ArchiveError), ArchiveWriter(tmp_path / "m", level, overwrite=True) as writer:
        writer.add_bytes("graph.nnef", b"new")
        writer.add_stream("w.dat", 2, [b"1"])
    assert read(path) == {"graph.nnef": b"old"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_swap_of_folders_puts_the_old_one_back(tmp_path, monkeypatch):
    path = write(tmp_path / "m", None, {"graph.nnef": b"old"})
    rename = os.rename

    def fail_on_the_new_one(source, target):
        if ".partial-" in Path(source).name:
            raise PermissionError(errno.EACCES, "not allowed")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_on_the_new_one)
    monkeypatch.setattr(output_path, "exchange", lambda *_: False)  # a file system that cannot
    with pytest.raises(ArchiveError, match="not allowed"):
        write(tmp_path / "m", None, {"graph.nnef": b"new"}, overwrite=True)
    assert read(path) == {"graph.nnef": b"old"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("old", "new"), [(None, 0), (0, None)])
def test_a_folder_and_a_file_replace_each_other(tmp_path, old, new):
    place = tmp_path / "m.tar"
    write(tmp_path / "old", old, {"graph.nnef": b"old"}).rename(place)
    if new is None:
        place = place.rename(tmp_path / "m")
    write(place, new, {"graph.nnef": b"new"}, overwrite=True)
    assert read(place) == {"graph.nnef": b"new"}
    assert list(tmp_path.iterdir()) == [place]


@needs_links
def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    other = write(tmp_path / "other", None, {"graph.nnef": b"theirs"})
    (tmp_path / "m").symlink_to(other)
    write(tmp_path / "m", None, {"graph.nnef": b"new"}, overwrite=True)
    assert read(other) == {"graph.nnef": b"theirs"}
    assert not (tmp_path / "m").is_symlink()


def test_overwrite_never_deletes_a_folder_that_is_no_archive(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputExistsError, match="no NNEF archive"):
        ArchiveWriter(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_full_disk_is_reported_and_left_as_it_was(small_disk, level):
    (small_disk / "before").write_bytes(b"x")
    data = os.urandom(1_000_000)  # does not compress
    full = pytest.raises(DiskFullError, match=r"/disk/m.*: the disk is full.*free some space")
    with full, ArchiveWriter(small_disk / "m", level) as writer:
        writer.add_bytes("graph.nnef", b"g")
        for i in range(10):
            writer.add_stream(f"{i}.dat", len(data), [data])
        writer.commit()
    assert [file.name for file in small_disk.iterdir()] == ["before"]


def test_space_is_checked_before_anything_is_written(small_disk):
    full = pytest.raises(DiskFullError, match=r"/disk/m.tar: needs 8000000 bytes, \d+ are free")
    with full, ArchiveWriter(small_disk / "m", 0, needed_bytes=8_000_000):
        pass
    assert list(small_disk.iterdir()) == []
    check_free_space(small_disk / "not" / "yet" / "there", 1_000_000)


@needs_posix
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.ENOSPC, DiskFullError, r"the disk is full \(the archive needs 1234 bytes\)"),
        (errno.EDQUOT, DiskFullError, "the disk is full"),
        (errno.EIO, ArchiveError, "cannot be written: Input/output error"),
    ],
)
def test_an_error_of_the_writer_thread_reaches_the_caller(tmp_path, monkeypatch, level, number, error, message):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(error, match=message), ArchiveWriter(tmp_path / "m", level, needed_bytes=1234) as writer:
        monkeypatch.setattr(os, "pwrite", fail)
        writer.add_bytes("graph.nnef", b"g")
        writer.add_stream("w.dat", 200 << 20, (memoryview(bytes(1 << 20)) for _ in range(200)))
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def write_without_end(path: Path, level: int | None, began: Event) -> None:
    def chunks():
        yield bytes(1 << 20)
        began.set()
        while True:
            yield bytes(1 << 10)

    with ArchiveWriter(path, level, overwrite=True) as writer:
        writer.add_bytes("graph.nnef", b"new")
        writer.add_stream("w.dat", 1 << 32, chunks())


@needs_posix
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_killed_writer_never_shows_half_an_archive(tmp_path, level, name):
    number = getattr(signal, name)
    target, _ = archive_format_of(tmp_path / "m", level)
    if name == "SIGINT":
        write(tmp_path / "m", level, {"graph.nnef": b"old"})
    fork = multiprocessing.get_context("fork")
    began = fork.Event()
    child = fork.Process(target=write_without_end, args=(tmp_path / "m", level, began))
    child.start()
    try:
        assert began.wait(30)
        os.kill(child.pid, number)
        child.join(30)
        assert child.exitcode == (-number if name == "SIGKILL" else 1)
    finally:
        child.kill()
    if name == "SIGKILL":
        assert not target.exists()
        left = list(tmp_path.iterdir())
        assert left and all(file.name.startswith(".m") for file in left)
        assert read(write(tmp_path / "m", level, {"graph.nnef": b"next"})) == {"graph.nnef": b"next"}
    else:
        assert read(target) == {"graph.nnef": b"old"}
    assert list(tmp_path.iterdir()) == [target]


# --- the engine -------------------------------------------------------------------------------

_RUN_IN_TRACT = """
import sys, numpy, tract
model = tract.nnef().load(sys.argv[1])
outputs = model.into_runnable().run([numpy.zeros(1, numpy.float32)])
numpy.savez(sys.argv[2], *[output.to_numpy() for output in outputs])
"""


@pytest.mark.parametrize("level", LEVELS)
def test_tract_reads_every_element_type_from_every_container(tmp_path, level):
    pytest.importorskip("numpy")
    values = {
        str(element.dtype).removeprefix("torch."): torch.tensor([[1, 0, 7], [100, 1, 0]]).to(element.dtype)
        for element in dat.ELEMENT_TYPES
    }
    values |= {
        "scalar": torch.tensor(-3.5),
        "rank8": torch.arange(6.0).reshape(1, 1, 2, 1, 3, 1, 1, 1),
        "empty": torch.empty(0, 3),
    }
    variables = "".join(
        f'  v_{name} = variable<scalar>(label="lay.er/{name}", shape={list(value.shape)});\n'
        for name, value in values.items()
    )
    outputs = ", ".join(f"v_{name}" for name in values)
    graph = f"version 1.0;\n\ngraph net(x) -> ({outputs}) {{\n  x = external<scalar>(shape=[1]);\n{variables}}}\n"
    with ArchiveWriter(tmp_path / "m.nnef", level) as writer:
        writer.add_bytes("graph.nnef", graph.encode())
        for name, value in values.items():
            payload = value.reshape(-1).view(torch.uint8).numpy().data
            header = dat.header_bytes(value.shape, value.dtype)
            writer.add_stream(f"lay.er/{name}.dat", dat.dat_size(value.shape, value.dtype), [header, payload])
        writer.commit()
    command = [sys.executable, "-c", _RUN_IN_TRACT, str(writer.path), str(tmp_path / "out.npz")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "No module named 'tract'" in result.stderr:
        pytest.skip("the tract wheel is not installed")
    assert result.returncode == 0, result.stderr
    import numpy

    loaded = numpy.load(tmp_path / "out.npz")
    for index, (name, value) in enumerate(values.items()):
        output = torch.from_numpy(loaded[f"arr_{index}"])
        assert (output.dtype, output.shape) == (value.dtype, value.shape), name
        assert torch.equal(output, value), name
