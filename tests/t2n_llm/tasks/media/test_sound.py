"""WAV files: every encoding, broken ones refused, other rates resampled."""

from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generic_export.errors import OptionError
from t2n_llm.tasks.media.sound import read_waveform, resampled, write_waveform


def _wav(encoding: int, bits: int, channels: int, rate: int, data: bytes, *, extensible: bool = False) -> bytes:
    """Return a file: an odd chunk that nobody knows, the format, the samples."""
    form = struct.pack("<HHIIHH", encoding, channels, rate, 0, channels * bits // 8, bits)
    if extensible:
        form = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHIH", 22, bits, 0, encoding) + bytes(14)
    chunks = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in ((b"LIST", b"odd"), (b"fmt ", form), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def _stored(samples: np.ndarray, encoding: int, bits: int) -> bytes:
    if encoding == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    scaled = np.round(samples * 2.0 ** (bits - 1)).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int64)
    if bits == 8:
        return (scaled + 128).astype(np.uint8).tobytes()
    return scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()


_ENCODINGS = [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)]


@given(
    form=st.sampled_from(_ENCODINGS),
    channels=st.integers(1, 3),
    values=st.lists(st.floats(-1, 1), min_size=3, max_size=60),
    extensible=st.booleans(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_survive_every_encoding(
    form: tuple[int, int], channels: int, values: list[float], extensible: bool, tmp_path: Path
) -> None:
    encoding, bits = form
    samples = np.array(values[: len(values) // channels * channels]).reshape(-1, channels)
    file = tmp_path / "a.wav"
    file.write_bytes(_wav(encoding, bits, channels, 8_000, _stored(samples, encoding, bits), extensible=extensible))
    read = read_waveform(file, 8_000)
    assert read.dtype == np.float32 and read.shape == (len(samples),)
    step = 2.0 ** (1 - min(bits, 24))
    np.testing.assert_allclose(read, samples.mean(axis=1), atol=step + 1e-7)


@given(content=st.binary(max_size=200), cut=st.integers(0, 100))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(content: bytes, cut: int, tmp_path: Path) -> None:
    whole = _wav(1, 16, 1, 16_000, content)
    for number, damaged in enumerate(
        (content, whole[:cut], whole[:20] + content + whole[20:], b"RIFF0000WAVE" + content)
    ):
        file = tmp_path / f"{number}.wav"
        file.write_bytes(damaged)
        try:
            assert np.isfinite(read_waveform(file, 16_000)).all()
        except OptionError as error:
            assert str(file) in str(error)


def test_what_the_standard_library_writes(tmp_path: Path) -> None:
    samples = (np.sin(np.arange(480) / 9) * 20_000).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes(samples.tobytes())
    assert np.array_equal(read_waveform(tmp_path / "a.wav", 48_000), samples / np.float32(32_768))
    assert len(read_waveform(tmp_path / "a.wav", 16_000)) == 160


@pytest.mark.parametrize("bits", [32, 64])
def test_what_is_no_number_is_silence(bits: int, tmp_path: Path) -> None:
    samples = np.array([0.5, np.nan, np.inf, -np.inf, 1e300 if bits == 64 else 0.25])
    (tmp_path / "a.wav").write_bytes(_wav(3, bits, 1, 16_000, _stored(samples, 3, bits)))
    assert read_waveform(tmp_path / "a.wav", 16_000).tolist() == [0.5, 0, 0, 0, 0.0 if bits == 64 else 0.25]


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_a_stream_that_was_recorded_does_not_know_its_length(length: int, tmp_path: Path) -> None:
    content = bytearray(_wav(1, 16, 1, 16_000, np.arange(100, dtype="<i2").tobytes()))
    struct.pack_into("<I", content, content.index(b"data") + 4, length)
    (tmp_path / "a.wav").write_bytes(content)
    assert len(read_waveform(tmp_path / "a.wav", 16_000)) == 100


@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 24_000)])
def test_a_tone_stays_the_same_tone_at_another_rate(rate: int, wanted: int) -> None:
    def tone(at: int, frequency: float) -> np.ndarray:
        return np.sin(2 * np.pi * frequency * np.arange(at) / at)

    made = resampled(tone(rate, 1_000), rate, wanted)
    assert len(made) == wanted
    inside = slice(wanted // 10, -wanted // 10)
    np.testing.assert_allclose(made[inside], tone(wanted, 1_000)[inside], atol=1e-4)
    if rate > wanted:  # what the lower rate cannot express does not come back as another tone
        assert np.abs(resampled(tone(rate, 0.6 * wanted), rate, wanted)[inside]).max() < 1e-3


@given(
    rate=st.integers(1, 400), wanted=st.integers(1, 400), samples=st.integers(1, 300), level=st.floats(-1, 1, width=32)
)
@settings(deadline=None, max_examples=60)
def test_the_length_follows_the_rates_and_a_level_stays(rate: int, wanted: int, samples: int, level: float) -> None:
    made = resampled(np.full(samples, level), rate, wanted)
    assert len(made) == -(-samples * wanted // rate)
    assert np.abs(made).max() <= 1.5 * abs(level) + 1e-12  # two samples alone overshoot by a quarter


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"ID3\x04 an mp3", "not a WAV file"),
        (b"", "not a WAV file"),
        (_wav(1, 16, 1, 16_000, b""), "is empty"),
        (_wav(1, 16, 1, 16_000, b"\0\0")[:30], "ends before its format"),
        (_wav(2, 4, 1, 16_000, b"\0\0"), "encoding 2 and 4 bits"),
        (_wav(1, 16, 0, 16_000, b"\0\0"), "0 channels"),
    ],
)
def test_what_cannot_be_read_is_said(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=says) as error:
        read_waveform(file, 16_000)
    assert error.value.hint


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    waveform = np.sin(np.arange(2_000) / 9).astype(np.float32)
    write_waveform(tmp_path / "tone.wav", waveform, 16_000)
    np.testing.assert_allclose(read_waveform(tmp_path / "tone.wav", 16_000), waveform, atol=1e-4)
    write_waveform(tmp_path / "loud.wav", 3 * waveform, 16_000)
    assert np.abs(read_waveform(tmp_path / "loud.wav", 16_000)).max() <= 1.0
    with pytest.raises(OptionError, match="cannot be written"):
        write_waveform(tmp_path / "no" / "tone.wav", waveform, 16_000)
