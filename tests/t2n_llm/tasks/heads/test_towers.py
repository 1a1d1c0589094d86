"""What compares images with texts, in three archives: together they are the whole, and each stands alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForZeroShotImageClassification

from generic_export.errors import OptionError
from generic_export.read.contents import read_contents
from generic_export.read.reading import read_graph_text, signature_of
from t2n_llm import export_llm
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.export.output import ExportResult
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model

_TASK = "zero-shot-image-classification"


@pytest.fixture(scope="module", params=["clip", pytest.param("siglip", marks=pytest.mark.nightly)])
def family(request: pytest.FixtureRequest) -> str:
    """A model type."""
    return str(request.param)


@pytest.fixture(scope="module")
def source(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of texts and images."""
    folder = tmp_path_factory.mktemp(family) / "model"
    save_tiny_model(shallow_model(family, _TASK), folder, _TASK)
    return folder


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """Its towers."""
    out = tmp_path_factory.mktemp("towers") / "out"
    return export_llm(str(source), out, task=_TASK, dtype="f32", require_tokenizer=False, towers=True)


def test_three_archives_are_the_whole(made: ExportResult, source: Path) -> None:
    assert made.validation is not None
    assert made.validation.passed
    assert list(made.archives) == ["text", "image", "scores"]
    stored = [{tensor.label for tensor in read_contents(path).tensors} for path in made.archives.values()]
    assert sum(map(len, stored)) == len(set().union(*stored)) > 0  # no weight lies in two of them
    assert validate_folder(made.output_dir, str(source)).passed


def test_another_model_is_noticed(made: ExportResult, family: str, tmp_path: Path) -> None:
    save_tiny_model(shallow_model(family, _TASK, seed=1), tmp_path / "other", _TASK)
    assert not validate_folder(made.output_dir, str(tmp_path / "other")).passed


def test_vectors_of_images_alone(made: ExportResult, source: Path) -> None:
    signature = signature_of(read_graph_text(made.archives["image"]))
    assert (signature.inputs, signature.outputs) == (("pixel_values",), ("image_embeds",))
    model = AutoModelForZeroShotImageClassification.from_pretrained(source).eval()
    side = model.config.vision_config.image_size
    pixels = torch.randn(3, 3, side, side)
    with torch.no_grad():
        ids = torch.arange(9, 16)[None]
        wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).image_embeds.numpy()
    with open_archive_session(made.archives["image"]) as image:
        (got,) = image.answer([pixels.numpy()])
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_other_tasks_have_no_towers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny_model(shallow_model("bert", "fill-mask"), folder, "fill-mask")
    with pytest.raises(OptionError, match="does not compare images with texts"):
        export_llm(str(folder), tmp_path / "out", task="fill-mask", require_tokenizer=False, towers=True)
