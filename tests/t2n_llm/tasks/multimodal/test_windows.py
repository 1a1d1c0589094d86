"""Attention within windows of images of any size: as transformers' sorted windows, and one graph for all sizes in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.tasks.multimodal.encoder import EncoderModule
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.windows import windows_filled_up
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_model import build_tiny_model

# Heights and widths in rows of embeddings, for windows of 2 x 2: less than one, whole ones, and some beyond one edge or both.
SIZES = ((1, 1), (2, 2), (4, 6), (3, 4), (5, 7), (1, 7))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "exaone4_5"])
def model(request: pytest.FixtureRequest) -> Any:
    found = build_tiny_model(request.param, task=IMAGE_TEXT_TO_TEXT).eval()
    found.set_attn_implementation("eager")
    return found


def _seen(model: Any, images: torch.Tensor, **further: Any) -> torch.Tensor:
    height, width, *_ = images.shape
    grid = torch.tensor([[1, 2 * height, 2 * width]])
    with torch.no_grad():
        found = model.base_model.get_image_features(images.flatten(0, 2), grid, return_dict=True, **further)
    return found.pooler_output[0]


def test_windows_that_are_filled_up_say_what_sorted_ones_say(model: Any) -> None:
    width = family_of(model.config).pixel_shape[-1]
    for size in SIZES:
        image = torch.randn(*size, 4, width)
        expected = _seen(model, image)
        with windows_filled_up(model, *size) as further:
            torch.testing.assert_close(_seen(model, image, **further), expected, atol=1e-4, rtol=0.0)
    assert not torch.allclose(_seen(model, image), _without_windows(model, image), atol=1e-3)


def _without_windows(model: Any, image: torch.Tensor) -> torch.Tensor:
    rows = image.shape[0] * image.shape[1]
    whole = torch.tensor([0, 4 * rows], dtype=torch.int32)
    return _seen(model, image, window_index=torch.arange(rows), cu_window_seqlens=whole)


def test_one_graph_has_windows_for_every_size(model: Any, tmp_path: Path) -> None:
    family = family_of(model.config)
    encoder = EncoderModule(model, family.encoder(model))
    width = family.pixel_shape[-1]
    archive = export_model_to_nnef(
        encoder,
        (torch.randn(4, 4, 4, width),),
        tmp_path / "vision",
        TractNNEF(dynamic_axes={"pixel_values": {0: "H", 1: "W"}}),
        input_names=["pixel_values"],
        compression_level=None,
    )
    with TractWheel().load(archive) as engine:
        for size in SIZES:
            image = torch.randn(*size, 4, width)
            (found,) = engine.run([image.numpy()])
            torch.testing.assert_close(torch.from_numpy(found), _seen(model, image), atol=1e-4, rtol=0.0)


def test_a_model_without_windows_is_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    with windows_filled_up(model, 2, 3) as further:
        assert further == {}
