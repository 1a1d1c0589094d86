"""The tokenizer of a GGUF file as files: transformers builds it from the metadata, which takes seconds, and once for a file.

In: an opened file. Out: `tokenizer.json` and what belongs to it, in a folder. Kept between processes in the user's cache, under the
hash of the metadata and the releases that built it; a cache that cannot be written or read is done without.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from generic_export.errors import MissingTokenizerError, first_line
from generic_export.inference_target.tract.releases.install import default_cache_dir
from quant.prequantized import GgufFile
from quant.prequantized.gguf_reader import gguf_reader
from t2n_llm.compat import gguf_read_with

Tell = Callable[[str], None]

_FORM = 1  # of what is kept
_KEPT = 8  # tokenizers, some 30 MB each where a vocabulary is large
_WORTH_KEEPING = 0.5  # seconds that one took


def write_tokenizer(file: GgufFile, folder: Path, tell: Tell) -> None:
    """Write the files of a GGUF file's tokenizer.

    Args:
        file: its first part's metadata are read.
        folder: that the files are put into.
        tell: told before one is built.

    Raises:
        MissingTokenizerError: transformers cannot build it.
    """
    kept = kept_tokenizers() / _key(file)
    if _copied(kept, folder):
        return
    tell(f"Building the tokenizer of {file.paths[0].name}")
    start = time.monotonic()
    with TemporaryDirectory(prefix="t2n-llm-tokenizer-") as made:
        _build(file, Path(made))
        shutil.copytree(made, folder, dirs_exist_ok=True)
        if time.monotonic() - start >= _WORTH_KEEPING:
            with suppress(OSError):
                _keep(Path(made), kept)


def kept_tokenizers() -> Path:
    """Return the folder of those that are kept."""
    return default_cache_dir().parent / "gguf-tokenizers"


def _key(file: GgufFile) -> str:
    built_by = f"{_FORM} {version('transformers')} {version('tokenizers')} {version('gguf')} "
    found = hashlib.sha256(built_by.encode())
    found.update(file.header)
    return found.hexdigest()


def _build(file: GgufFile, folder: Path) -> None:
    from transformers import AutoTokenizer

    path = file.paths[0]
    with gguf_read_with(gguf_reader()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers itself raises plain Exception
            raise MissingTokenizerError(
                f"{path}: transformers cannot build its tokenizer: {first_line(error)}",
                "Pass --no-tokenizer to export without it.",
            ) from error


def _copied(kept: Path, folder: Path) -> bool:
    """Say whether there was one to copy; one that is half there is none."""
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        kept.touch()  # the least recently used go first
    except (OSError, shutil.Error):
        return False
    return True


def _keep(made: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="new-", dir=kept.parent) as scratch:
        whole = shutil.copytree(made, Path(scratch) / kept.name)
        whole.rename(kept)
    others = sorted((each for each in kept.parent.iterdir() if each != kept), key=lambda each: each.stat().st_mtime)
    for each in others[: -_KEPT + 1 or None]:
        shutil.rmtree(each, ignore_errors=True)


__all__ = ["Tell", "kept_tokenizers", "write_tokenizer"]
