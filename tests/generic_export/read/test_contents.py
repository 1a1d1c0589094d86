"""Archives looked at from outside: what is read, how little of it, and that damage is always a typed error."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generic_export.errors import ArchiveError, TensorFormatError
from generic_export.nnef.dat import BLOCK_BITS, HEADER_BYTES, TRACT_VENDOR, DatHeader, header_bytes
from generic_export.read.contents import StoredTensor, read_contents
from generic_export.write.archive import ArchiveFormat, ArchiveWriter

GRAPH = "version 1.0;\ngraph net(x) -> (y) { x = external<scalar>(shape=[1]); y = copy(x); }\n"
FORMS = {"model": ArchiveFormat.DIRECTORY, "model.nnef.tar": ArchiveFormat.TAR, "model.nnef.tgz": ArchiveFormat.TGZ}
LONG_NAME = "blocks/" + "a.very.long.module.path." * 8 + "weight"  # beyond the 100 characters of a tar header
SLOW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dat(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return header_bytes(tensor.shape, tensor.dtype) + data


def block_dat(shape: tuple[int, ...], item_type: int, size: int) -> bytes:
    return DatHeader(shape, size, item_type, BLOCK_BITS, TRACT_VENDOR).pack() + bytes(size)


def entries() -> dict[str, bytes]:
    return {
        "graph.nnef": GRAPH.encode(),
        "half.dat": dat(torch.zeros(3, 5, dtype=torch.float16)),
        f"{LONG_NAME}.dat": dat(torch.zeros(2, dtype=torch.int64)),
        "flag.dat": dat(torch.zeros((), dtype=torch.bool)),
        "empty.dat": dat(torch.zeros(0, 4)),
        "quantised.dat": block_dat((4, 64), 0x3040, 4 * 64 // 32 * 18),
        "config.json": b"{}",
    }


def write(path: Path, files: dict[str, bytes]) -> Path:
    with ArchiveWriter(path) as archive:
        for name, data in files.items():
            archive.add_bytes(name, data)
        archive.commit()
    return path


def tar_bytes(files: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_tells_the_same(tmp_path: Path, name: str) -> None:
    contents = read_contents(write(tmp_path / name, entries()))
    assert contents.format is FORMS[name]
    assert contents.graph_text == GRAPH
    assert contents.other_files == (("config.json", 2),)
    assert {tensor.label: tensor for tensor in contents.tensors} == {
        "half": StoredTensor("half", (3, 5), "f16", 30),
        LONG_NAME: StoredTensor(LONG_NAME, (2,), "i64", 16),
        "flag": StoredTensor("flag", (), "bool", 1),
        "empty": StoredTensor("empty", (0, 4), "f32", 0),
        "quantised": StoredTensor("quantised", (4, 64), "q4_0", 144),
    }


def test_bits_per_value_count_the_scales() -> None:
    assert StoredTensor("w", (4, 64), "q4_0", 144).bits_per_value == 4.5
    assert StoredTensor("w", (3, 5), "f16", 30).bits_per_value == 16
    assert StoredTensor("w", (0, 4), "f32", 0).bits_per_value == 0


def test_pax_headers_and_a_leading_dot_are_read(tmp_path: Path) -> None:
    path = tmp_path / "archive"  # no suffix: the content decides, as in tract
    path.write_bytes(tar_bytes({f"./{name}": data for name, data in entries().items()}, tarfile.PAX_FORMAT))
    assert len(read_contents(path).tensors) == 5


def test_hidden_files_are_not_tensors_just_as_for_tract(tmp_path: Path) -> None:
    files = {"graph.nnef": GRAPH.encode(), ".cache/w.dat": b"not a tensor"}
    path = tmp_path / "model.tar"
    path.write_bytes(tar_bytes(files))
    contents = read_contents(path)
    assert (contents.tensors, contents.other_files) == ((), ((".cache/w.dat", 12),))


@pytest.mark.parametrize("name", FORMS)
def test_tensor_data_never_lies_in_memory_or_on_the_disk(tmp_path: Path, name: str) -> None:
    large = torch.zeros(16 << 20, dtype=torch.float16)
    path = write(tmp_path / name, {"graph.nnef": GRAPH.encode(), "w.dat": dat(large)})
    before = sorted(tmp_path.rglob("*"))
    tracemalloc.start()
    contents = read_contents(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert contents.tensors[0].data_bytes == 32 << 20
    assert peak < 8 << 20
    assert sorted(tmp_path.rglob("*")) == before


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.nnef.tar", "model.nnef.tgz"])
@SLOW
@given(data=st.data())
def test_an_archive_cut_short_is_an_archive_error(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / name
    if not path.exists():
        write(path, entries())
    whole = path.read_bytes()
    # A tar is whole once its last file is; only zeros follow. tract asks for no more either.
    needed = len(whole) if name.endswith("tgz") else len(whole.rstrip(b"\0"))
    cut = tmp_path / f"cut-{name}"
    cut.write_bytes(whole[: data.draw(st.integers(0, needed - 1))])
    with pytest.raises(ArchiveError):
        read_contents(cut)


@SLOW
@given(data=st.data())
def test_flipped_bytes_are_noticed_in_a_tgz(tmp_path: Path, data: st.DataObject) -> None:
    whole = gzip.compress(tar_bytes(entries()), mtime=0)
    place = data.draw(st.integers(10, len(whole) - 1))  # behind the gzip header, whose fields mean nothing here
    damaged = tmp_path / "damaged.tgz"
    damaged.write_bytes(whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :])
    try:
        contents = read_contents(damaged)
    except ArchiveError:
        return
    # Another way to write the same bytes: a copy of zeros from elsewhere among zeros.
    assert gzip.decompress(damaged.read_bytes()) == tar_bytes(entries())
    assert len(contents.tensors) == 5


@SLOW
@given(data=st.data())
def test_flipped_bytes_in_a_tar_are_an_archive_error_or_none(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(tar_bytes(entries()))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=8)):
        whole[place] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(whole)
    try:
        contents = read_contents(damaged)
    except ArchiveError:
        return
    assert contents.graph_text  # a tar has no checksum over its data


@SLOW
@given(garbage=st.binary(max_size=4096), gzipped=st.booleans())
def test_garbage_is_an_archive_error(tmp_path: Path, garbage: bytes, gzipped: bool) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(gzip.compress(garbage) if gzipped else garbage)
    with pytest.raises(ArchiveError):
        read_contents(path)


def test_a_damaged_header_in_the_middle_does_not_end_the_archive(tmp_path: Path) -> None:
    whole = bytearray(tar_bytes(entries()))
    second = 512 + 512  # behind graph.nnef
    whole[second + 150] ^= 0xFF
    path = tmp_path / "model.tar"
    path.write_bytes(whole)
    with pytest.raises(ArchiveError, match="bad header"):
        read_contents(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x4e\xef", "128 bytes long"),
        (b"GGUF" + bytes(200), "not an NNEF .dat"),
        (dat(torch.zeros(8))[:-1], "contains 31 bytes of values, but its header says 32"),
        (dat(torch.zeros(8)) + b"\0", "contains 33 bytes"),
        (block_dat((4, 64), 0x3040, 143), "says 143 bytes of q4_0"),
        (block_dat((4, 48), 0x3040, 108), "a multiple of 32 values"),
        (block_dat((2, 33), 0x3080, 72), "says 72 bytes of q8_1"),
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_a_malformed_tensor_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = write(tmp_path / name, {"graph.nnef": GRAPH.encode(), "layers.0.w.dat": data})
    with pytest.raises(TensorFormatError, match=message) as caught:
        read_contents(path)
    assert "layers.0.w.dat" in caught.value.message


def test_an_unknown_element_code_is_shown_not_refused(tmp_path: Path) -> None:
    header = bytearray(header_bytes((4,), torch.float32))
    struct.pack_into("<H", header, 48, 0x77)
    path = write(tmp_path / "model", {"graph.nnef": GRAPH.encode(), "w.dat": bytes(header) + bytes(16)})
    assert read_contents(path).tensors[0].dtype == "unknown(0x0, 0x77, 0x20)"


def test_a_graph_that_is_no_text_or_claims_to_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "model.tar"
    path.write_bytes(tar_bytes({"graph.nnef": b"\xff\xfe\x00"}))
    with pytest.raises(ArchiveError, match="not UTF-8"):
        read_contents(path)
    huge = tarfile.TarInfo("graph.nnef")
    huge.size = 1 << 40
    path.write_bytes(huge.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ArchiveError, match=r"claims \d+ bytes"):
        read_contents(path)


def test_what_is_no_archive_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no such archive"):
        read_contents(tmp_path / "nothing")
    with pytest.raises(ArchiveError, match=r"no graph\.nnef"):
        read_contents(tmp_path)
    path = tmp_path / "deep.tar"
    path.write_bytes(tar_bytes({"model/graph.nnef": GRAPH.encode()}))
    with pytest.raises(ArchiveError, match="nested too deeply"):
        read_contents(path)


@pytest.mark.skipif(
    getattr(os, "geteuid", int)() == 0, reason="root reads everything, and so does everybody on Windows"
)
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.tar", entries())
    path.chmod(0)
    with pytest.raises(ArchiveError, match="Permission denied"):
        read_contents(path)


def test_a_file_that_shrank_under_a_folder_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "model", entries())
    os.truncate(path / "half.dat", HEADER_BYTES + 7)
    with pytest.raises(TensorFormatError, match="contains 7 bytes"):
        read_contents(path)
