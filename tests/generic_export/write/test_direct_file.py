"""Writing at positions: whatever the pieces, the alignment and the file system, the bytes are where they belong."""

import errno
import gzip
import itertools
import os
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.write import direct_file, gzip_stream
from generic_export.write.direct_file import OutputFile, Region, Staging
from generic_export.write.gzip_stream import GzipStream
from tests.systems import needs_posix

SIZE = 200_000


def write_regions(path, regions, *, allocated: bool) -> bytes:
    """Write (offset, data, piece length) each with a staging memory of two blocks; return the file."""
    file = OutputFile(path)
    if allocated:
        file.allocate(SIZE)
    staging = Staging()
    for offset, data, step in regions:
        region = Region(file, offset, staging)
        for start in range(0, len(data), step):
            region.write(memoryview(data)[start : start + step])
        region.close()
    file.truncate(SIZE)
    file.sync()
    file.close()
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    edges=st.lists(st.integers(0, SIZE), max_size=6, unique=True),
    step=st.integers(1000, 30_000),
    small=st.sampled_from([0, 20_000]),
    allocated=st.booleans(),
    reverse=st.booleans(),
)
def test_regions_side_by_side(tmp_path_factory, edges, step, small, allocated, reverse):
    expected = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    bounds = [0, *sorted(edges), SIZE]
    regions = [(a, expected[a:b], step) for a, b in itertools.pairwise(bounds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_file, "STAGING_BYTES", 8192)
        patch.setattr(direct_file, "_SMALL_BYTES", small)
        path = tmp_path_factory.mktemp("d") / "f"
        assert write_regions(path, regions[::-1] if reverse else regions, allocated=allocated) == expected


@needs_posix
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_writes(tmp_path, monkeypatch, number):
    monkeypatch.setattr(direct_file, "STAGING_BYTES", 8192)
    monkeypatch.setattr(direct_file, "_SMALL_BYTES", 0)
    pwrite, opened, refused = os.pwrite, os.open, []

    def refuse(descriptor, data, offset):
        if descriptor in refused:
            raise OSError(number, os.strerror(number))
        return pwrite(descriptor, data, offset)

    def note(path, flags, *mode):
        descriptor = opened(path, flags, *mode)
        if flags & direct_file._O_DIRECT:
            refused.append(descriptor)
        return descriptor

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(os, "open", note)
    data = os.urandom(SIZE)
    assert write_regions(tmp_path / "f", [(0, data, 50_000)], allocated=True) == data


def test_what_lies_between_regions_is_zero(tmp_path):
    data = write_regions(tmp_path / "f", [(100_000, b"x" * 5, 5)], allocated=False)
    assert data == bytes(100_000) + b"x" * 5 + bytes(SIZE - 100_005)


# --- gzip -------------------------------------------------------------------------------------


def compress(path, pieces, threads: int, monkeypatch) -> bytes:
    monkeypatch.setattr(gzip_stream, "THREADS", threads)
    file = OutputFile(path)
    stream = GzipStream(file, 2)
    for piece in pieces:
        for start in range(0, len(piece), 333_333):
            stream.write(memoryview(piece)[start : start + 333_333])
    stream.finish()
    file.close()
    return path.read_bytes()


def test_one_member_the_same_whatever_the_threads(tmp_path, monkeypatch):
    pieces = [os.urandom(1_500_000), b"", b"abc" * 700_000, b"x"]
    data, *others = [compress(tmp_path / f"{n}", pieces, n, monkeypatch) for n in (1, 2, 5)]
    assert all(other == data for other in others)
    inflater = zlib.decompressobj(31)
    assert inflater.decompress(data) == b"".join(pieces) == gzip.decompress(data)
    assert inflater.eof and not inflater.unused_data


def test_an_empty_stream_is_a_gzip_file(tmp_path, monkeypatch):
    assert gzip.decompress(compress(tmp_path / "e", [], 1, monkeypatch)) == b""
