"""`export --task image-text-to-text`: three archives that say together what transformers' model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generic_export.errors import OptionError, UnknownArchitectureError
from t2n_llm.answers import open_answerer
from t2n_llm.folder import read_manifest
from t2n_llm.manifest import recorded_states
from t2n_llm.multimodal import MultimodalResult, export_multimodal, validate_multimodal_folder
from t2n_llm.multimodal.check import Pipeline, plan_prompts
from t2n_llm.multimodal.families import family_of
from t2n_llm.options import parse_options
from t2n_llm.revalidate import ValidateOptions
from t2n_llm.tasks import IMAGE_TEXT_TO_TEXT
from t2n_llm.verify import verify_export
from tests.t2n_llm.command_line import call

WINDOW = 8

_TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "initializer_range": 0.12,
}
_IDEFICS: dict[str, Any] = {
    "vision_config": _VISION,
    "text_config": {"model_type": "llama", **_TEXT},
    "image_token_id": 150,
    "scale_factor": 2,
}
_GEMMA_TEXT = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": _IDEFICS | {"tie_word_embeddings": False},
    "idefics3": _IDEFICS | {"tie_word_embeddings": True},
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "text_config": {**_TEXT, **_GEMMA_TEXT, "num_hidden_layers": 7},
        "image_token_index": 160,  # beyond the table of embeddings
        "mm_tokens_per_image": 4,
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "initializer_range": 0.12,
        },
        "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "image_token_id": 150,
        "video_token_id": 151,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    },
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random checkpoint of a family; each is made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = _save(family, tmp_path_factory.mktemp("vlm") / family)
        return made[family]

    return make


def _save(family: str, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "mm_input_projection" in name:  # away from their neutral start
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def exported(source: Path, target: Path, **options: Any) -> MultimodalResult:
    chosen = parse_options(task=IMAGE_TEXT_TO_TEXT, require_tokenizer=False, **({"dtype": "f32"} | options))
    return export_multimodal(str(source), target, options=chosen)


@pytest.mark.parametrize("family", CONFIGS)
def test_images_text_and_decoding_agree_with_transformers(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"image_size": 24} if family == "qwen2_5_vl" else {}  # windows of 2 x 2, the last ones narrower
    result = exported(checkpoint(family), tmp_path / "out", **options)
    assert result.validation is not None
    checks = {check.name: check for check in result.validation.checks}
    assert list(checks) == ["one image", "two images, in chunks", "text alone"]
    for check in checks.values():
        assert check.passed
        assert len(check.steps) == check.same_top1 == 9
        assert check.max_abs_error <= 1e-4
        assert min(step.scale for step in check.steps) > 1


def test_f16_archives(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = exported(checkpoint("smolvlm"), tmp_path / "out", dtype="f16")
    assert result.validation is not None
    assert result.validation.passed
    assert all(check.max_abs_error > 0 for check in result.validation.checks)


@pytest.fixture(scope="module")
def gemma(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of Gemma 3, unchecked."""
    return exported(checkpoint("gemma3"), tmp_path_factory.mktemp("vlm-out") / "gemma", check=False).output_dir


def test_what_is_seen_and_in_which_order_matters(
    gemma: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config, manifest = AutoConfig.from_pretrained(checkpoint("gemma3")), read_manifest(gemma)
    family = family_of(config)
    _, both, _ = plan_prompts(config, family)
    files = {role: gemma / part["archive"] for role, part in manifest["parts"].items()}
    with (
        open_answerer(files["embed"]) as embed,
        open_answerer(files["vision"]) as vision,
        open_answerer(files["decoder"]) as decoder,
    ):
        parts = {"embed": embed, "vision": vision, "decoder": decoder}
        pipeline = Pipeline(parts, family, config, recorded_states(manifest))
        (cut,) = pipeline.answer(both, ())
        (whole,) = pipeline.answer(replace(both, cut=0), ())
        (swapped,) = pipeline.answer(replace(both, pixels=both.pixels[::-1].copy()), ())
    np.testing.assert_allclose(cut, whole, atol=1e-4)
    assert np.abs(cut - swapped).max() > 1e-2


def test_the_manifest_says_how_the_archives_connect(gemma: Path, checkpoint: Callable[[str], Path]) -> None:
    manifest = read_manifest(gemma)
    assert manifest["task"] == IMAGE_TEXT_TO_TEXT
    assert [part["archive"] for part in manifest["parts"].values()] == [
        "embed.nnef.tar",
        "vision.nnef.tar",
        "decoder.nnef.tar",
    ]
    assert manifest["parts"]["embed"]["graph"]["inputs"] == ["input_ids"]
    assert manifest["parts"]["vision"]["graph"]["inputs"] == ["pixel_values"]
    assert manifest["graph"]["inputs"][:3] == ["inputs_embeds", "token_type_ids", "in_cache_key_0"]
    connection = manifest["multimodal"]
    assert connection["image_token_id"] == 160
    assert connection["rows_per_image"] == 4
    assert connection["pixel_values"]["shape"] == ["N", 3, 16, 16]
    assert connection["order"] == ["embed", "vision", "decoder"]


def test_the_folder_is_verified_and_validated_as_others(
    gemma: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    report = verify_export(gemma)
    assert report.passed
    parts = read_manifest(gemma)["parts"]
    assert report.tensors == sum(len(part["tensors"]) for part in parts.values())
    assert verify_export(gemma / "vision.nnef.tar").tensors == len(parts["vision"]["tensors"])
    assert validate_multimodal_folder(gemma, str(checkpoint("gemma3"))).passed


def test_damage_to_any_archive_is_found(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = exported(checkpoint("idefics3"), tmp_path / "out", check=False).output_dir
    for role in ("embed", "vision", "decoder"):
        archive = folder / f"{role}.nnef.tar"
        whole = archive.read_bytes()
        middle = len(whole) // 2
        archive.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert not verify_export(folder).passed
        archive.write_bytes(whole)
    assert verify_export(folder).passed


def test_the_command_line(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = call(
        "export", checkpoint("smolvlm"), "-o", target, "--task", IMAGE_TEXT_TO_TEXT, "--dtype", "f32", "--no-tokenizer"
    )
    assert done.code == 0, done.err
    assert "one image" in done.out
    assert "vision" in done.out
    again = call("validate", target, "--reference", checkpoint("smolvlm"))
    assert again.code == 0, again.err
    assert call("validate", target, "--reference", checkpoint("smolvlm"), "--atol", "1e-12").code == 1
    assert call("verify", target).code == 0
    assert "has no meaning for it" in call("generate", target, "Hello").line("error")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": "q4_0"}, "does not compress"),
        ({"batch": True}, "a batch of 1"),
        ({"num_logits_to_keep": 0}, "the last position's logits"),
        ({"image_size": 32}, "images have 16 pixels"),
    ],
)
def test_what_has_no_meaning_is_refused(
    options: dict[str, Any], words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=words):
        exported(checkpoint("smolvlm"), tmp_path / "out", **options)


def test_a_model_without_images_is_explained(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="of type 'llama' have no export yet"):
        exported(tiny_llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_do_not_divide_into_patches_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--image-size 20: this model takes multiples of 8 pixels"):
        exported(checkpoint("qwen2_5_vl"), tmp_path / "out", image_size=20)


def test_positions_are_those_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint("qwen2_5_vl")).model
    family = family_of(model.config, 24)
    image = family.image_token_id(model.config)
    ids = torch.tensor([[5, 6, *[image] * 9, 7, *[image] * 9, 8, 9, 10]])
    is_image = ids == image
    expected, delta = model.get_rope_index(ids, is_image.int(), torch.tensor([[1, 6, 6]] * 2))
    first, following = family.positions(model.config, is_image[0, :12].numpy(), 0)
    second, end = family.positions(model.config, is_image[0, 12:].numpy(), following)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=2), expected.numpy())
    assert end == ids.shape[1] + int(delta)


def test_the_command_line_engine_agrees_too(gemma: Path, checkpoint: Callable[[str], Path]) -> None:
    from generic_export.inference_target.tract.install import find_tract_cli

    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    assert validate_multimodal_folder(gemma, str(checkpoint("gemma3")), options=ValidateOptions(engine="cli")).passed
