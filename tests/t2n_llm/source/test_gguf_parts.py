"""GGUF models in several parts: read as one, whichever part or folder is given; what is missing is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from generic_export.errors import CorruptCheckpointError, SourceError, WeightError
from generic_export.weights.values import read_tensor
from quant.prequantized import open_gguf
from t2n_llm.export.pipeline import export_llm
from t2n_llm.source.hub import open_config, open_source
from t2n_llm.weights.f32_model import load_dequantized
from tests.gguf_files import write_llama_gguf

KINDS = {"attn_q": "Q4_0", "ffn_up": "Q8_0", "token_embd": "F16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in one file, and in four."""
    whole, split = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("split")
    write_llama_gguf(whole / "tiny.gguf", KINDS, tied=False)
    write_llama_gguf(split / "tiny.gguf", KINDS, tied=False, tensors_a_part=6)
    return whole, split


def first(folder: Path) -> Path:
    return folder / "tiny-00001-of-00004.gguf"


def test_the_tensors_are_those_of_the_whole_file(folders: tuple[Path, Path]) -> None:
    whole, parts = open_gguf(folders[0] / "tiny.gguf"), open_gguf(first(folders[1]))
    assert [path.name for path in parts.paths] == [f"tiny-0000{number}-of-00004.gguf" for number in range(1, 5)]
    assert whole.tensors.keys() == parts.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert tensor.data.tobytes() == parts.tensors[name].data.tobytes(), name


@pytest.mark.parametrize("given", ["tiny-00001-of-00004.gguf", "tiny-00003-of-00004.gguf", ""])
def test_a_part_or_the_folder_is_the_model(folders: tuple[Path, Path], given: str) -> None:
    source = open_source(str(folders[1] / given))
    assert source.short_name == "tiny" and source.gguf == first(folders[1])
    assert not source.config.tie_word_embeddings
    whole = open_source(str(folders[0])).checkpoint()
    parts = source.checkpoint()
    assert whole.tensors.keys() == parts.tensors.keys() and len(parts.files) == 4
    for name, tensor in whole.tensors.items():
        assert torch.equal(read_tensor(tensor), read_tensor(parts.tensors[name])), name
    assert open_config(str(folders[1] / given)).config.to_dict() == source.config.to_dict()


def test_the_reference_of_the_parts_is_that_of_the_whole(folders: tuple[Path, Path]) -> None:
    whole, parts = load_dequantized(folders[0] / "tiny.gguf"), load_dequantized(first(folders[1]))
    assert whole is not None and parts is not None
    theirs = dict(whole.named_parameters())
    for name, parameter in parts.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_the_export_passes_its_checks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    result = export_llm(str(folders[1]), tmp_path / "export", archive="dir", decode_steps=4)
    assert result.validation is not None and result.validation.passed
    assert result.manifest["source"]["name"] == "tiny"


# --- what is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "tiny-00001-of-00004.gguf"])
def test_missing_parts_are_named(folders: tuple[Path, Path], tmp_path: Path, given: str) -> None:
    for number in (1, 3):
        shutil.copy(folders[1] / f"tiny-0000{number}-of-00004.gguf", tmp_path)
    expected = "of the 4 parts of tiny, tiny-00002-of-00004.gguf, tiny-00004-of-00004.gguf are missing"
    with pytest.raises(WeightError, match=expected):
        open_source(str(tmp_path / given))


@pytest.mark.parametrize("given", ["", "tiny-00003-of-00004.gguf"])
def test_a_missing_first_part_is_named(folders: tuple[Path, Path], tmp_path: Path, given: str) -> None:
    shutil.copy(folders[1] / "tiny-00003-of-00004.gguf", tmp_path)
    with pytest.raises(WeightError, match=r"of the 4 parts of tiny, tiny-00001-of-00004\.gguf, .* are missing"):
        open_source(str(tmp_path / given))


def test_a_part_with_another_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(first(folders[1]), tmp_path / "renamed.gguf")
    with pytest.raises(WeightError, match=r"one of 4 parts .* NAME-00001-of-00004\.gguf"):
        open_source(str(tmp_path / "renamed.gguf"))


def test_a_part_of_another_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[1], tmp_path, dirs_exist_ok=True)
    shutil.copy(folders[1] / "tiny-00004-of-00004.gguf", tmp_path / "tiny-00003-of-00004.gguf")
    with pytest.raises(CorruptCheckpointError, match=r"have 15 tensors, but the first says 21"):
        open_source(str(tmp_path))


def test_two_models_in_a_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[1], tmp_path, dirs_exist_ok=True)
    shutil.copy(folders[0] / "tiny.gguf", tmp_path / "other.gguf")
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"the vision tower of one of them")
    with pytest.raises(SourceError, match=r"2 GGUF models: other\.gguf, tiny-00001-of-00004\.gguf"):
        open_source(str(tmp_path))
