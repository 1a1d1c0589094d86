"""Images that a text reads by cross-attention: which rows each token sees, and what the processor makes of an image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from generic_export.errors import OptionError
from t2n_llm.tasks.multimodal.cross_attention import rows_seen
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.processed import items_of
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import build_tiny_model

_TILES = 4


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.data())
def test_tokens_see_the_tiles_that_transformers_says(is_image: list[bool], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(1, _TILES)) for _ in range(sum(is_image))]
    real = np.array([tile < count for count in counts for tile in range(_TILES)], np.float32).reshape(-1, 1)
    seen = rows_seen(np.array(is_image), real)
    assert seen.shape == (len(is_image), len(real))
    some = np.arange(len(is_image) // 2, len(is_image))
    np.testing.assert_array_equal(rows_seen(np.array(is_image), real, some), seen[some])
    if counts:
        sparse = get_cross_attention_token_mask([int(each) for each in is_image], 1)
        dense = convert_sparse_cross_attention_mask_to_dense([sparse], [counts], _TILES, len(is_image))
        np.testing.assert_array_equal(seen, dense.reshape(seen.shape))


def test_images_of_any_aspect_ratio_are_one_row_that_the_model_reads_apart() -> None:
    from transformers import MllamaImageProcessor

    config = tiny_config("mllama", IMAGE_TEXT_TO_TEXT)
    family = family_of(config)
    images = [Image.new("RGB", size, (90, 60, 30)) for size in ((32, 32), (60, 30), (20, 90))]
    made = MllamaImageProcessor(size={"height": 32, "width": 32}, max_image_tiles=_TILES)([images], return_tensors="pt")
    items = items_of(made, family)
    assert [item.shape for item in items] == [(_TILES * 3 * 32**2 + 1 + _TILES,)] * 3
    is_image = torch.tensor([[False, True, False, True, True, False]])
    given = family.reference_inputs(is_image, [torch.from_numpy(item) for item in items])
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        torch.testing.assert_close(given[name], made[name])
    tiles = made["aspect_ratio_mask"][0].sum(dim=1).tolist()
    assert given["cross_attention_mask"].sum(dim=3)[0].tolist() == [
        [0, 0, 0],
        [tiles[0], 0, 0],
        [tiles[0], 0, 0],
        [0, tiles[1], 0],
        [0, tiles[1], tiles[2]],
        [0, tiles[1], tiles[2]],
    ]
    with pytest.raises(OptionError, match="images of any size"):
        family_of(config, 64)


def test_keys_and_values_are_those_of_the_layers() -> None:
    model = build_tiny_model("mllama", task=IMAGE_TEXT_TO_TEXT)
    family = family_of(model.config)
    image = family.random_image(np.random.default_rng(0))
    assert image is not None
    rows = torch.from_numpy(image)[None]
    with torch.no_grad():
        *tables, real = family.encoder(model).encode(rows, {})
        ids = torch.tensor([[5, family.image_token_id, 6]])
        given = family.reference_inputs(ids == family.image_token_id, [rows[0]])
        cache = model(input_ids=ids, **given, use_cache=True).cache
    wanted = [
        tensor for layer in family.cross_layers for tensor in (cache.layers[layer].keys, cache.layers[layer].values)
    ]
    for table, tensor in zip(tables, wanted, strict=True):
        torch.testing.assert_close(table, tensor[0].transpose(0, 1).flatten(1))
    assert real.sum() == given["aspect_ratio_mask"].sum() * model.model.vision_model.num_patches
