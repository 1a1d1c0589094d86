"""Models and exports that several tests read and none changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families import save_tiny_model

REAL_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-real"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with tied weights, in f32, without tokenizer."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the random Llama, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "source" / "model"))


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """The folder that exports go to; it is empty."""
    folder = tmp_path / "exports"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def tiny_export(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama exported in f32, checked."""
    return _export(tiny_llama, tmp_path_factory, dtype="f32", require_tokenizer=False)


@pytest.fixture(scope="session")
def real_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with its tokenizer and chat template, exported in f16."""
    return _export(REAL_MODEL, tmp_path_factory, check=False)


def _export(source: Path, factory: pytest.TempPathFactory, **options: object) -> Path:
    from t2n_llm.export import export_llm

    export: Callable = export_llm
    return Path(export(str(source), factory.mktemp("exported") / source.name, **options).output_dir)
