"""Files of torch.save: what is there is found without being read, what is unsafe or damaged is named."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import CorruptCheckpointError, T2NError, WeightError
from generic_export.weights import FileTensor, InMemoryTensor, UnreadableTensor, open_checkpoint, open_torch_file
from generic_export.weights.safetensors_index import DTYPES
from tests.systems import needs_links

ROOT = Path(__file__).resolve().parents[3]
BASE = torch.arange(24.0).reshape(4, 6)
WEIGHTS = {
    "plain": BASE,
    "shared rows": BASE[1:3],
    "transposed": BASE.t(),
    "strided": BASE[:, ::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "parameter": torch.nn.Parameter(torch.arange(5).bfloat16()),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 5),
    "one": BASE[2:3, 3:4],
}


def as_tensor(source) -> torch.Tensor:
    data = bytearray(b"".join(source.chunks()))
    assert len(data) == source.nbytes
    values = torch.frombuffer(data, dtype=source.dtype) if data else torch.empty(0, dtype=source.dtype)
    return values.reshape(source.shape)


def save(path: Path, content: object, *, legacy: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


legacies = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


@legacies
def test_every_layout_has_its_values(tmp_path, legacy):
    sources = open_torch_file(save(tmp_path / "m.pt", WEIGHTS, legacy=legacy))
    assert list(sources) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert (sources[name].name, sources[name].shape, sources[name].dtype) == (name, tensor.shape, tensor.dtype)
        assert torch.equal(as_tensor(sources[name]), tensor), name


# torch writes these in its old format and cannot read them back itself (UntypedStorage has no dtype).
_WRITE_ONLY = (torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize(
    ("dtype", "legacy"),
    [*((dtype, False) for dtype in DTYPES.values()), *((d, True) for d in DTYPES.values() if d not in _WRITE_ONLY)],
    ids=str,
)
def test_every_dtype(tmp_path, legacy, dtype):
    tensor = torch.tensor([[1, 0], [3, 100]]).to(dtype)
    (source,) = open_torch_file(save(tmp_path / "m.bin", {"w": tensor}, legacy=legacy)).values()
    assert torch.equal(as_tensor(source), tensor)


def test_a_contiguous_tensor_of_a_zip_file_is_a_region_of_it(tmp_path):
    path = save(tmp_path / "m.pt", WEIGHTS)
    sources = open_torch_file(path)
    plain, rows = sources["plain"], sources["shared rows"]
    assert isinstance(plain, FileTensor)
    assert path.read_bytes()[plain.offset : plain.offset + plain.nbytes] == BASE.numpy().tobytes()
    assert rows.offset == plain.offset + 6 * 4  # the storage is shared, as in the model that was saved
    assert isinstance(sources["transposed"], InMemoryTensor)


def test_a_zip_file_that_another_tool_compressed(tmp_path):
    save(tmp_path / "m.pt", WEIGHTS)
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as old,
        zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for name, source in open_torch_file(tmp_path / "c.pt").items():
        assert torch.equal(as_tensor(source), WEIGHTS[name]), name


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@legacies
def test_what_has_no_plain_bytes_is_listed_and_refused_when_read(tmp_path, legacy):
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    content = {"sparse": torch.eye(2).to_sparse(), "quantised": quantised, "w": torch.ones(2)}
    sources = open_torch_file(save(tmp_path / "m.pt", content, legacy=legacy))
    assert as_tensor(sources["w"]).tolist() == [1, 1]
    for name, kind in (("sparse", "sparse_coo"), ("quantised", "quint8")):
        assert isinstance(sources[name], UnreadableTensor)
        with pytest.raises(WeightError, match=f"tensor {name} in .*m.pt: stored as {kind}"):
            next(sources[name].chunks())


# --- which dict is the state dict -------------------------------------------------------------

STATE = OrderedDict(w=torch.ones(2, 2), b=torch.zeros(2))


@legacies
@pytest.mark.parametrize(
    "content",
    [
        STATE,
        {**STATE, "epoch": 3, "name": "x", "nothing": None},
        {"state_dict": STATE, "epoch": 3},
        {"model": STATE, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}},
        {"checkpoint": {"model": {"weights": STATE}}},
        {"model": STATE, "step": torch.tensor(5)},
        {"model": STATE, "counters": {"step": torch.tensor(5)}},
    ],
    ids=["flat", "flat with values", "state_dict", "optimizer", "deep", "scalar beside", "dict of scalars beside"],
)
def test_the_one_dict_of_tensors_is_found(tmp_path, content, legacy):
    sources = open_torch_file(save(tmp_path / "m.pt", content, legacy=legacy))
    assert list(sources) == ["w", "b"]
    assert torch.equal(as_tensor(sources["w"]), STATE["w"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": STATE, "ema": {"shadow": STATE}}, r"tensors in 2 dicts \(model, ema\.shadow\)"),
        ({"w": torch.ones(2), "ema": STATE}, r"tensors in 2 dicts \(the file itself, ema\)"),
        (torch.ones(2), "one tensor without a name"),
        ([torch.ones(2)], "no named tensors"),
        ({0: torch.ones(2)}, "no named tensors"),
        ({}, "no named tensors"),
        (3, "no named tensors"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path, content, message):
    with pytest.raises(WeightError, match=message):
        open_torch_file(save(tmp_path / "m.pt", content))


def test_a_dict_that_contains_itself(tmp_path):
    content = {"w": torch.ones(2)}
    content["me"] = content
    with pytest.raises(WeightError, match="tensors in 9 dicts"):
        open_torch_file(save(tmp_path / "m.pt", content))


# --- unsafe files -----------------------------------------------------------------------------


class Attack:
    """Unpickling it runs a command that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle2", "pickle4", "pickle5"])
def test_an_unsafe_pickle_is_refused_and_not_run(tmp_path, form):
    content, path = {"w": torch.ones(2), "x": Attack(tmp_path / "ran")}, tmp_path / "pytorch_model.bin"
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(content["x"], int(form[-1])))
    else:
        save(path, content, legacy=form == "legacy")
    for opened in (path, tmp_path):
        with pytest.raises(WeightError, match=r"pytorch_model\.bin: refused, .* posix\.system") as caught:
            open_checkpoint(opened)
        assert not isinstance(caught.value, CorruptCheckpointError)
        assert "save_file" in caught.value.hint
    assert not (tmp_path / "ran").exists()


@legacies
def test_a_whole_module_is_refused_by_the_name_of_its_class(tmp_path, legacy):
    path = save(tmp_path / "m.pt", torch.nn.Linear(2, 2), legacy=legacy)
    with pytest.raises(WeightError, match=r"torch\.nn\.modules\.linear\.Linear") as caught:
        open_torch_file(path)
    assert "state_dict()" in caught.value.hint


# --- damaged files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"P", b"hello world, this is no pickle", b"PK\x03\x04", b"\x80\x02.", b"\x80\x02}q\x00.", bytes(1000)],
    ids=["empty", "one byte", "text", "start of a zip", "nothing pickled", "an empty dict", "zeros"],
)
def test_what_torch_never_wrote(tmp_path, content):
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(WeightError, match=r"m\.pt: "):
        open_torch_file(tmp_path / "m.pt")


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "m.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
        open_checkpoint(tmp_path)


@legacies
def test_truncation_anywhere_is_noticed(tmp_path, legacy):
    path = save(tmp_path / "m.pt", {"w": BASE, "b": torch.ones(300)}, legacy=legacy)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=r"m\.pt: damaged PyTorch file"):
            open_torch_file(path)


@needs_links
def test_missing_files_and_folders(tmp_path):
    with pytest.raises(WeightError, match="no such file"):
        open_checkpoint(tmp_path / "m.pt")
    (tmp_path / "m.pt").symlink_to(tmp_path / "gone")
    with pytest.raises(CorruptCheckpointError, match="a broken link"):
        open_torch_file(tmp_path / "m.pt")
    (tmp_path / "d.pt").mkdir()
    with pytest.raises(WeightError, match="cannot be read"):
        open_torch_file(tmp_path / "d.pt")


def rewritten(path: Path, change) -> Path:
    """Write a zip file anew, with its pickle changed and its checksums right."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in entries.items():
            new.writestr(name, change(name, data))
    return path


@pytest.mark.parametrize(
    ("entry", "before", "after"),
    [
        ("data.pkl", b"K\x18tq", b"K\x19tq"),  # a storage of 25 floats, where 24 are stored
        ("data.pkl", b"K\x04K\x06\x86", b"K\x09K\x06\x86"),  # a shape beyond the storage
        ("data.pkl", b"K\x06K\x01\x86", b"K\xffK\x01\x86"),  # strides beyond it
        ("data.pkl", b"FloatStorage", b"DoubleStorage"),
        ("data.pkl", b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        ("byteorder", b"little", b"big"),
    ],
)
def test_a_pickle_that_lies_is_not_believed(tmp_path, entry, before, after):
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(entry):
            return data
        assert before in data
        return data.replace(before, after, 1)

    with pytest.raises(WeightError, match=r"m\.pt"):
        open_torch_file(rewritten(save(tmp_path / "m.pt", {"w": BASE}), change))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_flipped_bytes_are_either_harmless_or_a_named_error(tmp_path_factory, data, legacy):
    """Never a crash, never bytes of another tensor; values have no checksum that is read here."""
    weights = {"w": BASE, "t": BASE.t(), "b": torch.arange(7)}
    path = save(tmp_path_factory.mktemp("t") / "m.pt", weights, legacy=legacy)
    content = bytearray(path.read_bytes())
    # Files of the old format hold addresses, whose number of digits varies: their length must not steer the drawing.
    for position in data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=3)):
        content[position % len(content)] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        for source in open_torch_file(path).values():
            assert len(b"".join(source.chunks())) == source.nbytes <= len(content) * 8
    except T2NError as error:
        assert str(path) in str(error)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_mutated_pickle_with_right_checksums_is_harmless_or_a_named_error(tmp_path_factory, data):
    path = save(tmp_path_factory.mktemp("t") / "m.pt", {"w": BASE, "t": BASE.t(), "b": torch.arange(7)})

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        mutated = bytearray(content)
        for position in data.draw(st.lists(st.integers(0, len(mutated) - 1), min_size=1, max_size=3)):
            mutated[position] = data.draw(st.integers(0, 255))
        return bytes(mutated)

    rewritten(path, change)
    size = path.stat().st_size
    try:
        sources = open_torch_file(path)
    except T2NError as error:
        assert str(path) in str(error)
        return
    for source in sources.values():
        if isinstance(source, FileTensor) and not isinstance(source, UnreadableTensor):
            assert source.offset + source.nbytes <= size


# --- folders ----------------------------------------------------------------------------------


def test_a_folder_of_shards(tmp_path):
    save(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": STATE["w"]})
    save(tmp_path / "pytorch_model-00002-of-00002.bin", {"b": STATE["b"]}, legacy=True)
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in (tmp_path, index):
        checkpoint = open_checkpoint(path)
        assert [file.name for file in checkpoint.files] == sorted(weight_map.values())
        assert checkpoint.total_bytes == 16 + 8
        assert torch.equal(as_tensor(checkpoint.tensors["b"]), STATE["b"])
    del checkpoint  # it holds its files open
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"00002-of-00002\.bin: this shard is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_a_folder_with_one_file_and_what_a_trainer_left(tmp_path, name):
    save(tmp_path / name, STATE)
    for other in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (tmp_path / other).write_bytes(b"not looked at")
    assert list(open_checkpoint(tmp_path).tensors) == ["w", "b"]
    assert list(open_checkpoint(tmp_path / name).tensors) == ["w", "b"]


def test_a_folder_with_several_files(tmp_path):
    for name in ("a.pt", "b.pt"):
        save(tmp_path / name, STATE)
    with pytest.raises(WeightError, match=r"2 PyTorch files \(a.pt, b.pt\) and no pytorch_model.bin.index.json"):
        open_checkpoint(tmp_path)


# --- memory -----------------------------------------------------------------------------------

_STREAM = """
import resource, sys
from pathlib import Path
from generic_export.weights import open_torch_file
open_torch_file(Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(source,) = open_torch_file(Path(sys.argv[1])).values()
done = sum(len(chunk) for chunk in source.chunks())
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_a_large_tensor_takes_little_memory(tmp_path):
    save(tmp_path / "small.pt", STATE)
    save(tmp_path / "m.pt", {"w": torch.zeros(256 << 20, dtype=torch.uint8)})
    command = [sys.executable, "-c", _STREAM, str(tmp_path / "m.pt"), str(tmp_path / "small.pt")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    streamed, grown = map(int, result.stdout.split())
    assert streamed == 256 << 20
    assert grown < 80 * 1024


@pytest.mark.parametrize("alignment", [b"0", b"00", b"", b"-64", b"9" * 30])
def test_an_alignment_that_torch_would_divide_by_is_refused(alignment, tmp_path):
    save(tmp_path / "m.pt", {"w": torch.ones(4), "v": torch.ones(4)})
    with zipfile.ZipFile(tmp_path / "m.pt") as old, zipfile.ZipFile(tmp_path / "bad.pt", "w") as new:
        for entry in old.infolist():
            is_alignment = entry.filename.endswith("/.storage_alignment")
            new.writestr(entry.filename, alignment if is_alignment else old.read(entry))
    with pytest.raises(CorruptCheckpointError, match="aligned to"):
        open_torch_file(tmp_path / "bad.pt")


def test_an_entry_that_announces_more_than_it_can_hold_is_refused(tmp_path):
    """torch sets the memory aside that the directory of the zip announces: 4 GB for a file of 1 kB."""
    save(tmp_path / "m.pt", {"w": torch.ones(4)})
    data = bytearray((tmp_path / "m.pt").read_bytes())
    directory = data.index(b"PK\x01\x02", data.rindex(b"/version") - 46)
    data[directory + 24 : directory + 28] = (0xFF000000).to_bytes(4, "little")
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="claims 4,278,190,080 bytes"):
        open_torch_file(tmp_path / "m.pt")
