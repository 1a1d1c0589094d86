"""The readers of foreign files that scripts/fuzz.py fuzzes, and what it is to survive an input.

In: bytes, as a fuzzer makes them. Out: nothing, or what went wrong. A reader survives when it returns or raises an error of
generic_export.errors, within seconds. Checksums that would hide the reader from a fuzzer are made good first.
"""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PROJECT = Path(__file__).resolve().parent.parent
CORPORA = PROJECT / "tests" / "faults" / "corpus"
SLOW_SECONDS = 5.0
_TAR_BLOCK = 512


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        name: what it is called on the command line, and the folder of its corpus.
        file: name of the file that is written.
        read: is given the path of that file, in a folder of its own.
        modules: packages and modules of ours whose branches guide the fuzzer.
        dressed: bytes of the fuzzer -> bytes of the file.
        largest: bytes of an input.
    """

    name: str
    file: str
    read: Callable[[Path], object]
    modules: tuple[str, ...]
    dressed: Callable[[bytes], bytes] = bytes
    largest: int = 4096


@dataclass(frozen=True)
class Finding:
    """An input that a reader did not survive.

    Attributes:
        error: class of the exception, or "slow".
        place: file and line of ours where it came from, by which findings are told apart.
        detail: the message.
    """

    error: str
    place: str
    detail: str


def judge(reader: Reader, data: bytes, folder: Path) -> Finding | None:
    """Let a reader read an input; return what was wrong with that, None when it survived.

    Args:
        reader: which one.
        data: the input.
        folder: for its files; the reader's own file is replaced, the others are left.
    """
    from generic_export.errors import T2NError

    path = folder / reader.file
    path.write_bytes(reader.dressed(data))
    started = time.monotonic()
    try:
        reader.read(path)
    except T2NError as error:
        if "\n" in error.message or len(error.message) > 2000:
            return Finding("long message", type(error).__name__, error.message[:200])
    except Exception as error:
        return Finding(type(error).__name__, _place(error.__traceback__), str(error)[:200])
    seconds = time.monotonic() - started
    return Finding("slow", reader.name, f"{seconds:.1f} s") if seconds > SLOW_SECONDS else None


def _place(trace: TracebackType | None) -> str:
    ours = [frame for frame in traceback.extract_tb(trace) if Path(frame.filename).is_relative_to(PROJECT)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"


# --- files whose checksums are made good ------------------------------------------------------


def whole_tar(data: bytes) -> bytes:
    """Return bytes with the checksum of every block that calls itself a header of a tar as it should be."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - _TAR_BLOCK + 1, _TAR_BLOCK):
        block = blocks[start : start + _TAR_BLOCK]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(blocks)


def whole_gzip(data: bytes) -> bytes:
    """Return the tar of some bytes as a gzip file."""
    return gzip.compress(whole_tar(data), 1)


def whole_safetensors(data: bytes) -> bytes:
    """Return JSON as the header of a safetensors file with 64 bytes of values; other bytes are taken as they are."""
    return len(data).to_bytes(8, "little") + data + bytes(64) if data[:1] == b"{" else data


def whole_torch_zip(data: bytes) -> bytes:
    """Return a file of `torch.save` that has these bytes for its pickle, and four storages of 64 bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", b"little")
        for number in range(4):
            archive.writestr(f"a/data/{number}", bytes(64))
        archive.writestr("a/version", b"3\n")
    return made.getvalue()


def whole_npz(data: bytes) -> bytes:
    """Return a zip file of entries that are cut apart where the bytes say NUMPY's name; other bytes are taken as they are."""
    parts = data.split(b"\x93NUMPY")
    if len(parts) < 2:
        return data
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number, part in enumerate(parts[1:5]):
            archive.writestr(f"turn_{number}/x.npy", b"\x93NUMPY" + part)
    return made.getvalue()


# --- what reads them --------------------------------------------------------------------------


def _read_safetensors(path: Path) -> None:
    from generic_export.weights.safetensors_index import open_safetensors

    _read_all(open_safetensors(path))


def _read_all(tensors: Mapping[str, object]) -> None:
    from generic_export.weights.source import TensorSource

    for tensor in tensors.values():
        assert isinstance(tensor, TensorSource)
        for chunk in tensor.chunks():
            zlib.crc32(chunk)


def _read_checkpoint(path: Path) -> None:
    from generic_export.weights.checkpoint import open_checkpoint

    shard = path.with_name("a.safetensors")
    if not shard.exists():
        header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        shard.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    open_checkpoint(path)


def _read_torch(path: Path) -> None:
    from generic_export.weights.torch_file import open_torch_file

    _read_all(open_torch_file(path))


def _read_gguf(path: Path) -> None:
    from quant.prequantized import open_gguf
    from t2n_llm.source.limits import refuse_counts

    file = open_gguf(path)
    refuse_counts(path.name, file.numbers, 1000)
    _read_all({name: tensor.source(name) for name, tensor in file.tensors.items()})


def _read_archive(path: Path) -> None:
    from generic_export.errors import T2NError
    from generic_export.read.contents import read_contents
    from generic_export.read.reading import read_graph_text, unpack

    unpacked = path.with_name("unpacked")
    readings: tuple[Callable[[Path], object], ...] = (read_contents, read_graph_text, lambda p: unpack(p, unpacked))
    refused: T2NError | None = None
    try:
        for read in readings:
            try:
                read(path)
            except T2NError as error:  # what one refuses another may take
                refused = error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    if refused is not None:
        raise refused


def _read_dat(path: Path) -> None:
    from generic_export.errors import T2NError
    from generic_export.nnef.dat import read_block_dat, read_dat

    try:
        read_dat(path)
    except T2NError:
        read_block_dat(path)


def _read_graph(path: Path) -> None:
    from generic_export.read.outline import module_paths, read_outline
    from generic_export.read.reading import signature_of

    text = path.read_bytes().decode("utf-8", errors="replace")
    read_outline(text)
    module_paths(text)
    signature_of(text)


def _read_recipe(path: Path) -> None:
    from quant.recipe import TensorName, choose, read_recipe

    names = [TensorName(f"model.layers.{layer}.mlp.up_proj.weight", "@linears") for layer in range(3)]
    choose(read_recipe(path, ("search", "min_max")), names)


def _read_imatrix(path: Path) -> None:
    from quant.imatrix import load_imatrix

    load_imatrix(path, "llama", 2)


def _read_own_imatrix(path: Path) -> None:
    from quant.imatrix import load_imatrix

    load_imatrix(path)


def _read_npz(path: Path) -> None:
    from generic_export.inference_target.tract.engines.npz_bundle import read_turns

    read_turns(path)


def _read_manifest(path: Path) -> None:
    from t2n_llm.export.folder import archive_in, read_manifest
    from t2n_llm.export.verify import verify_export

    archive = path.with_name("model.nnef.tar")
    if not archive.exists():
        archive.write_bytes(bytes(10240))
    archive_in(path.parent, read_manifest(path.parent))
    verify_export(path.parent)


_WEIGHTS, _READ = "generic_export.weights", "generic_export.read"
READERS = {
    reader.name: reader
    for reader in (
        Reader("safetensors", "model.safetensors", _read_safetensors, (_WEIGHTS,), dressed=whole_safetensors),
        Reader("index", "model.safetensors.index.json", _read_checkpoint, (_WEIGHTS,)),
        Reader("torch", "model.bin", _read_torch, (_WEIGHTS, "zipfile")),
        Reader(
            *("torch-pickle", "model.bin", _read_torch),
            (_WEIGHTS, "torch._weights_only_unpickler"),
            dressed=whole_torch_zip,
        ),
        Reader("gguf", "model.gguf", _read_gguf, ("quant.prequantized", "gguf.gguf_reader")),
        Reader("tar", "model.nnef.tar", _read_archive, (_READ, "tarfile"), dressed=whole_tar, largest=16384),
        Reader("tgz", "model.nnef.tgz", _read_archive, (_READ, "tarfile"), dressed=whole_gzip, largest=16384),
        Reader("dat", "tensor.dat", _read_dat, ("generic_export.nnef",)),
        Reader("graph", "graph.nnef", _read_graph, (_READ,)),
        Reader("recipe", "recipe.yaml", _read_recipe, ("quant.recipe", "yaml")),
        Reader("imatrix", "imatrix.dat", _read_imatrix, ("quant.imatrix", "gguf.gguf_reader")),
        Reader("own-imatrix", "a.imatrix.safetensors", _read_own_imatrix, ("quant.imatrix",)),
        Reader(
            *("npz", "io.npz", _read_npz),
            ("generic_export.inference_target.tract.engines.npz_bundle", "zipfile", "numpy.lib._format_impl"),
            dressed=whole_npz,
        ),
        Reader("manifest", "export.json", _read_manifest, ("t2n_llm.export",)),
    )
}


def make_importable() -> None:
    """Put the project first on the path of modules."""
    if str(PROJECT) not in sys.path:
        sys.path.insert(0, str(PROJECT))
