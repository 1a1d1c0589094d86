"""The site: every page is in its navigation, pages that moved lead somewhere, links of README and examples are right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs import pages
from tests.load_script import load_script
from tests.test_citations import anchors

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[\w.-]+)?\)")


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"- ([\w/-]+\.md)$", (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {page.relative_to(pages.DOCS).as_posix() for page in pages.DOCS.rglob("*.md")}


def test_pages_that_moved_lead_to_pages_and_headings_that_are_there() -> None:
    redirects = tomllib.loads((pages.DOCS / "redirects.toml").read_text(encoding="utf-8"))
    for moved, places in redirects.items():
        assert not (pages.DOCS / moved).exists()
        assert "" in places
        for target in places.values():
            page, _, anchor = target.partition("#")
            assert (pages.DOCS / page).is_file(), target
            assert not anchor or anchor in anchors(pages.DOCS / page), target


QUESTIONS = {
    "export my GGUF": "how-to/quantized-checkpoints.md",
    "which format for a Raspberry Pi": "how-to/choose-a-format.md",
    "what does MismatchError mean": "how-to/troubleshooting.md",
    "run it in Node": "how-to/run-in-browser-and-node.md",
    "how much RAM": "how-to/large-models.md",
    "add my LoRA": "how-to/adapters.md",
    "my model is not supported": "reference/supported-models.md",
    "serve it": "how-to/serve.md",
    "why is q4_0 prefill slow": "how-to/faq.md#why-is-q4_0-prefill-slow",
    "use a GPU": "how-to/gpu.md",
}


def test_questions_of_newcomers_are_one_click_away() -> None:
    index = (pages.DOCS / "index.md").read_text(encoding="utf-8")
    assert not [question for question, target in QUESTIONS.items() if f"({target})" not in index]


def test_the_page_of_a_moved_address() -> None:
    hooks = load_script("site_hooks")
    text = hooks.redirect("tutorials/old.md", {"": "how-to/new.md", "part": "how-to/other.md#there"})
    assert '"../how-to/new.html"' in text and '{"part": "../how-to/other.html#there"}' in text


@pytest.mark.parametrize("page", pages.examples(), ids=pages.name_of)
def test_links_of_readme_and_examples(page: Path) -> None:
    text = pages.without_code(page.read_text(encoding="utf-8"))
    assert not [link for link in _LINK.findall(text) if not (page.parent / link).exists()]


def test_errors_in_troubleshooting_are_those_of_the_code() -> None:
    text = (pages.DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    packages = ("generic_export", "t2n_llm", "quant", "kvcache")
    code = "".join(
        file.read_text(encoding="utf-8") for folder in packages for file in (pages.ROOT / folder).rglob("*.py")
    )
    quoted = [part for line in re.findall(r"^### (.*)$", text, re.MULTILINE) for part in re.findall(r'"([^"]+)"', line)]
    errors = re.findall(r"`(\w+Error)`", text)
    of_tract = {"No possible scenario", "No specific pulse transformation"}
    assert len(quoted) > 20 and not [part for part in quoted if part not in of_tract and part not in code]
    assert not [error for error in errors if f"class {error}(" not in code]
