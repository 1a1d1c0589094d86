"""Pictures: upright RGB whatever the file holds, in the size that is asked for; broken ones refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import OptionError
from t2n_llm.tasks.media.encoder_input import read_image

image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = image.fromarray(pixels).convert(mode)
    picture.save(tmp_path / "a.png")
    read = read_image(tmp_path / "a.png")
    assert read.dtype == np.uint8
    assert np.array_equal(read, np.asarray(picture.convert("RGB")))


def test_a_turned_photograph_is_upright(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255
    exif = image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=100)
    read = read_image(tmp_path / "a.jpg")
    assert read.shape == (16, 8, 3)
    assert read[:7].min() > 200 and read[9:].max() < 50


def test_a_size_is_height_and_width(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    resized = read_image(tmp_path / "a.png", (4, 6), "bilinear")
    assert np.array_equal(resized, np.asarray(image.fromarray(pixels).resize((6, 4), image.Resampling.BILINEAR)))


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), (b"text", "not an image"), (b"\x89PNG\r\n\x1a\n", "an image|read")],
)
def test_what_cannot_be_read_is_said(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=says) as error:
        read_image(file)
    assert error.value.hint
