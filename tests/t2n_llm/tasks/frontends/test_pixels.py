"""Pixels cut, scaled and shifted in the engine, as transformers' own image processors do it; what does more has no graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from tests.frontend_archives import source_with, written

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
_VALUES = "pixel_values"


def _processor(name: str, settings: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(**settings)


_SQUARE = {"height": 24, "width": 24}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[int, int], bool]] = {
    # processor, its settings, the size of what it gives, whether pictures have several sizes
    "of one size": ("ViT", {"size": _SQUARE}, (24, 24), False),
    "another mean for each colour": ("Siglip", {"size": _SQUARE, "image_mean": [0.1, 0.5, 0.8]}, (24, 24), False),
    "neither square": ("ViT", {"size": {"height": 16, "width": 40}}, (16, 40), False),
    "the middle": ("CLIP", {"size": {"shortest_edge": 32}, "crop_size": {"height": 25, "width": 22}}, (25, 22), True),
    "the middle of one size": ("DeiT", {"size": {"height": 32, "width": 32}, "crop_size": _SQUARE}, (24, 24), False),
    "a share of the size": ("ConvNext", {"size": {"shortest_edge": 28}, "crop_pct": 0.875}, (28, 28), True),
    "colours backwards": ("MobileViT", {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}, (24, 24), True),
    "an edge": ("Detr", {"size": {"shortest_edge": 64, "longest_edge": 96}}, (64, 64), True),
    "filled up": ("Sam", {"size": {"longest_edge": 64}, "pad_size": {"height": 64, "width": 64}}, (64, 64), True),
    "tiles": ("Idefics3", {"max_image_size": {"longest_edge": 28}}, (28, 28), False),
    "from -1": ("EfficientNet", {"size": _SQUARE, "rescale_offset": True, "include_top": False}, (24, 24), False),
    "scaled alone": ("RTDetr", {"size": _SQUARE}, (24, 24), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_pictures_agree_with_the_processor(name: str, tmp_path: Path) -> None:
    processor, settings, size, sizes = KINDS[name]
    archive = written(tmp_path, _processor(processor, settings), "vit", _VALUES)
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 2 and all(check.passed and check.max_abs_error < 2e-5 for check in checks)
    assert archive.front.cases(np.random.default_rng(0))[1].expected[0].shape[-2:] == size
    assert ("H" in archive.front.dynamic_axes["pixels"].values()) == sizes


def test_the_description_says_how_to_resize(tmp_path: Path) -> None:
    settings = {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "resample": 3, "image_mean": [0.5, 0.4, 0.3]}
    described = written(tmp_path, _processor("CLIP", settings), "clip", _VALUES).front.described()
    assert described["resize"] == {"shortest_edge": 32, "filter": "bicubic"}
    assert described["crop"] == [24, 24] and described["image_mean"] == [0.5, 0.4, 0.3]
    assert described["inputs"]["pixels"].startswith("uint8 [B, H, W, 3]")


def test_a_crop_takes_the_middle_of_any_size(tmp_path: Path) -> None:
    settings = {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "do_normalize": False}
    archive = written(tmp_path, _processor("CLIP", settings), "clip", _VALUES)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 33, 47, 3), dtype=np.uint8)
    with open_archive_session(archive.path) as answerer:
        (values,) = answerer.answer([pixels])
    np.testing.assert_allclose(values[0], pixels[0, 4:28, 11:35].transpose(2, 0, 1) / 255, atol=1e-6)


def test_f16_pixels(tmp_path: Path) -> None:
    archive = written(tmp_path, _processor("ViT", {"size": _SQUARE}), "vit", _VALUES, dtype="f16", activations="f16")
    assert all(check.passed and check.max_abs_error > 0 for check in check_frontend(archive.path, archive.front, "f16"))


@pytest.mark.parametrize("name", ["ImageGPT", "LlavaNext"])  # colours as clusters; a picture becomes several
def test_what_does_more_has_no_graph(name: str, tmp_path: Path) -> None:
    settings = {"clusters": np.zeros((4, 3)).tolist()} if name == "ImageGPT" else {}
    source = source_with(tmp_path, _processor(name, settings), "vit")
    assert frontend_of(source, GraphOptions(), _VALUES) is None
    assert (
        frontend_of(source_with(tmp_path, _processor("ViT", {}), "vit"), GraphOptions(frontend=False), _VALUES) is None
    )
