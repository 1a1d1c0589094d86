"""Every reader of foreign files with the inputs of its corpus, what fuzzing found among them, and inputs that took hours."""

from __future__ import annotations

import gzip
import json
import tarfile
import time
from pathlib import Path

import pytest

from generic_export.errors import ArchiveError, T2NError
from generic_export.read.entries import archive_entries
from generic_export.read.outline import read_outline
from generic_export.weights.safetensors_index import open_safetensors
from tests.load_script import load_script

fuzz_readers = load_script("fuzz_readers")
INPUTS = [(name, path) for name in fuzz_readers.READERS for path in sorted((fuzz_readers.CORPORA / name).iterdir())]


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_an_input_of_the_corpus(name: str, path: Path, tmp_path: Path) -> None:
    reader = fuzz_readers.READERS[name]
    finding = fuzz_readers.judge(reader, path.read_bytes(), tmp_path)
    assert finding is None or finding.error == "slow", finding  # a busy machine is slow
    assert path.stat().st_size <= reader.largest


@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_a_corpus_has_whole_files(name: str, tmp_path: Path) -> None:
    """Where all inputs were refused at once, a fuzzer would see little of the reader."""
    reader = fuzz_readers.READERS[name]
    read = 0
    for number, path in enumerate(path for reader_name, path in INPUTS if reader_name == name):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / reader.file).write_bytes(reader.dressed(path.read_bytes()))
        try:
            reader.read(folder / reader.file)
        except T2NError:
            continue
        read += 1
    assert read


def test_what_is_no_error_of_ours_is_a_finding(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        raise KeyError(path.name)

    finding = fuzz_readers.judge(fuzz_readers.Reader("bad", "a", read, ()), b"x", tmp_path)
    assert finding.error == "KeyError" and finding.place.startswith("test_readers.py:")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [int("9" * 4000)] * 1000, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [int("9" * 4300), int("9" * 4300)]},
    ],
)
def test_sizes_of_thousands_of_digits(entry: dict[str, object], tmp_path: Path) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    started = time.process_time()
    with pytest.raises(T2NError, match="tensor w has shape") as caught:
        open_safetensors(tmp_path / "a.safetensors")
    assert time.process_time() - started < 20 and len(caught.value.message) < 500


def test_a_graph_of_nothing_that_is_understood() -> None:
    started = time.process_time()
    outline = read_outline("\n y = a;" * 30_000)
    assert [outline.unknown[0].line, outline.unknown[-1].line] == [2, 30_001]
    assert time.process_time() - started < 20  # quadratic: minutes


def test_a_file_of_a_terabyte_in_an_archive_of_bytes(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("graph.nnef")
    entry.size = 1 << 40
    (tmp_path / "m.tgz").write_bytes(gzip.compress(entry.tobuf(tarfile.GNU_FORMAT)))
    with pytest.raises(ArchiveError, match="in the middle of a file"):
        list(archive_entries(tmp_path / "m.tgz"))


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [(tarfile.GNUTYPE_SPARSE, 1 << 40, "is sparse"), (tarfile.REGTYPE, -1024, "a file of -1024 bytes")],
)
def test_an_entry_that_would_be_read_for_ever(kind: bytes, size: int, said: str, tmp_path: Path) -> None:
    entry = tarfile.TarInfo("graph.nnef")
    entry.type, entry.size = kind, size
    (tmp_path / "m.tar").write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ArchiveError, match=said):
        list(archive_entries(tmp_path / "m.tar"))
