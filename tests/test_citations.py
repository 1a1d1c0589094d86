"""What files of the repository cite is in the repository: pages of docs/ and their headings exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify, unique

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("generic_export", "quant", "kvcache", "t2n_llm", "tests", "scripts", "docs", "examples", ".ci", ".github")
SUFFIXES = (".md", ".py", ".sh", ".toml", ".yml", ".yaml")

# `docs/page.md` and `docs/page.md#heading`, as comments and messages name them; no part of a longer path or address.
_MENTION = re.compile(r"(?<![\w/.-])(docs/[\w/.-]+\.md)(?:#([\w-]+))?")
# `[text](page.md#heading)` and `[text](#heading)` in Markdown, without addresses (`https:`).
_LINK = re.compile(r"\]\(([\w/.-]+\.md)?(?:#([\w.-]+))?\)")
_FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_OUTSIDE = re.compile(r"\bfacts[/]|\bfacts [§]")


def files(*suffixes: str) -> list[Path]:
    """Return the files with these suffixes; with all of them, also the scripts without one. This file cites examples only."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "node_modules" not in path.parts]
    chosen = [path for path in (*ROOT.iterdir(), *inside) if path.suffix in suffixes]
    if suffixes == SUFFIXES:
        chosen += [path for path in inside if path.parent.name in ("scripts", ".ci") and not path.suffix]
    return sorted(path for path in chosen if path.is_file() and path != Path(__file__))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that mkdocs gives to the headings of a page."""
    used: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|<[^>]*>|[`*]", r"\1", heading)
        unique(slugify(text, "-"), used)
    return frozenset(used)


def missing(page: Path, anchor: str | None) -> bool:
    """Say whether there is no such page, or no such heading. Anchors of docs/api are made from docstrings."""
    if not page.is_file():
        return True
    return bool(anchor) and page.parent != ROOT / "docs" / "api" and anchor not in anchors(page)


def cited(path: Path) -> Iterator[tuple[Path, str | None, str]]:
    """Yield the page, the anchor and the text of each citation in a file."""
    text = path.read_text(encoding="utf-8")
    for found in _MENTION.finditer(text):
        yield ROOT / found[1], found[2], found[0]
    if path.suffix == ".md":
        for found in _LINK.finditer(_FENCED.sub("", text)):
            page = (path.parent / found[1]).resolve() if found[1] else path
            if found[1] or found[2]:
                yield page, found[2], found[0]


def test_cited_pages_and_headings_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in files(*SUFFIXES)
        for page, anchor, text in cited(path)
        if missing(page, anchor)
    ]
    assert not wrong


def test_no_citation_of_notes_outside_the_repository() -> None:
    assert not [
        str(path.relative_to(ROOT)) for path in files(*SUFFIXES) if _OUTSIDE.search(path.read_text(encoding="utf-8"))
    ]


def test_the_facts_about_the_engine_are_cited() -> None:
    facts = ROOT / "docs" / "contributing" / "engine-facts.md"
    named = {anchor for path in files(".py") for page, anchor, _ in cited(path) if page == facts}
    assert {"identifiers-and-literals", "the-attention-operator", "what-aborts-the-process"} <= named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# docs/page.md#a-heading", False),
        ("# docs/page.md", False),
        ("# (docs/page.md#not-a-heading).", True),
        ("# docs/page.md#in-a-fence", True),
        ("# docs/no-page.md", True),
        ("[there](docs/page.md#the-tract_core-one)", False),
        ("[here](docs/page.md#a-heading_1)", False),
        ("[here](docs/page.md#a-heading_2)", True),
        ("[here](#a-heading)", True),
        ("https://elsewhere.org/docs/no-page.md", False),
    ],
)
def test_a_wrong_citation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    (tmp_path / "docs").mkdir()
    headings = "# A heading\n## A heading\n### The `tract_core` one\n```bash\n# In a fence\n```\n"
    (tmp_path / "docs" / "page.md").write_text(headings)
    (tmp_path / "file.md").write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert any(missing(page, anchor) for page, anchor, _ in cited(tmp_path / "file.md")) is expected
