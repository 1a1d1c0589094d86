"""Opening safetensors checkpoints: what is there is found, what is damaged is named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from generic_export.errors import CorruptCheckpointError, T2NError, WeightError
from generic_export.weights.safetensors_index import DTYPES, UnreadableTensor, open_checkpoint, open_safetensors
from generic_export.weights.source import FileTensor


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
    with pytest.raises(CorruptCheckpointError, match="announces a header of 1152921504606846976 bytes"):
        open_safetensors(tmp_path / "m.safetensors")


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
        open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_are_either_harmless_or_a_named_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("s") / "m.safetensors"
    save_file(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        tensors = open_safetensors(path)
    except T2NError as error:
        assert str(path) in str(error)
        return
    for tensor in tensors.values():
        assert tensor.offset + tensor.nbytes <= len(content)


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
        ({"ghost": "model-00001-of-00002.safetensors"}, "tensor ghost: .* but no shard holds it"),
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


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b'{"weight_map": []}'])
def test_a_malformed_index_is_corrupt(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_other_formats_are_refused_with_the_way_to_convert(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(WeightError, match=r"Only safetensors.*save_pretrained"):
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


def test_a_link_to_nothing_is_a_missing_download(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CorruptCheckpointError, match="links to a file that is not there"):
        open_checkpoint(tmp_path)
