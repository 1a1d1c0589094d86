"""Rows of images for layers of the decoder: after which layers they come, and in which order the encoder gives them."""

from __future__ import annotations

import torch

from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import build_tiny_model


def test_rows_are_for_the_first_layers_unless_a_config_names_others() -> None:
    assert family_of(tiny_config("granite_docling", IMAGE_TEXT_TO_TEXT)).deepstack_layers == (0, 1)
    assert family_of(tiny_config("granite4_vision", IMAGE_TEXT_TO_TEXT)).deepstack_layers == (-1, 0, 1, 2, 3)
    config = tiny_config("granite4_vision", IMAGE_TEXT_TO_TEXT)
    config.spatial_target_layers = [4, 0, 3, 1]  # 0 is taken: its later rows count
    assert family_of(config).deepstack_layers == (-1, 3, 2, 0)


def test_a_model_whose_rows_are_all_for_layers_gives_zeros_as_embeddings() -> None:
    model = build_tiny_model("granite4_vision", task=IMAGE_TEXT_TO_TEXT)
    family = family_of(model.config)
    pixels = torch.randn(family.pixel_shape)
    known = family.known([family.pixel_shape])
    with torch.no_grad():
        wanted = model.get_image_features(pixels, **known, return_dict=True).deepstack_features
        first, *layered = family.encoder(model).encode(pixels, known)
    assert not first.any()
    assert first.shape == layered[0].shape
    assert [layer - 1 for layer, _ in wanted] == list(family.deepstack_layers)
    for rows, (_, (image,)) in zip(layered, wanted, strict=True):
        torch.testing.assert_close(rows, image)
