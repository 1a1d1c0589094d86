"""Pages of the documentation, and what of them is prose, code or a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
USER_FOLDERS = ("tutorials", "how-to", "reference", "explanation", "examples")

_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"<!-- ([\w -]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SKIP = re.compile(r"<!-- skip: ([^>]+) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: after the fence; "" where it has none.
        code: what is inside.
        skipped: why the tests do not run it; "" when they do.
        executed: whether the site runs it.
    """

    language: str
    code: str
    skipped: str
    executed: bool


def user_pages() -> list[Path]:
    """Return the pages for users."""
    inside = [page for folder in USER_FOLDERS for page in sorted((DOCS / folder).rglob("*.md"))]
    return [DOCS / "index.md", *inside]


def measurement_pages() -> list[Path]:
    """Return the pages of measurements."""
    return sorted((DOCS / "measurements").glob("*.md"))


def examples() -> list[Path]:
    """Return the README files of the repository and of its examples."""
    return [ROOT / "README.md", *sorted((ROOT / "examples").glob("*/README.md"))]


def name_of(page: Path) -> str:
    """Return how a page is called in messages and files."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        skip = _SKIP.search(text[: found.start()])
        yield Block(found[2], found[4], skip[1] if skip else "", "exec=" in found[3])


def without_code(text: str) -> str:
    """Return a page without fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", text))


def written_by_hand(text: str) -> str:
    """Return a page without what scripts write into it."""
    return _GENERATED.sub("", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of paragraphs and list items, not of headings, tables and code."""
    prose = without_code(written_by_hand(text))
    kept = [line for line in prose.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:\*|-|\d+\.) )", "\n".join(kept)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", " ".join(paragraph.split())))
        plain = re.sub(r"^(\*|-|\d+\.) ", "", plain)
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(0-9]|code)", plain):
            if len(sentence.split()) > 1:
                yield sentence
