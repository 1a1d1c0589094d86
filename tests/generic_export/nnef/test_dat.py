"""The `.dat` file: what is written is read back, and nothing malformed is believed."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import TensorFormatError
from generic_export.nnef import dat

DTYPES = [element.dtype for element in dat.ELEMENT_TYPES]
SHAPES = st.lists(st.integers(0, 4), max_size=8).map(tuple)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    length = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=length, max_size=length)) if length <= 64 else bytes(i % 251 for i in range(length))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_round_trip_keeps_shape_dtype_and_every_bit(tmp_path_factory: pytest.TempPathFactory, tensor: torch.Tensor):
    path = tmp_path_factory.mktemp("dat") / "w.dat"
    dat.write_dat(path, tensor)
    assert path.stat().st_size == dat.dat_size(tensor.shape, tensor.dtype)
    back = dat.read_dat(path)
    assert (back.shape, back.dtype, as_bytes(back)) == (tensor.shape, tensor.dtype, as_bytes(tensor))


@pytest.mark.parametrize("tensor", [torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0)[::4][1:]])
def test_strided_tensor_is_written_in_c_order(tmp_path, tensor):
    dat.write_dat(tmp_path / "w.dat", tensor)
    assert torch.equal(dat.read_dat(tmp_path / "w.dat"), tensor)


@pytest.mark.parametrize(
    ("dtype", "item_type", "bits"),
    [(torch.float16, 0, 16), (torch.float32, 0, 32), (torch.uint8, 1, 8), (torch.int64, 3, 64), (torch.bool, 5, 8)],
)
def test_header_is_what_tract_documents(dtype, item_type, bits):
    expected = struct.pack(
        "<BBBBII8IIHH32s11I",
        *(0x4E, 0xEF, 1, 0, 6 * bits // 8, 2),
        *(2, 3, 0, 0, 0, 0, 0, 0),
        *(bits, item_type, 0, bytes(32), *[0] * 11),
    )
    assert dat.header_bytes((2, 3), dtype) == expected


def test_block_quantised_header_packs_and_parses_but_is_not_a_torch_tensor(tmp_path):
    header = dat.DatHeader((4, 32), 4 * 18, 0x3040, dat.BLOCK_BITS, dat.TRACT_VENDOR)
    assert dat.parse_header(header.pack()) == header
    (tmp_path / "q.dat").write_bytes(header.pack() + bytes(72))
    with pytest.raises(TensorFormatError, match=r"q\.dat: \.dat item type 0x3040"):
        dat.read_dat(tmp_path / "q.dat")


@pytest.mark.parametrize(("item_type", "dtype"), [(2, torch.uint8), (4, torch.int8)])
def test_quantised_integer_codes_are_read_as_integers(item_type, dtype):
    assert dat.DatHeader((1,), 1, item_type, 8).element_type().dtype is dtype


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2,), torch.bfloat16, "w: bfloat16 has no .dat form. tract has no bf16: cast it to float16"),
        ((2,), torch.complex64, "w: complex64 .* torch.view_as_real"),
        ((2,), torch.float8_e4m3fn, "w: float8_e4m3fn .* Convert it to one of: float16, float32"),
        ((1,) * 9, torch.float32, "w: rank 9 is above the 8"),
        ((2**15, 2**15), torch.float32, "w: shape .* takes 4294967296 bytes.* split it along its first axis"),
        ((0, 2**32), torch.float32, "w: shape"),
        ((-1, 2), torch.float32, "w: the shape of a stored tensor must be static"),
    ],
)
def test_a_tensor_without_a_dat_form_is_refused_with_a_remedy(shape, dtype, message):
    for function in (dat.header_bytes, dat.dat_size):
        with pytest.raises(TensorFormatError, match=message):
            function(shape, dtype, name="w")


def test_the_largest_payload_is_one_byte_short_of_4_gib():
    assert dat.dat_size((2**32 - 1,), torch.uint8) == 128 + 2**32 - 1


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 151])
def test_truncated_file_is_refused(tmp_path, length):
    path = tmp_path / "w.dat"
    dat.write_dat(path, torch.ones(2, 3))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(TensorFormatError, match=r"w\.dat"):
        dat.read_dat(path)


def test_trailing_bytes_are_refused(tmp_path):
    dat.write_dat(tmp_path / "w.dat", torch.ones(2))
    with (tmp_path / "w.dat").open("ab") as file:
        file.write(b"x")
    with pytest.raises(TensorFormatError, match="137 bytes long, but its header says 136"):
        dat.read_dat(tmp_path / "w.dat")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"PK", "not an NNEF .dat file"),
        (2, b"\x02", "version 2.0"),
        (4, struct.pack("<I", 20), "says 20 bytes, but shape .2, 3."),
        (8, struct.pack("<I", 9), "rank 9"),
        (12, struct.pack("<I", 2**31), "says 24 bytes"),
        (44, struct.pack("<I", 31), "says 24 bytes"),
    ],
)
def test_malformed_header_is_refused(offset, value, message):
    header = bytearray(dat.header_bytes((2, 3), torch.float32))
    header[offset : offset + len(value)] = value
    with pytest.raises(TensorFormatError, match=message):
        dat.parse_header(header)


@given(st.binary(max_size=160), st.booleans())
def test_any_bytes_either_parse_or_raise_the_format_error(data, with_magic):
    data = b"\x4e\xef\x01\x00" + data if with_magic else data
    try:
        header = dat.parse_header(data)
        header.element_type()
    except TensorFormatError:
        return
    assert math.prod(header.shape) * header.bits == header.data_size * 8


# --- damaged files ----------------------------------------------------------------------------

ITEM_CODES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 0x3040, 0x1000, 0xFFFF]) | st.integers(0, 0xFFFF)
SIZES = st.integers(0, 9) | st.sampled_from([2**16, 2**31, 2**32 - 1])


def read_or_refuse(path) -> torch.Tensor | None:
    """What a file says, or None for the one error that a damaged file may raise."""
    try:
        return dat.read_dat(path)
    except TensorFormatError as error:
        assert str(path) in str(error)
        return None


@settings(max_examples=400, deadline=None)
@given(st.data(), tensors())
def test_flipped_bytes_give_those_very_bytes_or_the_format_error(tmp_path_factory, data, tensor):
    path = tmp_path_factory.mktemp("dat") / "w.dat"
    dat.write_dat(path, tensor)
    content = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    found = read_or_refuse(path)
    if found is not None:  # the payload is what it is; the header still describes exactly that many bytes
        assert as_bytes(found) == bytes(content[128:])


@settings(max_examples=400, deadline=None)
@given(
    dims=st.lists(SIZES, max_size=8),
    data_size=SIZES,
    rank=st.integers(0, 10),
    bits=st.sampled_from([0, 1, 8, 16, 32, 64, 128, dat.BLOCK_BITS]) | st.integers(0, 2**32 - 1),
    item_type=ITEM_CODES,
    vendor=st.sampled_from([0, dat.TRACT_VENDOR, 7]),
    payload=st.binary(max_size=80),
)
def test_lying_headers_give_the_payload_or_the_format_error(
    tmp_path_factory, dims, data_size, rank, bits, item_type, vendor, payload
):
    fields = struct.pack(
        "<2sBBII8IIHH76x", b"\x4e\xef", 1, 0, data_size, rank, *dims, *[0] * (8 - len(dims)), bits, item_type, vendor
    )
    path = tmp_path_factory.mktemp("dat") / "w.dat"
    path.write_bytes(fields + payload)
    found = read_or_refuse(path)
    if found is not None:
        assert as_bytes(found) == payload
        assert (len(payload), found.dim()) == (data_size, rank)


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors())
def test_truncation_and_growth_are_always_noticed(tmp_path_factory, data, tensor):
    path = tmp_path_factory.mktemp("dat") / "w.dat"
    dat.write_dat(path, tensor)
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    for damaged in (content[:length], content + bytes(1 + length)):
        path.write_bytes(damaged)
        assert read_or_refuse(path) is None


def test_a_header_that_announces_4_gib_allocates_nothing(tmp_path):
    """The length of the file is compared before any memory is asked for."""
    (tmp_path / "w.dat").write_bytes(dat.header_bytes((2**32 - 1,), torch.uint8) + bytes(10))
    with pytest.raises(TensorFormatError, match="138 bytes long, but its header says 4294967423"):
        dat.read_dat(tmp_path / "w.dat")


@pytest.mark.parametrize("path", ["absent.dat", "folder.dat"])
def test_what_is_no_file_is_named(tmp_path, path):
    (tmp_path / "folder.dat").mkdir()
    with pytest.raises(TensorFormatError, match=rf"{path}: cannot be read"):
        dat.read_dat(tmp_path / path)
