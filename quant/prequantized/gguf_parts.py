"""GGUF files in several parts: which files they are, by the names that llama.cpp's `llama-gguf-split` gives them.

In: one part, or a folder. Out: all parts in order, or what is missing. Names: `model-00001-of-00003.gguf`; keys: `split.*`.
"""

from __future__ import annotations

import re
from pathlib import Path

from generic_export.errors import WeightError

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NAMED = 3  # missing parts that a message names
_PROJECTOR = "mmproj"  # a vision tower beside its language model


def first_part(path: Path) -> Path:
    """Return where the first part of a model is, which has its metadata; the file itself when its name names no part."""
    found = _NAME.fullmatch(path.name)
    return path if found is None else _part(path, found, 1)


def named_parts(path: Path) -> int:
    """Return of how many parts a file is one by its name; 1 when its name names no part."""
    found = _NAME.fullmatch(path.name)
    return 1 if found is None else int(found["count"])


def model_name(path: Path) -> str:
    """Return the name of a file without its suffix and without which part it is."""
    found = _NAME.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def all_parts(path: Path, count: int) -> tuple[Path, ...]:
    """Return the files of a model in their order.

    Args:
        path: the first.
        count: how many it says there are (`split.count`); 0 and 1 are a whole file.

    Raises:
        WeightError: parts are not there, or the file's name does not tell theirs.
    """
    if count <= 1:
        return (path,)
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise WeightError(
            f"{path}: one of {count} parts of a model, but its name does not follow the pattern of the others.",
            f"Name the parts NAME-00001-of-{count:05}.gguf and so on.",
        )
    parts = tuple(_part(path, found, number) for number in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise WeightError(
            f"{path.parent}: of the {count} parts of {found['stem']}, {', '.join(missing[:_NAMED])}{rest} "
            f"{'are' if len(missing) > 1 else 'is'} missing.",
            "Download all parts into one folder.",
        )
    return parts


def models_in(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF models of a folder, of those in parts the first, which may be missing; projectors are left out."""
    files = (path for path in sorted(folder.glob("*.gguf")) if not path.name.lower().startswith(_PROJECTOR))
    return tuple(dict.fromkeys(first_part(path) for path in files))


def _part(path: Path, found: re.Match[str], number: int) -> Path:
    return path.with_name(f"{found['stem']}-{number:05}-of-{found['count']}.gguf")


__all__ = ["all_parts", "first_part", "model_name", "models_in", "named_parts"]
