"""User pages and measurements: sentence length, American spelling, and phrases that are never right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import pages

PAGES = [*pages.user_pages(), *pages.measurement_pages(), *pages.examples()]
LONGEST_SENTENCE = 30
LONGEST_MEAN = 18.0

# Phrases that are wrong in every technical text; terms that may be right do not belong here.
NEVER_RIGHT = (
    "nobody",
    "somebody",
    "whoever",
    "beside other work",
    "element type",
    "what comes of",
    "it was not waited for",
    "of no matter",
    "is told",
    "a turn",
)
# Parts of words in British spelling.
BRITISH = ("quantis", "optimis", "normalis", "recognis", "initialis", "behaviour", "colour", "licence", "centre ")


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_sentences_are_short(page: Path) -> None:
    found = list(pages.sentences(page.read_text(encoding="utf-8")))
    lengths = [len(sentence.split()) for sentence in found]
    assert not [sentence for sentence, length in zip(found, lengths, strict=True) if length > LONGEST_SENTENCE]
    assert not lengths or sum(lengths) / len(lengths) <= LONGEST_MEAN


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_no_phrase_that_is_never_right(page: Path) -> None:
    text = pages.without_code(pages.written_by_hand(page.read_text(encoding="utf-8"))).lower()
    prose = re.sub(r"`[^`]*`", "", text)
    assert not [phrase for phrase in (*NEVER_RIGHT, *BRITISH) if re.search(rf"\b{re.escape(phrase)}", prose)]


@pytest.mark.parametrize("page", pages.user_pages(), ids=pages.name_of)
def test_no_state_of_the_measuring_machine_in_user_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [phrase for phrase in ("busy machine", "idle machine", "medians of") if phrase in text]


def _messages(path: Path) -> Iterator[str]:
    """Yield the text of every string of several words in a module, without docstrings and placeholders."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings and " " in str(node.value).strip():
            yield str(node.value).lower()


@pytest.mark.parametrize("package", ["generic_export", "kvcache", "quant", "t2n_llm"])
def test_no_message_has_such_a_phrase(package: str) -> None:
    phrases = [phrase for phrase in (*NEVER_RIGHT, *BRITISH) if phrase != "a turn"]  # chats have turns
    wrong = re.compile("|".join(rf"\b{re.escape(phrase)}" for phrase in phrases))
    found = [
        f"{path.relative_to(pages.ROOT)}: {text}"
        for path in sorted((pages.ROOT / package).rglob("*.py"))
        for text in _messages(path)
        if wrong.search(text)
    ]
    assert not found


def test_what_a_sentence_is() -> None:
    text = "# A heading. Two.\n\nOne `x. Y` here. Two (e.g. this).\n\n* Item one\n* [Item](x.md) two.\n\n| a. B |\n```\nNo.\n```\n"
    assert list(pages.sentences(text)) == ["One code here.", "Two (e.g. this).", "Item one", "Item two."]
