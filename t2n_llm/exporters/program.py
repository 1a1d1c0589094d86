"""`TractProgram`: one archive as `transformers.exporters` passes it around, before it is saved and after it is loaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

ARCHIVE_SUFFIX = ".nnef.tar"


@dataclass(frozen=True)
class TractProgram:
    """An NNEF archive for tract.

    Attributes:
        archive: the file. That of a new export is in a temporary folder, which is removed with the program.
    """

    archive: Path
    _folder: tempfile.TemporaryDirectory[str] | None = None


__all__ = ["ARCHIVE_SUFFIX", "TractProgram"]
