"""Checkpoints to `.dat` files and tensors: complete, exact, and nothing half-written."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from generic_export import export_tensors_from_disk_to_nnef, export_tensors_to_nnef, iter_torch_tensors_from_disk
from generic_export.errors import (
    ArchiveError,
    CorruptCheckpointError,
    DiskFullError,
    OptionError,
    OutputExistsError,
    TensorFormatError,
    WeightError,
)
from generic_export.nnef.dat import ELEMENT_TYPES, MAX_DATA_BYTES, read_dat
from generic_export.weights import source as source_module
from tests.systems import needs_posix

if sys.platform != "win32":
    import resource

WEIGHTS = {
    "model.layers.0.weight": torch.arange(12.0).reshape(3, 4),
    "model.layers.0.bias": torch.tensor([1.5, -2.0]).half(),
    "ids": torch.arange(5),
    "scalar": torch.tensor(True),
    "empty": torch.empty(0, 3),
}
DAT_DTYPES = [element.dtype for element in ELEMENT_TYPES]


def saved(path: Path, tensors: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=path.stem != "legacy")
    return path


@pytest.fixture(params=["m.safetensors", "m.pt", "m.bin", "legacy.pth"])
def store(request, tmp_path) -> Path:
    """A checkpoint, in each kind of file."""
    return saved(tmp_path / request.param)


def check_same(written: dict[str, torch.Tensor], folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Compare what an export says it wrote, and the files, with the tensors."""
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (read_dat(folder / f"{name}.dat"), written[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor), name


# --- what comes out ---------------------------------------------------------------------------


def test_every_tensor_of_a_checkpoint_becomes_a_file(store, tmp_path):
    written = export_tensors_from_disk_to_nnef(store, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(f"{name}.dat" for name in WEIGHTS)
    check_same(written, tmp_path / "out", WEIGHTS)


def test_every_tensor_of_a_checkpoint_is_read(store):
    found = dict(iter_torch_tensors_from_disk(str(store)))
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_what_is_read_is_the_callers_own(store):
    first = dict(iter_torch_tensors_from_disk(store))["model.layers.0.weight"]
    first.zero_()
    assert torch.equal(
        dict(iter_torch_tensors_from_disk(store))["model.layers.0.weight"], WEIGHTS["model.layers.0.weight"]
    )


def test_tensors_in_memory(tmp_path):
    tensors = {**WEIGHTS, "transposed": torch.arange(6.0).reshape(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2))}
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    check_same(export_tensors_to_nnef(tensors, tmp_path / "out"), tmp_path / "out", plain)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("dtype", DAT_DTYPES, ids=str)
def test_every_dtype_of_the_format(tmp_path, dtype, suffix):
    tensors = {"w": torch.tensor([[1, 0], [3, 100]]).to(dtype)}
    store = saved(tmp_path / f"m.{suffix}", tensors)
    check_same(export_tensors_from_disk_to_nnef(store, tmp_path / "disk"), tmp_path / "disk", tensors)
    check_same(export_tensors_to_nnef(tensors, tmp_path / "memory"), tmp_path / "memory", tensors)


def test_names_with_slashes_are_folders(tmp_path):
    tensors = {"a/b/w": torch.ones(2), "a/v": torch.ones(1)}
    check_same(export_tensors_to_nnef(tensors, tmp_path / "out"), tmp_path / "out", tensors)
    assert (tmp_path / "out" / "a" / "b" / "w.dat").is_file()


def test_a_folder_and_the_order_of_its_checkpoint(tmp_path):
    (tmp_path / "store").mkdir()
    saved(tmp_path / "store" / "model.safetensors")
    written = export_tensors_from_disk_to_nnef(tmp_path / "store", tmp_path / "out")
    assert list(written) == [name for name, _ in iter_torch_tensors_from_disk(tmp_path / "store")]
    check_same(written, tmp_path / "out", WEIGHTS)


def test_dtypes_that_nnef_lacks_can_still_be_read(tmp_path):
    tensors = {"f8": torch.ones(3).to(torch.float8_e4m3fn), "c": torch.ones(2, dtype=torch.complex64)}
    for store in (saved(tmp_path / "m.safetensors", tensors), saved(tmp_path / "m.pt", tensors)):
        found = dict(iter_torch_tensors_from_disk(store))
        assert all(found[name].dtype is tensor.dtype for name, tensor in tensors.items())
        assert torch.equal(found["f8"].float(), tensors["f8"].float())
        assert torch.equal(found["c"], tensors["c"])


# --- selection --------------------------------------------------------------------------------


def test_a_filter_selects_by_name(store, tmp_path):
    written = export_tensors_from_disk_to_nnef(store, tmp_path / "out", filter_key=lambda name: "layers" in name)
    assert list(written) == ["model.layers.0.weight", "model.layers.0.bias"] or store.suffix == ".safetensors"
    layers = {name: tensor for name, tensor in WEIGHTS.items() if "layers" in name}
    check_same(written, tmp_path / "out", layers)
    assert [name for name, _ in iter_torch_tensors_from_disk(store, lambda name: name == "ids")] == ["ids"]


def test_the_check_sees_the_tensors_before_anything_is_written(store, tmp_path):
    seen = []

    def check(tensors):
        seen.extend(tensors)
        assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in tensors.items())
        return not (tmp_path / "out").exists()

    export_tensors_from_disk_to_nnef(store, tmp_path / "out", lambda name: name != "ids", check)
    assert sorted(seen) == sorted(WEIGHTS.keys() - {"ids"})


def test_a_check_that_says_nothing_agrees(store, tmp_path):
    assert export_tensors_from_disk_to_nnef(store, tmp_path / "out", fn_check_found_tensors=lambda names: None)


def test_a_check_that_says_no_stops(store, tmp_path):
    with pytest.raises(WeightError, match=r"rejected the tensors .0 found"):
        export_tensors_from_disk_to_nnef(store, tmp_path / "out", lambda name: False, lambda names: "w" in names)
    assert not (tmp_path / "out").exists()


def test_a_check_may_raise_an_error_of_its_own(store, tmp_path):
    def check(names):
        raise LookupError("no head")

    with pytest.raises(LookupError, match="no head"):
        export_tensors_from_disk_to_nnef(store, tmp_path / "out", fn_check_found_tensors=check)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [3, [1.0], None])
def test_what_is_no_tensor_is_named(tmp_path, value):
    with pytest.raises(WeightError, match="tensor w: is a"):
        export_tensors_to_nnef({"w": value}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("location", ["meta", "cuda:99", "nowhere", 3.5])
def test_a_device_that_is_not_there(store, tmp_path, location):
    for call in (
        lambda: iter_torch_tensors_from_disk(store, map_location=location),
        lambda: export_tensors_from_disk_to_nnef(store, tmp_path / "out", map_location=location),
    ):
        with pytest.raises(OptionError, match="map_location"):
            call()


# --- bf16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "memory"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16])
@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(-60000, 60000, width=32), max_size=20))
def test_bf16_becomes_what_is_asked(tmp_path_factory, suffix, wanted, values):
    folder = tmp_path_factory.mktemp("d")
    tensors = {"w": torch.tensor(values, dtype=torch.float32).bfloat16(), "ids": torch.arange(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "CHUNK_BYTES", 6)
        if suffix == "memory":
            written = export_tensors_to_nnef(tensors, folder / "out", bfloat16_as=wanted)
        else:
            store = saved(folder / f"m.{suffix}", tensors)
            written = export_tensors_from_disk_to_nnef(store, folder / "out", bfloat16_as=wanted)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    converted = {**tensors, "w": tensors["w"].to(wanted)}
    check_same(converted, folder / "out", converted)


def test_bf16_that_nobody_asked_to_convert_is_refused_by_name(tmp_path):
    store = saved(tmp_path / "m.safetensors", {"a": torch.ones(1), "model.w": torch.ones(2).bfloat16()})
    with pytest.raises(TensorFormatError, match=r"tensor model\.w: bfloat16 .* cast it to float16 or float32"):
        export_tensors_from_disk_to_nnef(store, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors"]


def test_bf16_beyond_f16_is_refused_by_name_and_leaves_nothing(tmp_path):
    tensors = {"a": torch.ones(4), "w": torch.tensor([1.0, -1e6, float("inf")]).bfloat16()}
    with pytest.raises(WeightError, match=r"tensor w: values up to 9.99e\+05 do not fit float16.*torch\.float32"):
        export_tensors_to_nnef(tensors, tmp_path / "out", bfloat16_as=torch.float16)
    assert os.listdir(tmp_path) == []


def test_infinities_of_bf16_stay(tmp_path):
    tensors = {"w": torch.tensor([float("inf"), float("-inf"), float("nan")]).bfloat16()}
    export_tensors_to_nnef(tensors, tmp_path / "out", bfloat16_as=torch.float16)
    assert str(read_dat(tmp_path / "out" / "w.dat").tolist()) == "[inf, -inf, nan]"


def test_another_form_of_bf16_does_not_exist(tmp_path):
    with pytest.raises(OptionError, match=r"bfloat16_as=torch\.int8"):
        export_tensors_to_nnef(WEIGHTS, tmp_path / "out", bfloat16_as=torch.int8)


# --- what has no form -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), "tensor model.w: complex64"),
        (torch.ones(2).to(torch.float8_e5m2), "tensor model.w: float8_e5m2"),
        (torch.ones((1,) * 9), "tensor model.w: rank 9"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "memory"])
def test_what_the_format_lacks_is_refused_by_name(tmp_path, tensor, message, suffix):
    tensors = {"a": torch.ones(1), "model.w": tensor}
    with pytest.raises(TensorFormatError, match=message):
        if suffix == "memory":
            export_tensors_to_nnef(tensors, tmp_path / "out")
        else:
            export_tensors_from_disk_to_nnef(saved(tmp_path / f"m.{suffix}", tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_values_are_refused_by_name(tmp_path, tensor):
    with pytest.raises(WeightError, match="tensor w"):
        export_tensors_to_nnef({"w": tensor}, tmp_path / "out")


def test_a_sparse_tensor_in_a_file_is_refused_by_name(tmp_path):
    store = saved(tmp_path / "m.pt", {"w": torch.eye(2).to_sparse(), "v": torch.ones(1)})
    with pytest.raises(WeightError, match=r"tensor w in .* sparse_coo"):
        export_tensors_from_disk_to_nnef(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    written = export_tensors_from_disk_to_nnef(store, tmp_path / "out", lambda name: name == "v")
    check_same(written, tmp_path / "out", {"v": torch.ones(1)})


def test_4_gib_is_too_much(tmp_path):
    huge = torch.empty(1, dtype=torch.uint8).expand(MAX_DATA_BYTES + 1)
    with pytest.raises(TensorFormatError, match=r"tensor w: .* split it along its first axis"):
        export_tensors_to_nnef({"w": huge}, tmp_path / "out")


@pytest.mark.parametrize("name", ["../w", "/w", "a//w", "", ".w", "a/.w", "w\0", "\ud800", "a/../w"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ArchiveError, match=r"not a name for a \.dat file"):
        export_tensors_to_nnef({name: torch.ones(1)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_name_longer_than_the_disk_allows(tmp_path):
    with pytest.raises(ArchiveError, match="cannot be written"):
        export_tensors_to_nnef({"w" * 300: torch.ones(1)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# --- targets ----------------------------------------------------------------------------------


def test_files_that_are_there_are_not_touched_when_so_asked(tmp_path):
    export_tensors_to_nnef({"b": torch.zeros(1)}, tmp_path / "out")
    with pytest.raises(OutputExistsError, match=r"b\.dat: already exists"):
        export_tensors_to_nnef({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "out", overwrite=False)
    assert os.listdir(tmp_path / "out") == ["b.dat"]
    assert read_dat(tmp_path / "out" / "b.dat") == 0


def test_an_existing_folder_gets_more_files_and_others_replaced(tmp_path):
    export_tensors_to_nnef({"b": torch.zeros(1)}, tmp_path / "out")
    export_tensors_to_nnef({"a": torch.ones(1)}, tmp_path / "out")
    export_tensors_to_nnef({"b": torch.ones(1)}, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["a.dat", "b.dat"]
    assert read_dat(tmp_path / "out" / "b.dat") == 1


def test_a_failure_leaves_an_existing_folder_as_it_was(tmp_path):
    export_tensors_to_nnef({"b": torch.zeros(1)}, tmp_path / "out")
    store = saved(tmp_path / "m.safetensors", {"a": torch.ones(1000), "b": torch.ones(1000)})
    pending = export_tensors_from_disk_to_nnef

    def cut(names):
        store.write_bytes(store.read_bytes()[:-100])

    with pytest.raises(CorruptCheckpointError, match="tensor b"):
        pending(store, tmp_path / "out", None, cut)
    assert os.listdir(tmp_path / "out") == ["b.dat"]
    assert read_dat(tmp_path / "out" / "b.dat") == 0


@pytest.mark.parametrize("target", ["absent/out", "file", ".."])
def test_targets_that_cannot_be(tmp_path, target):
    (tmp_path / "file").write_text("mine")
    with pytest.raises((ArchiveError, OptionError)):
        export_tensors_to_nnef(WEIGHTS, tmp_path / target)
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_without_room_is_told_before_it_is_filled(tmp_path):
    huge = torch.empty(1, dtype=torch.uint8).expand(MAX_DATA_BYTES)
    with pytest.raises(DiskFullError, match=r"out: needs 85899348[0-9]* bytes"):  # 80 TB of one byte, repeated
        export_tensors_to_nnef({f"w{index}": huge for index in range(20_000)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def in_a_fork(work: Callable[[], object]) -> object:
    """Return what `work` returns in a fork of this process, whose limits and memory are its own."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def send(connection: Connection) -> None:
        connection.send(work())

    child = fork.Process(target=send, args=(sender,))
    child.start()
    sender.close()
    try:
        assert receiver.poll(120)
        return receiver.recv()  # EOFError: it failed, and says why on stderr
    finally:
        child.kill()
        child.join()


@needs_posix
def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path):
    """A limit on the size of a file stands for a disk that gives up half-way."""

    def refused() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with pytest.raises(ArchiveError) as caught:
            export_tensors_to_nnef({"a": torch.ones(100), "b": torch.ones(9999)}, tmp_path / "out")
        return str(caught.value)

    assert "Nothing was left behind" in in_a_fork(refused)
    assert os.listdir(tmp_path) == []


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_large_tensor_takes_little_memory(tmp_path, suffix):
    store = saved(tmp_path / f"m.{suffix}", {"w": torch.zeros(64 << 20, dtype=torch.bfloat16)})
    small = saved(tmp_path / f"small.{suffix}")

    def growth() -> int:
        export_tensors_from_disk_to_nnef(small, tmp_path / "small")  # what is imported and allocated once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        export_tensors_from_disk_to_nnef(store, tmp_path / "out", bfloat16_as=torch.float16)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert in_a_fork(growth) < 100 * 1024
    assert (tmp_path / "out" / "w.dat").stat().st_size == 128 + (128 << 20)
