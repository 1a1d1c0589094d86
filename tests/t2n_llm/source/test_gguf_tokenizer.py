"""The tokenizer of a GGUF file: built once for a file, kept by its metadata, and the same from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from t2n_llm.source import gguf_tokenizer
from t2n_llm.source.hub import open_source
from tests.gguf_files import write_llama_gguf

KINDS = {"token_embd": "F16"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that keeps tiny tokenizers too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_tokenizer, "_WORTH_KEEPING", 0.0)
    return gguf_tokenizer.kept_tokenizers()


def told(path: Path, **options: bool) -> tuple[list[str], dict[str, bytes]]:
    """What is told while a file is opened, and its tokenizer's files."""
    said: list[str] = []
    source = open_source(str(path), tell=said.append, **options)
    return said, {file.name: file.read_bytes() for file in source.tokenizer_files()}


def test_it_is_built_once(cache: Path, tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "a.gguf", KINDS)
    said, built = told(tmp_path / "a.gguf")
    assert said == ["Building the tokenizer of a.gguf"] and "tokenizer.json" in built
    assert told(tmp_path / "a.gguf") == ([], built)
    assert len(list(cache.iterdir())) == 1
    assert open_source(str(tmp_path / "a.gguf")).tokenizer().tokenize("12") == ["12"]


def test_another_file_has_its_own(cache: Path, tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "a.gguf", KINDS)
    write_llama_gguf(tmp_path / "b.gguf", KINDS, tied=False)  # one more tensor in the header
    told(tmp_path / "a.gguf")
    assert told(tmp_path / "b.gguf")[0] == ["Building the tokenizer of b.gguf"]
    assert len(list(cache.iterdir())) == 2


def test_the_least_recently_used_go(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_KEPT", 2)
    for number, name in enumerate("abc"):
        write_llama_gguf(tmp_path / f"{name}.gguf", {"token_embd": ("F16", "F32", "BF16")[number]})
        told(tmp_path / f"{name}.gguf")
    assert len(list(cache.iterdir())) == 2
    assert told(tmp_path / "c.gguf")[0] == []


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    write_llama_gguf(tmp_path / "a.gguf", KINDS)
    for _ in range(2):
        said, files = told(tmp_path / "a.gguf")
        assert said == ["Building the tokenizer of a.gguf"] and "tokenizer.json" in files


def test_a_file_without_one_is_not_kept(cache: Path, tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "bare.gguf", KINDS, tokenizer=False)
    assert told(tmp_path / "bare.gguf", require_tokenizer=False)[1] == {}
    assert not cache.exists()
