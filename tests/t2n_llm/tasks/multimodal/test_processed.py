"""What processors make of images, in the form that archives take: padding removed, other sizes refused with the one that fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from generic_export.errors import OptionError
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.family import MODALITY_TYPES
from t2n_llm.tasks.multimodal.processed import items_of
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.configs import tiny_config


def _pictures(side: int) -> list[Image.Image]:
    values = np.random.default_rng(0).integers(0, 255, (2, side, side, 3), np.uint8)
    return [Image.fromarray(each) for each in values]


def test_patches_of_several_images_are_told_apart() -> None:
    from transformers import Qwen2VLImageProcessor

    config = tiny_config("qwen2_vl", IMAGE_TEXT_TO_TEXT)
    processor = Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096)
    family = family_of(config, 48)
    made = processor(_pictures(48), return_tensors="pt")
    items = items_of(made, family)
    assert [item.shape for item in items] == [(36, 384)] * 2
    np.testing.assert_array_equal(np.concatenate(items), made["pixel_values"])
    assert items_of({}, family) == ()


def test_images_of_any_size_keep_their_grids() -> None:
    from transformers import Qwen2VLImageProcessor

    config = tiny_config("qwen2_vl", IMAGE_TEXT_TO_TEXT)
    processor = Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=65536)
    family = family_of(config)
    pictures = [Image.new("RGB", size) for size in ((48, 96), (64, 32))]
    made = processor(pictures, return_tensors="pt")
    items = items_of(made, family)
    assert [item.shape for item in items] == [(6, 3, 4, 384), (2, 4, 4, 384)]
    np.testing.assert_array_equal(np.concatenate([item.reshape(-1, 384) for item in items]), made["pixel_values"])
    known = family.known([item.shape for item in items])
    np.testing.assert_array_equal(known["image_grid_thw"], made["image_grid_thw"])
    assert [family.rows_of_image(item.shape) for item in items] == [18, 8]
    video = {**made, "image_grid_thw": np.array([[2, 12, 3], [1, 4, 8]])}
    with pytest.raises(OptionError, match="makes a video"):
        items_of(video, family)


def test_the_size_that_a_processor_keeps_is_named() -> None:
    from transformers import Qwen2VLImageProcessor

    config = tiny_config("qwen2_vl", IMAGE_TEXT_TO_TEXT)
    processor = Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=4096, max_pixels=4096)
    made = processor(_pictures(32), return_tensors="pt")
    with pytest.raises(OptionError, match=r"takes \[16, 384\], that of 32 x 32 pixels") as refused:
        items_of(made, family_of(config, 32))
    assert refused.value.hint == "Export the model again with --image-size 64."


def _gemma4(image_size: int) -> tuple[Any, Any]:
    from transformers import Gemma4ImageProcessor

    config = tiny_config("gemma4", IMAGE_TEXT_TO_TEXT)
    vision = config.vision_config
    processor = Gemma4ImageProcessor(
        patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size, max_soft_tokens=70
    )
    return processor(_pictures(image_size), return_tensors="pt"), family_of(config, image_size)


def test_rows_that_fill_up_an_image_are_left_out() -> None:
    with pytest.raises(OptionError) as refused:
        items_of(*_gemma4(48))
    assert refused.value.hint is not None
    kept = int(refused.value.hint.rstrip(".").split()[-1])
    made, family = _gemma4(kept)
    items = items_of(made, family)
    rows = items[0].shape[1]
    assert rows < made["pixel_values"].shape[1]
    np.testing.assert_array_equal(np.stack(items)[:, 0], made["pixel_values"][:, :rows])


def _of_two_sizes(name: str) -> tuple[Any, Any]:
    """Return what a processor makes of two pictures, and the config of a tiny model that reads it."""
    import transformers

    pictures = [Image.new("RGB", size, (90, 60, 30)) for size in ((48, 96), (64, 32))]
    config = tiny_config(name, IMAGE_TEXT_TO_TEXT)
    patch = config.vision_config.patch_size
    if name == "mistral3":
        unit = patch * config.spatial_merge_size
        processor = transformers.PixtralImageProcessor(patch_size=unit, size={"longest_edge": 96})
    elif name == "gemma4":
        pooled = config.vision_config.pooling_kernel_size
        processor = transformers.Gemma4ImageProcessor(patch_size=patch, pooling_kernel_size=pooled, max_soft_tokens=70)
    else:  # LFM2-VL's own needs torchvision
        processor = transformers.Siglip2ImageProcessor(patch_size=patch, max_num_patches=64)
    return processor(pictures, return_tensors="pt"), config


def _told_sizes(name: str, made: Any) -> Any:
    """Return the height and width of each image, as its processor says them."""
    if name == "gemma4":
        return np.asarray(made["image_position_ids"]).max(axis=1)[:, ::-1] + 1
    return made["image_sizes"] if name == "mistral3" else made["spatial_shapes"]


@pytest.mark.parametrize("name", ["lfm2_vl", "mistral3", "gemma4"])
def test_what_fills_up_smaller_images_is_left_out(name: str) -> None:
    made, config = _of_two_sizes(name)
    family = family_of(config)
    first, second = items_of(made, family)
    sizes = [[image.shape[axis] for axis in family.free_axes] for image in (first, second)]
    assert (
        first.size < np.asarray(made["pixel_values"][0]).size or second.size < np.asarray(made["pixel_values"][1]).size
    )
    np.testing.assert_array_equal(sizes, np.asarray(_told_sizes(name, made)))
    for image, (height, width) in zip((first, second), sizes, strict=True):
        rows = eval(str(family.row_count), {"H": height, "W": width})
        assert int(rows) == family.rows_of_image(image.shape)
    images = [torch.from_numpy(image) for image in (first, second)]
    again = family.reference_inputs(torch.ones((1, 1), dtype=torch.bool), images)
    for key in again.keys() - {MODALITY_TYPES}:  # that one is of the prompt, not of its images
        value = again[key]
        np.testing.assert_array_equal(value, made[key][tuple(slice(size) for size in value.shape)])


def test_an_image_in_two_sizes_is_one_row_that_the_model_reads_apart() -> None:
    from transformers import DeepseekVLHybridImageProcessorPil

    config = tiny_config("deepseek_vl_hybrid", IMAGE_TEXT_TO_TEXT)
    config.high_res_vision_config.image_size = 128
    sizes = {name: {"height": side, "width": side} for name, side in (("size", 64), ("high_res_size", 128))}
    made = DeepseekVLHybridImageProcessorPil(**sizes)(_pictures(48), return_tensors="pt")
    family = family_of(config)
    items = items_of(made, family)
    assert [item.shape for item in items] == [(3 * (64**2 + 128**2),)] * 2
    given = family.reference_inputs(torch.zeros(1, 1), [torch.from_numpy(item) for item in items])
    for name in ("pixel_values", "high_res_pixel_values"):
        torch.testing.assert_close(given[name], made[name])
    made["high_res_pixel_values"] = made["high_res_pixel_values"][..., :64]
    with pytest.raises(OptionError, match=r"makes high_res_pixel_values of shape \[2, 3, 128, 64\]"):
        items_of(made, family)


def test_tiles_with_a_mask_of_their_own_are_read_one_by_one() -> None:
    from transformers import GraniteDoclingImageProcessorPil

    pages = [Image.new("RGB", size, (90, 60, 30)) for size in ((128, 64), (64, 64))]
    made = GraniteDoclingImageProcessorPil(size={"height": 64, "width": 64})([pages], return_tensors="pt")
    family = family_of(tiny_config("granite_docling", IMAGE_TEXT_TO_TEXT))
    items = items_of(made, family)
    assert [item.shape for item in items] == [(1, 3, 64, 64)] * 4
    given = family.reference_inputs(torch.zeros(1, 1), [torch.from_numpy(item) for item in items])
    for name in ("pixel_values", "pixel_attention_mask"):
        torch.testing.assert_close(given[name], made[name])


def test_images_that_become_codes_may_have_any_size_of_whole_codes() -> None:
    family = family_of(tiny_config("apertus1p5", IMAGE_TEXT_TO_TEXT))
    assert family.row_count == "(H/16)*(W/16)"
    pixels = np.random.default_rng(0).standard_normal((2, 3, 64, 96))  # the processor fills up smaller images
    items = items_of({"pixel_values": pixels, "image_sizes": np.array([[64, 32], [48, 96]])}, family)
    assert [item.shape for item in items] == [(1, 3, 64, 32), (1, 3, 48, 96)]
    assert [family.rows_of_image(item.shape) for item in items] == [8, 18]
