"""WAV files as waveforms: PCM of 8 to 32 bits and floats, any number of channels, at the rate that a model hears; and written.

In: a path. Out: f32 [samples], one channel, full scale 1. The chunks of the file are read here: the standard library's `wave`
knows no floats and, before Python 3.12, no extensible headers. It writes the files of 16 bits.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path

import numpy as np

from generic_export.errors import OptionError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMAT = struct.Struct("<HHIIHH")
_SUBFORMAT_AT = 24  # in an extensible header: the first two bytes of a GUID are the plain format's number
_FLOATS = {32: "<f4", 64: "<f8"}
_PCM_BYTES = (1, 2, 3, 4)
_LOUDEST = 32_767  # of 16 bits

_CROSSINGS = 32  # zeros of the sinc on each side
_ROLLOFF = 0.95  # of the lower of both rates' highest frequency
_BETA = 9.0  # Kaiser: side lobes 90 dB down


@dataclass(frozen=True)
class _Header:
    """What a file says of its samples."""

    encoding: int
    channels: int
    rate: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of all channels."""
        return self.channels * self.bits // 8


def read_waveform(source: str | Path | bytes, sampling_rate: int) -> np.ndarray:
    """Read a WAV file.

    Args:
        source: path or content of the file.
        sampling_rate: samples a second that are wanted; another rate is resampled.

    Returns:
        f32 [samples]: the mean of the channels, full scale 1.

    Raises:
        OptionError: there is no such file, it is no WAV file, of an encoding that is not read, or without a sample.
    """
    name = "audio" if isinstance(source, bytes) else str(source)
    header, data = _parsed(name, source if isinstance(source, bytes) else _content(Path(source)))
    frames = len(data) // header.frame_bytes
    samples = _as_floats(data[: frames * header.frame_bytes], header).reshape(frames, header.channels)
    if not frames:
        raise OptionError(f"{name}: the recording is empty.", "Use a file with sound.")
    return resampled(samples.mean(axis=1), header.rate, sampling_rate).astype(np.float32)


def write_waveform(path: str | Path, waveform: np.ndarray, sampling_rate: int) -> None:
    """Write a WAV file of 16 bits.

    Args:
        path: of the file; an earlier one is replaced.
        waveform: f32 [samples], one channel, full scale 1; what is beyond is cut.
        sampling_rate: samples a second.

    Raises:
        OptionError: the file cannot be written.
    """
    samples = np.round(np.clip(waveform, -1.0, 1.0) * _LOUDEST).astype("<i2")
    try:
        with Path(path).open("wb") as opened, wave.open(opened, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(samples.itemsize)
            file.setframerate(sampling_rate)
            file.writeframes(samples.tobytes())
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror}.", "Use another path.") from error


def resampled(waveform: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return a waveform at another rate, by a windowed sinc for each place between two samples that occurs.

    Args:
        waveform: [samples].
        rate, wanted: samples a second.

    Returns:
        [ceil(samples * wanted / rate)], f64 where the rate changes.
    """
    if rate == wanted:
        return waveform
    common = gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cutoff = _ROLLOFF * min(1.0, up / down)  # of the input's highest frequency
    reach = ceil(_CROSSINGS / cutoff)
    count = -(-len(waveform) * up // down)
    padded = np.pad(waveform.astype(np.float64), (reach, reach + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    made = np.empty(count)
    for phase in range(min(up, count)):  # outputs phase, phase + up, ... lie at one place between two samples
        whole, part = divmod(phase * down, up)
        number = len(range(phase, count, up))
        made[phase::up] = windows[whole + 1 :: down][:number] @ _kernel(part / up, cutoff, reach)
    return made


def _kernel(offset: float, cutoff: float, reach: int) -> np.ndarray:
    """Return [2 * reach] weights of the samples around a place that lies `offset` after one of them."""
    distance = np.arange(1 - reach, reach + 1) - offset
    inside = np.clip(1.0 - (distance / reach) ** 2, 0.0, None)
    kernel = np.sinc(cutoff * distance) * np.i0(_BETA * np.sqrt(inside))
    normalised: np.ndarray = kernel / kernel.sum()  # silence and full scale stay what they are
    return normalised


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}.", "Use the path of a WAV file.") from error


def _parsed(name: str, content: bytes) -> tuple[_Header, bytes]:
    """Return what a file says of its samples, and their bytes."""
    if content[:4] not in (b"RIFF", b"RF64") or content[8:12] != b"WAVE":
        raise OptionError(f"{name}: not a WAV file.", "Convert it, for example with `ffmpeg -i FILE sound.wav`.")
    header = None
    for kind, chunk in _chunks(content):
        if kind == b"fmt ":
            header = _header(name, chunk)
        elif kind == b"data" and header is not None:
            return header, chunk
    missing = "samples" if header is not None else "format"
    raise OptionError(f"{name}: the file ends before its {missing}.", "Use the complete file.")


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and contents; who records a stream leaves the last length 0 or as large as can be: then it is the rest."""
    place = 12
    while place + 8 <= len(content):
        name, (length,) = content[place : place + 4], struct.unpack_from("<I", content, place + 4)
        if name == b"data" and length == 0:
            length = len(content)
        yield name, content[place + 8 : place + 8 + length]
        place += 8 + length + length % 2


def _header(name: str, chunk: bytes) -> _Header:
    if len(chunk) < _FORMAT.size:
        raise OptionError(f"{name}: its format has {len(chunk)} bytes, not {_FORMAT.size}.", "Use the complete file.")
    encoding, channels, rate, _, _, bits = _FORMAT.unpack_from(chunk)
    if encoding == _EXTENSIBLE and len(chunk) >= _SUBFORMAT_AT + 2:
        (encoding,) = struct.unpack_from("<H", chunk, _SUBFORMAT_AT)
    known = (encoding == _PCM and bits // 8 in _PCM_BYTES and bits % 8 == 0) or (encoding == _FLOAT and bits in _FLOATS)
    if not known:
        raise OptionError(
            f"{name}: samples with encoding {encoding} and {bits} bits are not supported.",
            "Convert it to 16-bit PCM, for example with `ffmpeg -i FILE -c:a pcm_s16le sound.wav`.",
        )
    if not channels or not rate:
        raise OptionError(f"{name}: {channels} channels at {rate} Hz are not supported.", "Use another file.")
    return _Header(encoding, channels, rate, bits)


@np.errstate(over="ignore", invalid="ignore")
def _as_floats(data: bytes, header: _Header) -> np.ndarray:
    """Return f64 [samples of all channels], full scale 1."""
    if header.encoding == _FLOAT:
        single = np.frombuffer(data, _FLOATS[header.bits]).astype(np.float32)
        return np.nan_to_num(single, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float64)
    width = header.bits // 8
    if width == 1:  # the only one without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128.0) / 128.0
    wide = np.zeros((len(data) // width, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return wide.reshape(-1).view("<i4").astype(np.float64) / 2.0**31


__all__ = ["read_waveform", "resampled", "write_waveform"]
