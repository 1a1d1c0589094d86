"""What a model reads of a recording or a picture: its front end makes it in tract, or transformers' own processor does.

In: an export folder, and a waveform or a file. Out: one row of the model's input. The processor is asked where the export has no
front end, or one whose pictures are of sizes that follow from the picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import ArchiveError, MissingExtraError, OptionError
from t2n_llm.check.archive_sessions import ArchiveSession, open_archive_session
from t2n_llm.tasks.frontends.frontend import FRONTEND
from t2n_llm.tasks.frontends.waveforms import LENGTHS
from t2n_llm.tasks.media.sound import read_waveform

_CONFIG = "preprocessor_config.json"
_MASK = "attention_mask"


@dataclass(frozen=True)
class EncoderInput:
    """How a model's input comes to be.

    Attributes:
        folder: of the export.
        name: of the model's input.
        record: what `export.json` says of the front end; None where there is none that makes this input.
        archive: the front end's; None likewise.
    """

    folder: Path
    name: str
    record: Mapping[str, Any] | None = None
    archive: Path | None = None

    @staticmethod
    def of(folder: Path, manifest: Mapping[str, Any], name: str) -> EncoderInput:
        """Read them of a folder's manifest.

        Raises:
            ArchiveError: it has no archive of the front end that it describes.
        """
        record = manifest.get(FRONTEND)
        if record is None or name not in record.get("outputs", ()):
            return EncoderInput(folder, name)
        if FRONTEND not in manifest.get("archives", {}):
            raise ArchiveError(f"{folder}: its export.json lists no front end archive.", "Export the model again.")
        return EncoderInput(folder, name, record, folder / manifest["archives"][FRONTEND]["archive"])

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sound that the model hears.

        Raises:
            OptionError: nothing says so.
        """
        stated = self._stated
        if stated.get("sampling_rate") is None:
            raise OptionError(
                f"{self.folder} does not record the sampling rate of its model.",
                f"Export a checkpoint that includes its {_CONFIG}.",
            )
        return int(stated["sampling_rate"])

    @property
    def samples(self) -> int | None:
        """How many samples the model hears at once; None where nothing says so."""
        stated = self._stated
        samples = stated.get("samples")
        return int(samples) if samples is not None else None

    @property
    def _stated(self) -> Mapping[str, Any]:
        """What the front end's record says, or the processor's own file where there is none."""
        path = self.folder / _CONFIG
        if self.record is not None or not path.is_file():
            return self.record or {}
        stated: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return stated

    def waveform(self, recording: Path) -> np.ndarray:
        """Return the sound of a file, f32 [samples], at the sampling rate of the model.

        Args:
            recording: a WAV file.

        Raises:
            OptionError: it cannot be read, or nothing states the sampling rate.
        """
        return read_waveform(recording, self.sampling_rate)

    @contextmanager
    def opened(self) -> Iterator[EncoderInputReader]:
        """Yield them ready for use, and stop the front end's engine after the block."""
        with open_archive_session(self.archive) if self.archive is not None else nullcontext() as front:
            yield EncoderInputReader(self, front)


@dataclass(frozen=True)
class EncoderInputReader:
    """EncoderInput in use.

    Attributes:
        senses: of the model.
        front: the front end in the engine; None where there is none.
    """

    senses: EncoderInput
    front: ArchiveSession | None

    def from_waveform(self, waveform: np.ndarray) -> np.ndarray:
        """Return what the model reads of a waveform f32 [samples], as a batch of one."""
        record = self.senses.record
        if self.front is None or record is None:
            return self._processed("AutoFeatureExtractor", waveform, sampling_rate=self.senses.sampling_rate)
        lengths = [np.array([len(waveform)], np.int64)] if LENGTHS in record["inputs"] else []
        return self._made(record["outputs"], self.front.answer([waveform[None].astype(np.float32), *lengths]))

    def from_image(self, path: Path) -> np.ndarray:
        """Return what the model reads of a picture, as a batch of one."""
        record = self.senses.record
        if self.front is None or record is None or not _is_of_one_size(record["resize"]):
            return self._processed("AutoImageProcessor", read_image(path))
        rule = record["resize"]
        pixels = read_image(path, (rule["height"], rule["width"]), rule["filter"])
        return self._made(record["outputs"], self.front.answer([pixels[None]]))

    def _processed(self, auto_class: str, given: Any, **told: Any) -> np.ndarray:
        import transformers

        processor = getattr(transformers, auto_class).from_pretrained(self.senses.folder)
        made = processor(given, return_tensors="np", **told)
        return self._made(list(made), list(made.values()))

    def _made(self, names: Sequence[str], values: Sequence[Any]) -> np.ndarray:
        """Return the model's input, without the rows that are padding."""
        made = dict(zip(names, values, strict=True))
        row, mask = np.asarray(made[self.senses.name], np.float32), made.get(_MASK)
        return row if mask is None or mask.shape != row.shape[:2] else row[:, : int(np.asarray(mask).sum())]


def _is_of_one_size(rule: Mapping[str, Any]) -> bool:
    """Say whether all pictures are resized alike; else their size follows from the picture's own."""
    return all(isinstance(rule.get(edge), int) for edge in ("height", "width")) and rule.get("filter") is not None


# --- files of pictures -------------------------------------------------------------------------------


def read_image(
    source: str | Path | bytes, size: tuple[int, int] | None = None, filter_name: str = "bicubic"
) -> np.ndarray:
    """Read a picture.

    Args:
        source: path or content of a PNG, a JPEG, or another file that Pillow reads.
        size: height and width that are wanted; None keeps its own.
        filter_name: how it gets them: `nearest`, `lanczos`, `bilinear`, `bicubic`, `box` or `hamming`, with antialiasing.

    Returns:
        uint8 [H, W, 3].

    Raises:
        MissingExtraError: Pillow is not installed.
        OptionError: there is no such file, or it is no picture.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError(
            "reading images needs Pillow.", "Install it with pip install 't2n-llm[images]'."
        ) from error
    name = "image" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError as error:
        raise OptionError(f"{name}: not an image.", "Use a PNG or JPEG file.") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise OptionError(f"{name}: cannot be read: {reason}.", "Use a complete PNG or JPEG file.") from error
    if size is not None:
        picture = picture.resize((size[1], size[0]), Image.Resampling[filter_name.upper()])
    return np.asarray(picture)


__all__ = ["EncoderInput", "EncoderInputReader", "read_image"]
