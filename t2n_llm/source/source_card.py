"""What the card of a model (its `README.md`) and its config say about it: licence, language, what it was made from.

In: the files that were opened with the source. Out: `SourceCard`; `export.json` records it. Fields: the hub's model card metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from generic_export.weights.pinned_file import PinnedFile

CARD_NAME = "README.md"

_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST = 200  # characters of one entry; what is longer is no name of a licence
_MOST = 50  # entries of a list


@dataclass(frozen=True)
class SourceCard:
    """What the source says of itself; what it does not say is empty.

    Attributes:
        license: the hub's identifiers, such as `apache-2.0`.
        license_name, license_link: of a licence that has no identifier there.
        language: codes of languages.
        base_model: hub ids that it was made from.
        pipeline_tag: the hub's name for its task.
    """

    license: tuple[str, ...] = ()
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()
    base_model: tuple[str, ...] = ()
    pipeline_tag: str | None = None

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> SourceCard:
        """Return what `export.json` has of it; nothing where an older one says nothing."""
        lists = {name: tuple(map(str, record.get(name, ()))) for name in ("license", "language", "base_model")}
        return SourceCard(
            **lists,
            license_name=record.get("license_name"),
            license_link=record.get("license_link"),
            pipeline_tag=record.get("pipeline_tag"),
        )

    def asdict(self) -> dict[str, Any]:
        """Return what is known, as plain data."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items() if value
        }


def source_card(files: Sequence[PinnedFile]) -> SourceCard:
    """Read what is said of a model; a card that cannot be read says nothing.

    Args:
        files: of the source.
    """
    by_name = {file.path.name: file for file in files}
    said = front_matter(_text(by_name.get(CARD_NAME)))
    licence = _texts(said.get("license")) or _texts(_config(by_name.get("config.json")).get("license"))
    return SourceCard(
        license=licence,
        license_name=_one(said.get("license_name")),
        license_link=_one(said.get("license_link")),
        language=_texts(said.get("language")),
        base_model=tuple(name for name in _texts(said.get("base_model")) if _HUB_ID.fullmatch(name)),
        pipeline_tag=_one(said.get("pipeline_tag")),
    )


def front_matter(text: str) -> dict[str, Any]:
    """Return the table at the top of a card; empty where there is none, or one that is no YAML."""
    import yaml

    found = _FRONT_MATTER.match(text)
    if found is None:
        return {}
    try:
        content = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(file: PinnedFile | None) -> str:
    return file.read().decode("utf-8", errors="replace") if file is not None else ""


def _config(file: PinnedFile | None) -> dict[str, Any]:
    try:
        content = json.loads(_text(file) or "{}")
    except (ValueError, RecursionError):
        return {}  # transformers says what is wrong with it
    return content if isinstance(content, dict) else {}


def _texts(value: Any) -> tuple[str, ...]:
    """Return one text or several as a tuple of lines; anything else is none."""
    items = value if isinstance(value, list) else [value]
    found = (" ".join(item.split()) for item in items[:_MOST] if isinstance(item, str))
    return tuple(item for item in found if item and len(item) <= _LONGEST)


def _one(value: Any) -> str | None:
    return next(iter(_texts(value)), None) if isinstance(value, str) else None


__all__ = ["CARD_NAME", "SourceCard", "front_matter", "source_card"]
