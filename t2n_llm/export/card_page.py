"""The card of an export as a page, `README.md`: written with the export, and again when its `export.json` has learnt something.

In: an export folder. Out: Markdown with the hub's metadata on top. A card that somebody edited is theirs: nobody
replaces it unasked.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OutputExistsError, T2NError
from generic_export.sizes import size_text
from t2n_llm.export.card import ModelCard, read_card
from t2n_llm.export.folder import CARD_FILE, EDITED_CARD_FILE, MANIFEST_NAME, json_text, read_manifest
from t2n_llm.tasks.names import TRIED

"""What becomes of a card that somebody edited, when the export under it is replaced."""

_TEMPLATE = "card.md.j2"
_WIDTHS = {"i": ("int", (8, 16, 32, 64)), "u": ("uint", (8, 16, 32, 64)), "f": ("float", (16, 32, 64))}
_NUMPY = {f"{kind}{width}": f"np.{name}{width}" for kind, (name, widths) in _WIDTHS.items() for width in widths}
_FURTHER = {"numpy": {**_NUMPY, "bool": "np.bool_"}}
_MARKS = re.compile(r"([\\`*_\[\]#~|])")


def render_card(card: ModelCard) -> str:
    """Return the page, Markdown."""
    front = _yaml(card.front_matter())
    text = (
        _environment()
        .get_template(_TEMPLATE)
        .render(card=card, front=front.strip(), **_FURTHER, tried=TRIED.get(card.task))
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _yaml(data: dict[str, Any]) -> str:
    """Return data as YAML, in readable letters where these can be read back: of a next-line character PyYAML makes a space."""
    import yaml

    text = str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=False))
    return text if yaml.safe_load(text) == data else str(yaml.safe_dump(data, sort_keys=False))


def card_text(folder: Path) -> str:
    """Return the card of an export folder, whatever its `README.md` says.

    Raises:
        ArchiveError: it is no export, or one that says too little.
    """
    return _rendered(folder, read_manifest(folder))


def with_card(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the card of a folder that is being made; return the manifest with what tells it from an edited one."""
    text = _rendered(folder, manifest)
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
    return {**manifest, "card": {"file": CARD_FILE, "sha256": _sha256(text.encode())}}


def write_card(folder: Path, *, force: bool = False) -> Path:
    """Write the card of an export, such as one that was made before there were any, and note in `export.json` that it is ours.

    Args:
        folder: made by `t2n-llm export`.
        force: replace a `README.md` that somebody else wrote or edited.

    Raises:
        OutputExistsError: there is such a `README.md`.
        ArchiveError: it is no export, or cannot be written.
    """
    manifest = read_manifest(folder)
    if is_edited(folder, manifest) and not force:
        raise OutputExistsError(
            f"{folder / CARD_FILE} was edited.",
            "Pass --force to replace it, or --print to see what would be written.",
        )
    _replace(folder, manifest)
    return folder / CARD_FILE


def note(folder: Path, **sections: Any) -> bool:
    """Note in `export.json` what was learnt of an export, and say it in its card.

    Args:
        folder: of the export.
        sections: of `export.json`, such as `validation`.

    Returns:
        Whether the card says so; one that somebody edited stays as it is.

    Raises:
        ArchiveError: it is no export, or cannot be written.
    """
    manifest = {**read_manifest(folder), **sections}
    if is_edited(folder, manifest):
        _write(folder / MANIFEST_NAME, json_text(manifest, indent=2) + "\n")
        return False
    _replace(folder, manifest)
    return True


def is_edited(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Say whether a folder has a `README.md` that is not what we wrote there."""
    path = folder / CARD_FILE
    if not path.exists() and not path.is_symlink():
        return False
    recorded = manifest.get("card")
    ours = recorded.get("sha256") if isinstance(recorded, Mapping) else None
    return not path.is_file() or _sha256(path.read_bytes()) != ours


def keep_edited(target: Path, staging: Path) -> bool:
    """Take the card that somebody edited along, where an earlier export is about to be replaced.

    Args:
        target: the earlier export; there need not be any.
        staging: the new one.

    Returns:
        Whether there was one; it is `README.edited.md` of the new one then.
    """
    kept = target / EDITED_CARD_FILE
    with suppress(T2NError, OSError):
        if is_edited(target, read_manifest(target)):
            kept = target / CARD_FILE
        if kept.is_file():
            (staging / EDITED_CARD_FILE).write_bytes(kept.read_bytes())
            return kept.name == CARD_FILE
    return False


def _rendered(folder: Path, manifest: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        return render_card(read_card(folder, manifest))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        raise ArchiveError(
            f"{folder}: its {MANIFEST_NAME} says too little for a card ({type(error).__name__}: {error}).",
            "Export the model again.",
        ) from error


def _replace(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write card and `export.json`; who is killed between the two finds a card that counts as edited."""
    text = _rendered(folder, manifest)
    _write(folder / CARD_FILE, text)
    noted = {**manifest, "card": {"file": CARD_FILE, "sha256": _sha256(text.encode())}}
    _write(folder / MANIFEST_NAME, json_text(noted, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(text, encoding="utf-8")
        if path.is_file():
            beside.chmod(path.stat().st_mode & 0o777)
        os.replace(beside, path)
    except OSError as error:
        raise ArchiveError(
            f"{path}: cannot be written: {error.strerror}.", "Copy the folder to where you may write."
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- Markdown -------------------------------------------------------------------------------------


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=False,  # Markdown: names go through `text` and `code`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size_text, text=_text, code=_code, shape=_shape, figure=_figure)
    return environment


def _text(value: object) -> str:
    """Return a name as text of one line, in which no mark or tag is seen."""
    said = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(r"\\\1", said)


def _code(value: object) -> str:
    """Return a name as code of one line."""
    said = " ".join(str(value).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", said)), default=0))
    space = " " if said.startswith("`") or said.endswith("`") else ""
    return f"{fence}{space}{said}{space}{fence}"


def _shape(sizes: tuple[str, ...] | None) -> str:
    return _code(f"[{', '.join(size or '?' for size in sizes)}]") if sizes is not None else ""


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


__all__ = [
    "card_text",
    "is_edited",
    "keep_edited",
    "note",
    "render_card",
    "with_card",
    "write_card",
]
