"""What the sections of `export.json` look like, so that one that somebody edited is an error with a name and not a surprise.

In: JSON. Out: nothing, or where it is not what an export writes. What is left out is said by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from types import NoneType
from typing import Any

_LONGEST_NAME = 255  # bytes, of a file


class _Name:
    """A file of the folder, or of a folder in it."""


_TEXT, _TABLE, _TEXTS, _TABLES = (str,), (dict,), [str], [dict]
_WHOLE = (int, NoneType)
_OPTIONAL = (str, NoneType)
_GRAPH = {
    "inputs": _TEXTS,
    "outputs": _TEXTS,
    "symbols": _TEXTS,
    "sizes": _TEXTS,
    "states": _TABLES,
    "caches": _TABLES,
    "engine_states": _TABLES,
    "dtype": _TEXT,
    "prefill": _TABLES,
}
# section -> types it may have, [type of every item], or the same of its own sections; "*" stands for any key
_FORM: Mapping[str, Any] = {
    "task": _TEXT,
    "source": {"name": _TEXT, "revision": _OPTIONAL, "architecture": _TEXT, "model_type": _TEXT},
    "graph": _GRAPH,
    "model": {"vocab_size": _WHOLE, "max_position_embeddings": _WHOLE, "sliding_window": _WHOLE, "parameters": _WHOLE},
    "archive": _Name,
    "versions": _TABLE,
    "options": {"keep_f32": _TEXTS, "device": _TEXTS},
    "devices": _TABLES,
    "adapter": {"name": _TEXT, "revision": _OPTIONAL, "sha256": _TEXT},
    "compression": {"recipe": _TABLE, "tensors": _TABLES},
    "tensors": {"*": {"bytes": (int,), "sha256": _TEXT}},
    "parts": {"*": {"archive": _Name, "graph": _GRAPH, "tensors": _TABLE, "compression": (dict, NoneType)}},
    "companions": _TEXTS,
    "source_card": {
        "license": _TEXTS,
        "license_name": _OPTIONAL,
        "license_link": _OPTIONAL,
        "language": _TEXTS,
        "base_model": _TEXTS,
        "pipeline_tag": _OPTIONAL,
    },
    "card": {"file": _Name, "sha256": _TEXT},
    "quality": (dict, NoneType),
    "validation": (dict, NoneType),
    "files": {"*": {"bytes": (int,), "sha256": _TEXT}},
}
_MAY_BE_NULL = ("adapter", "compression")


def misshapen(manifest: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the sections of a manifest, such as `graph.inputs is a str, not a list`; None when nothing is."""
    for name in manifest.get("files", ()) if isinstance(manifest.get("files"), dict) else ():
        if not _is_name(name):
            return f"files names {_short(name)}, which no file of the folder can be"
    parts = manifest.get("parts")
    for role, part in parts.items() if isinstance(parts, dict) else ():
        if isinstance(part, dict) and "archive" not in part:
            return f"parts.{_short(role)} names no archive"
    known = {key: value for key, value in manifest.items() if not (value is None and key in _MAY_BE_NULL)}
    return _wrong(known, _FORM, "")


def _wrong(value: Any, form: Any, place: str) -> str | None:
    if form is _Name:
        return None if _is_name(value) else f"{place} is {_short(value)}, not the name of a file in the folder"
    if isinstance(form, list):
        fits = isinstance(value, list) and all(isinstance(item, form[0]) for item in value)
        return None if fits else f"{place} is {_kind(value)}, not a list of {form[0].__name__}"
    if isinstance(form, tuple):
        fits = isinstance(value, form) and not (isinstance(value, bool) and bool not in form)
        return None if fits else f"{place} is {_kind(value)}, not {' or '.join(map(_word, form))}"
    if not isinstance(value, dict):
        return f"{place} is {_kind(value)}, not a table"
    for key, item in value.items():
        expected = form.get(key, form.get("*"))
        wrong = None if expected is None else _wrong(item, expected, f"{place}.{key}" if place else key)
        if wrong is not None:
            return wrong
    return None


def _is_name(value: Any) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    path = PurePosixPath(value)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and all(len(part.encode(errors="replace")) <= _LONGEST_NAME for part in path.parts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"


def _kind(value: Any) -> str:
    return _word(type(value))


def _word(kind: type) -> str:
    return {NoneType: "null", dict: "a table", list: "a list", str: "text", int: "a whole number"}.get(
        kind, kind.__name__
    )


__all__ = ["misshapen"]
