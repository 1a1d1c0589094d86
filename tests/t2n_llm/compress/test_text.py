"""The tokens of a calibration: from a file, from the package, or written by the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import ByteLevel

from generic_export.errors import MissingTokenizerError, OptionError
from t2n_llm.compress import text
from t2n_llm.compress.text import builtin_text, calibration_ids, spread_ids
from t2n_llm.source.hub import ModelSource, open_source, opening_ids
from tests.t2n_llm.compress.test_calibrate import load
from tests.trained_model import REAL_MODEL


def without_opening(model: Path, folder: Path) -> Path:
    """Copy a model; its tokenizer puts nothing before a text."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = ByteLevel()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source(str(REAL_MODEL))


def test_the_builtin_text_is_long_varied_and_ships_with_the_package(source):
    whole = builtin_text()
    assert 60_000 < len(whole) < 150_000
    assert all(sample in whole for sample in ("#include", "User:", "Bibliothek", "shall"))
    ids = calibration_ids("builtin", source, sequences=5, length=100)
    assert ids.shape == (5, 100) and ids.dtype == torch.int64
    assert torch.equal(ids, calibration_ids("builtin", source, sequences=5, length=100))


def test_a_file(source, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    ids = calibration_ids(str(path), source, sequences=3, length=50)
    assert ids.shape == (3, 50)
    decoded = source.tokenizer().decode(ids[0], skip_special_tokens=True)
    assert decoded.startswith("The quick brown fox")


def test_every_sequence_begins_as_the_tokenizer_begins_a_text(source, tmp_path):
    other = open_source(str(without_opening(REAL_MODEL, tmp_path / "other")))
    begin = source.config.bos_token_id
    assert opening_ids(source.tokenizer()) == [begin] and opening_ids(other.tokenizer()) == []
    ids = calibration_ids("builtin", source, sequences=5, length=100)
    assert ids[:, 0].eq(begin).all()
    assert torch.equal(ids[:, 1:], calibration_ids("builtin", other, sequences=5, length=99))
    assert calibration_ids("auto", source, sequences=3, length=24)[:, 0].eq(begin).all()
    assert not calibration_ids("auto", other, sequences=3, length=24)[:, 0].eq(begin).all()


def test_what_the_model_writes_is_the_same_every_time(source, monkeypatch):
    monkeypatch.setattr(text, "_AUTO_BATCH", 2)
    first, again = (calibration_ids("auto", source, sequences=3, length=24) for _ in range(2))
    assert first.shape == (3, 24)
    assert torch.equal(first, again) and len({tuple(row) for row in first.tolist()}) == 3
    assert int(first.min()) >= 0 and int(first.max()) < source.config.vocab_size


def test_it_is_text_that_the_model_expects(source):
    """Its own tokens surprise a model as much as it is unsure, no more: the mean of -log p is near the entropy."""
    ids = calibration_ids("auto", source, sequences=8, length=24)
    with torch.no_grad():
        said = load(REAL_MODEL)(ids).logits[:, 1:-1].log_softmax(-1)  # after the opening and a token drawn from all
    surprise = -said.gather(-1, ids[:, 2:].unsqueeze(-1)).mean()
    entropy = -(said.exp() * said).sum(-1).mean()
    assert abs(float(surprise - entropy)) < 0.5  # 176 tokens, each off by 2 or so


@pytest.mark.parametrize(
    ("count", "sequences", "length", "shape"),
    [(1000, 4, 100, (4, 100)), (350, 4, 100, (3, 100)), (70, 4, 100, (1, 70)), (400, 4, 100, (4, 100))],
)
def test_sequences_are_spread_without_overlap(count, sequences, length, shape):
    ids = spread_ids(list(range(count)), sequences, length)
    assert tuple(ids.shape) == shape
    assert len(set(ids.flatten().tolist())) == ids.numel()
    opened = spread_ids(list(range(count)), sequences, length + 2, opening=[-1, -2])
    assert torch.equal(opened[:, 2:], ids) and opened[:, :2].tolist() == [[-1, -2]] * len(ids)


def test_texts_that_cannot_be_used(source, tmp_path, tiny_llama):
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(OptionError, match="not enough"):
        calibration_ids(str(short), source)
    with pytest.raises(OptionError, match="not UTF-8"):
        calibration_ids(str(binary), source)
    with pytest.raises(OptionError, match="No such file"):
        calibration_ids(str(tmp_path / "absent.txt"), source)
    with pytest.raises(MissingTokenizerError):
        calibration_ids("builtin", open_source(str(tiny_llama), require_tokenizer=False))
