"""Pixels become patches with their places in the engine, as transformers' Pix2Struct processor makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from tests.frontend_archives import source_with, written

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
_PATCHES = "flattened_patches"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_patches": 24, "patch_size": {"height": 4, "width": 4}},
        {"max_patches": 35, "patch_size": {"height": 8, "width": 4}},
        {"max_patches": 12, "patch_size": {"height": 4, "width": 4}, "do_normalize": False},
    ],
)
def test_patches_agree_with_the_processor(settings: dict, tmp_path: Path) -> None:
    processor = transformers.Pix2StructImageProcessorPil(**settings)
    archive = written(tmp_path, processor, "pix2struct", _PATCHES)
    assert archive.front.output_names == (_PATCHES, "attention_mask")
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 3 and all(check.passed for check in checks)


def test_fewer_patches_are_filled_up(tmp_path: Path) -> None:
    processor = transformers.Pix2StructImageProcessorPil(max_patches=40, patch_size={"height": 4, "width": 4})
    archive = written(tmp_path, processor, "pix2struct", _PATCHES)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 24, 24, 3), dtype=np.uint8)  # six by six of forty
    wanted = processor([pixels[0]], return_tensors="np")
    with open_archive_session(archive.path) as answerer:
        patches, mask = answerer.answer([pixels])
    np.testing.assert_allclose(patches, wanted[_PATCHES], atol=1e-5)
    assert mask.sum() == 36 and np.array_equal(mask, wanted["attention_mask"])


def test_a_question_written_over_the_picture_has_no_graph(tmp_path: Path) -> None:
    source = source_with(tmp_path, transformers.Pix2StructImageProcessorPil(is_vqa=True), "pix2struct")
    assert frontend_of(source, GraphOptions(), _PATCHES) is None
