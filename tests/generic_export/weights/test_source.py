"""Tensor sources: the bytes of the tensor, in order, and never all at once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights import source as source_module
from generic_export.weights.source import FileTensor, InMemoryTensor, TensorSource

ROOT = Path(__file__).parents[3]


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def joined(source: TensorSource) -> bytes:
    return b"".join(source.chunks())


@pytest.fixture(params=[48, 16 * 1024 * 1024])
def chunk_bytes(request, monkeypatch) -> int:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", request.param)
    return request.param


_BASE = torch.arange(2 * 3 * 4 * 5)
TENSORS = {
    "contiguous": _BASE.float().reshape(6, 20),
    "bf16": _BASE.bfloat16(),
    "bool": (_BASE % 3 == 0).reshape(4, 30),
    "f8": _BASE.float().to(torch.float8_e4m3fn),
    "transposed": _BASE.float().reshape(6, 20).T,
    "permuted": _BASE.half().reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
    "strided": _BASE.double()[::3],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 37),
    "narrowed": _BASE.int().reshape(4, 30)[:, 3:17],
    "one": _BASE.float()[::7][3:4],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "conjugated": torch.complex(_BASE.float(), -_BASE.float()).conj(),
    "parameter": torch.nn.Parameter(torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_in_memory_streams_its_values_in_c_order(name, chunk_bytes):
    source = InMemoryTensor(name, TENSORS[name])
    assert isinstance(source, TensorSource)
    assert (source.shape, source.dtype) == (tuple(TENSORS[name].shape), TENSORS[name].dtype)
    chunks = list(source.chunks())
    expected = as_bytes(TENSORS[name].detach())
    assert b"".join(chunks) == expected == joined(source)
    assert source.nbytes == len(expected)
    assert all(0 < len(chunk) <= chunk_bytes and len(chunk) % source.dtype.itemsize == 0 for chunk in chunks)


def test_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(4)
    (chunk,) = InMemoryTensor("w", tensor).chunks()
    tensor[0] = 1.0
    assert bytes(chunk[:4]) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_tensor_without_plain_values_is_refused(tensor):
    with pytest.raises(WeightError, match="tensor w"):
        InMemoryTensor("w", tensor)


@pytest.fixture
def file_tensor(tmp_path) -> FileTensor:
    (tmp_path / "data.bin").write_bytes(b"??" + as_bytes(TENSORS["contiguous"]) + b"!")
    return FileTensor("w", tmp_path / "data.bin", 2, (6, 20), torch.float32)


def test_file_region_streams_exactly_its_bytes(file_tensor, chunk_bytes):
    assert isinstance(file_tensor, TensorSource)
    chunks = list(file_tensor.chunks())
    assert b"".join(chunks) == as_bytes(TENSORS["contiguous"]) == joined(file_tensor)
    assert file_tensor.nbytes == 480
    assert all(len(chunk) <= chunk_bytes for chunk in chunks)


def test_chunks_of_a_file_stay_valid_after_the_next_one_is_asked_for(file_tensor, monkeypatch):
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 48)
    stream = file_tensor.chunks()
    first = next(stream)
    before = bytes(first)
    next(stream)
    assert bytes(first) == before


@pytest.mark.parametrize("missing", [1, 47, 48, 100, 480])
def test_short_file_is_corrupt_and_says_how_much_is_missing(file_tensor, chunk_bytes, missing):
    file_tensor.path.write_bytes(file_tensor.path.read_bytes()[: 482 - missing])
    with pytest.raises(CorruptCheckpointError, match=rf"tensor w: .*data.bin ends {missing} bytes before"):
        joined(file_tensor)


def test_missing_file_and_unreadable_file_are_reported(file_tensor):
    file_tensor.path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tensor w: .*data.bin no longer exists"):
        joined(file_tensor)
    file_tensor.path.mkdir()
    with pytest.raises(WeightError, match="tensor w: cannot read"):
        joined(file_tensor)


_EXPORT = """
import resource, sys, torch
from itertools import chain
from pathlib import Path
from generic_export.write.archive import ArchiveWriter
from generic_export.nnef.dat import dat_size, header_bytes
from generic_export.weights.source import FileTensor
from quant import CastReport, cast_tensor
shape = (200, 1 << 20)
source = cast_tensor(FileTensor("w", Path(sys.argv[1]), 0, shape, torch.bfloat16), torch.float16, CastReport())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with ArchiveWriter(sys.argv[2], 0) as writer:
    writer.add_bytes("graph.nnef", b"")
    chunks = chain([header_bytes(shape, torch.float16)], source.chunks())
    writer.add_stream("w.dat", dat_size(shape, torch.float16), chunks)
    writer.commit()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_streaming_a_large_tensor_takes_little_memory(tmp_path):
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(400 << 20)
    command = [sys.executable, "-c", _EXPORT, str(tmp_path / "w.bin"), str(tmp_path / "m")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    (tmp_path / "m.tar").unlink()
    assert int(result.stdout) < 250 * 1024
