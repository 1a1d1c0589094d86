"""Opening safetensors checkpoints: what is there is found, what is damaged is named."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from generic_export.errors import CorruptCheckpointError, T2NError, WeightError
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.safetensors_index import DTYPES, UnreadableTensor, open_safetensors
from generic_export.weights.source import FileTensor
from tests.systems import needs_links


def as_tensor(source: FileTensor) -> torch.Tensor:
    data = bytearray(b"".join(source.chunks()))
    values = torch.frombuffer(data, dtype=source.dtype) if data else torch.empty(0, dtype=source.dtype)
    return values.reshape(source.shape)


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHTS = {"b.weight": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4).bfloat16(), "s": torch.tensor(7)}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_read_as_the_library_reads_it(tmp_path, dtype):
    save_file({"w": torch.tensor([[1, 0], [3, 100]]).to(dtype)}, tmp_path / "m.safetensors")
    source = open_safetensors(tmp_path / "m.safetensors")["w"]
    with safe_open(tmp_path / "m.safetensors", "pt") as reference:
        assert torch.equal(as_tensor(source), reference.get_tensor("w"))
    assert source.dtype is dtype


def test_names_shapes_and_metadata(tmp_path):
    save_file({**WEIGHTS, "empty": torch.empty(0, 5)}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    tensors = open_safetensors(tmp_path / "m.safetensors")
    assert set(tensors) == {*WEIGHTS, "empty"}
    assert tensors["empty"].shape == (0, 5)
    assert torch.equal(as_tensor(tensors["b.weight"]), WEIGHTS["b.weight"])


def test_a_file_without_tensors_is_valid(tmp_path):
    assert open_safetensors(raw_file(tmp_path / "m.safetensors", {})) == {}


@pytest.mark.parametrize(
    ("stored_as", "dtype", "nbytes"),
    [("F8_E4M3", torch.float8_e4m3fn, 4), ("C64", torch.complex64, 32), ("F4", torch.uint8, 2), ("F3_NEW", None, 3)],
)
def test_an_unreadable_dtype_is_listed_and_refused_only_when_read(tmp_path, stored_as, dtype, nbytes):
    header = {"x": entry(stored_as, [4], 0, nbytes), "y": entry("U8", [1], nbytes, nbytes + 1)}
    raw_file(tmp_path / "m.safetensors", header, bytes(nbytes) + b"\x07")
    tensors = open_checkpoint(tmp_path).tensors
    assert as_tensor(tensors["y"]).tolist() == [7]
    unreadable = tensors["x"]
    assert isinstance(unreadable, UnreadableTensor)
    assert (unreadable.nbytes, unreadable.dtype) == (nbytes, dtype or torch.uint8)
    with pytest.raises(WeightError, match=rf"tensor x in .*m.safetensors: stored as {stored_as}"):
        next(unreadable.chunks())


# --- damaged files ----------------------------------------------------------------------------


def test_truncation_at_any_byte_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: truncated.* bytes") as caught:
            open_safetensors(path)
        assert caught.value.hint == "Download the file again."


def test_truncated_data_says_exactly_how_much_is_missing(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-13])
    with pytest.raises(CorruptCheckpointError, match="truncated, 13 of"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not valid JSON"),
        (b'{"a": \xff}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}', "a key appears twice"),
        ({"x": 3}, "tensor x has no dtype"),
        ({"x": {"dtype": "F32"}}, "tensor x has shape None"),
        ({"x": entry("F32", [-1], 0, 4)}, "tensor x has shape"),
        ({"x": entry("F32", [True], 0, 4)}, "tensor x has shape"),
        ({"x": entry("F32", [1], 4, 0)}, "tensor x has shape"),
        ({"x": entry("F32", [2], 0, 4)}, r"tensor x of F32 \[2\] takes 4 bytes"),
        ({"x": entry("F32", [1 << 62, 1 << 62], 0, 4)}, "tensor x of F32"),
        ({"x": entry("F8_E4M3", [2], 0, 4)}, "tensor x of F8_E4M3"),
        ({"x": entry("U8", [2], 2, 4)}, "tensor x starts at byte"),
        ({"x": entry("U8", [3], 0, 3), "y": entry("U8", [2], 2, 4)}, "tensor y starts at byte"),
        ({"x": entry("U8", [3], 0, 3)}, "1 bytes follow the last tensor"),
    ],
)
def test_an_inconsistent_header_is_corrupt(tmp_path, header, message):
    path = raw_file(tmp_path / "m.safetensors", header, bytes(4))
    with pytest.raises(CorruptCheckpointError, match=message):
        open_safetensors(path)


def test_an_absurd_header_length_is_not_believed(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    with pytest.raises(CorruptCheckpointError, match="its header claims 1152921504606846976 bytes"):
        open_safetensors(tmp_path / "m.safetensors")


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
        open_checkpoint(tmp_path)


# --- against the library ----------------------------------------------------------------------


def library_reads(path: Path) -> dict[str, torch.Tensor] | None:
    """What the safetensors library makes of a file; None when it refuses."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError, UnicodeDecodeError):
        return None


def check_against_library(path: Path) -> None:
    """Never a wrong tensor: what is read here the library reads alike, and what it refuses is a named error.

    What the library alone accepts is refused by name: a key that is there twice, of which it takes the last.
    """
    expected = library_reads(path)
    try:
        tensors = open_safetensors(path)
        found = {
            name: as_tensor(source) for name, source in tensors.items() if not isinstance(source, UnreadableTensor)
        }
    except T2NError as error:
        assert str(path) in str(error)
        assert expected is None or "a key appears twice" in str(error)
        return
    unreadable = {name for name, source in tensors.items() if isinstance(source, UnreadableTensor)}
    if expected is None:
        # A dtype that the library does not know, or shapes that torch cannot hold: listed here, never made up.
        assert unreadable or all(tensor.numel() == 0 for tensor in found.values())
        return
    assert tensors.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bytes_are_read_as_the_library_reads_them_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("s") / "m.safetensors"
    save_file(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    positions = st.integers(0, header_end - 1) | st.integers(0, len(content) - 1)
    for position in data.draw(st.lists(positions, min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789,:[]{}"-'))
    path.write_bytes(content)
    check_against_library(path)


_NUMBERS = st.integers(-3, 40) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)])
_SIZES = (
    st.lists(_NUMBERS, max_size=3) | st.none() | st.lists(st.floats() | st.booleans() | st.text(max_size=2), max_size=2)
)
_NAMES = st.sampled_from(["a", "b", "__metadata__", ""]) | st.text(max_size=3)
_DTYPES = st.sampled_from([*DTYPES, "F8_E4M3", "C64", "F4", "F99", ""]) | st.none() | st.integers()
_ENTRIES = st.fixed_dictionaries(
    {}, optional={"dtype": _DTYPES, "shape": _SIZES, "data_offsets": _SIZES, "more": st.integers()}
)
_HEADERS = st.dictionaries(
    _NAMES, _ENTRIES | st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2), max_size=4
)


@settings(max_examples=400, deadline=None)
@given(header=_HEADERS, data=st.binary(max_size=48), lie=st.integers(-9, 9))
def test_invented_headers_are_read_as_the_library_reads_them_or_refused(tmp_path_factory, header, data, lie):
    path = tmp_path_factory.mktemp("s") / "m.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", max(len(text) + lie, 0) if lie > 5 else len(text)) + text + data)
    check_against_library(path)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, object], bytes]:
    """A header that is right but for one number, and its data."""
    header, end = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1)):
        dtype = draw(st.sampled_from(["U8", "I8", "F16", "BF16", "F32", "I64", "BOOL"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = entry(dtype, shape, end, end + nbytes)
        end += nbytes
    victim = header[draw(st.sampled_from(sorted(header)))]
    numbers = victim[draw(st.sampled_from(["shape", "data_offsets"]))]
    if numbers and draw(st.booleans()):
        index = draw(st.integers(0, len(numbers) - 1))
        numbers[index] += draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
    size = max(end + draw(st.sampled_from([0, 0, 0, -1, 1])), 0)
    return header, bytes(index % 2 for index in range(size))


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_overlaps_gaps_and_lies_are_read_as_the_library_reads_them_or_refused(tmp_path_factory, layout):
    path = raw_file(tmp_path_factory.mktemp("s") / "m.safetensors", *layout)
    check_against_library(path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_the_library_reads_them_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("s") / "m.safetensors"
    path.write_bytes(data)
    check_against_library(path)


# --- folders ----------------------------------------------------------------------------------


def sharded(folder: Path, index: dict[str, str] | None = None, name: str = "model") -> Path:
    save_file({"a": WEIGHTS["a"], "s": WEIGHTS["s"]}, folder / f"{name}-00001-of-00002.safetensors")
    save_file({"b.weight": WEIGHTS["b.weight"]}, folder / f"{name}-00002-of-00002.safetensors")
    weight_map = {"a": f"{name}-00001-of-00002.safetensors", "b.weight": f"{name}-00002-of-00002.safetensors"}
    weight_map["s"] = weight_map["a"]
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map | (index or {})}))
    return folder


def test_folder_with_one_file(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert checkpoint.total_bytes == 6 * 4 + 4 * 2 + 8
    assert checkpoint.tensors == open_checkpoint(tmp_path / "model.safetensors").tensors


@pytest.mark.parametrize("name", ["model", "other"])
def test_folder_with_shards(tmp_path, name):
    sharded(tmp_path, name=name)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not looked at")
    checkpoint = open_checkpoint(tmp_path)
    assert [file.name for file in checkpoint.files] == [f"{name}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for tensor_name, value in WEIGHTS.items():
        assert torch.equal(as_tensor(checkpoint.tensors[tensor_name]), value)
    assert open_checkpoint(tmp_path / f"{name}.safetensors.index.json") == checkpoint


def test_folder_with_one_file_of_another_name(tmp_path):
    save_file(WEIGHTS, tmp_path / "tiny.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(WEIGHTS)


def test_a_tensor_that_the_index_does_not_list_is_there_too(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["s"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_checkpoint(tmp_path).tensors) == set(WEIGHTS)
    save_file({"b.weight": WEIGHTS["b.weight"], "s": WEIGHTS["s"]}, tmp_path / weight_map["b.weight"])
    with pytest.raises(CorruptCheckpointError, match=r"tensor s: not listed .* several shards"):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path):
    (sharded(tmp_path) / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"00001-of-00002.safetensors: this shard is missing.* 2 tensors"):
        open_checkpoint(tmp_path)


def test_truncated_shard_is_named(tmp_path):
    shard = sharded(tmp_path) / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"00002-of-00002.safetensors: truncated, 1 of"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ghost": "model-00001-of-00002.safetensors"}, "tensor ghost: .* but no shard contains it"),
        ({"a": "model-00002-of-00002.safetensors"}, "tensor a: .* but it is in model-00001-of-00002.safetensors"),
        ({"x": "../x.safetensors"}, "lies outside the checkpoint folder"),
        ({"x": "/etc/passwd"}, "lies outside the checkpoint folder"),
        ({"x": ""}, "lies outside the checkpoint folder"),
        ({"x": 3}, "not a table of file names"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_corrupt(tmp_path, extra, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        open_checkpoint(sharded(tmp_path, extra))


_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_PLACES = st.sampled_from([*_SHARDS, "", ".", "..", "/", "./" + _SHARDS[0], "x/../" + _SHARDS[0]]) | st.text(max_size=4)


@settings(max_examples=200, deadline=None)
@given(index=st.dictionaries(st.sampled_from(["a", "b.weight", "s", "t"]), _PLACES | st.integers() | st.none()))
def test_an_invented_index_gives_the_shards_tensors_or_a_named_error(tmp_path_factory, index):
    folder = sharded(tmp_path_factory.mktemp("f"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    try:
        tensors = open_checkpoint(folder).tensors
    except T2NError as error:
        assert str(folder) in str(error)
        return
    assert index.keys() <= tensors.keys() <= WEIGHTS.keys()
    for name, source in tensors.items():
        assert torch.equal(as_tensor(source), WEIGHTS[name])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_of_an_index_are_harmless_or_a_named_error(tmp_path_factory, data):
    folder = sharded(tmp_path_factory.mktemp("f"))
    index = folder / "model.safetensors.index.json"
    content = bytearray(index.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789,:[]{}"./'))
    index.write_bytes(content)
    try:
        tensors = open_checkpoint(folder).tensors
    except T2NError as error:
        assert str(folder) in str(error)
        return
    for name, source in tensors.items():
        assert torch.equal(as_tensor(source), WEIGHTS[name])


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b'{"weight_map": []}'])
def test_a_malformed_index_is_corrupt(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.gguf"])
def test_other_formats_are_refused_with_the_way_to_convert(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(WeightError, match=r"Safetensors and torch.save files are read.*save_pretrained"):
            open_checkpoint(path)


def test_nothing_there_is_said_plainly(tmp_path):
    with pytest.raises(WeightError, match="no safetensors file in this folder"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightError, match="no such file"):
        open_checkpoint(tmp_path / "absent")


def test_ambiguous_folders_are_refused(tmp_path):
    for name in ("a", "b"):
        save_file(WEIGHTS, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightError, match="2 safetensors files"):
        open_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightError, match="several index files"):
        open_checkpoint(tmp_path)


@needs_links
def test_a_link_to_nothing_is_a_missing_download(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CorruptCheckpointError, match="a broken link"):
        open_checkpoint(tmp_path)
