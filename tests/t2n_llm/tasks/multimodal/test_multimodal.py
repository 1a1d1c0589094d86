"""`export --task image-text-to-text`: three archives that say together what transformers' model says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generic_export.errors import CaptureError, OptionError, UnknownArchitectureError
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ExportOptions, ValidateOptions
from t2n_llm.export.pipeline import ExportResult, export_llm, plan_llm_export
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.export.verify import verify_export
from t2n_llm.graph.interface import recorded_states
from t2n_llm.tasks.multimodal.check import answers_of, plan_prompts
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.running import open_pipeline
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from t2n_llm.zoo.tiny_inputs import tiny_image_size
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from tests.families import COMMON, WINDOW, leave_neutral_start
from tests.t2n_llm.command_line import call, strict_json, unchanged

_TEXT: dict[str, Any] = COMMON | {"num_hidden_layers": 1}
_TWO_LAYERS = {"num_hidden_layers": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
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
_GEMMA_TEXT = (
    _TWO_LAYERS
    | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    | {"layer_types": ["sliding_attention", "full_attention"]}
)


def _qwen(vision: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "initializer_range": 0.12,
            **vision,
        },
        "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}, **text},
        "image_token_id": 150,
        "video_token_id": 151,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    }


_DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25}  # a table of 5 x 5 positions

CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": _IDEFICS | {"tie_word_embeddings": False},
    "idefics3": _IDEFICS | {"tie_word_embeddings": True},
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "text_config": {**_TEXT, **_GEMMA_TEXT},
        "image_token_index": 160,  # beyond the table of embeddings
        "mm_tokens_per_image": 4,
    },
    "voxtral": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "initializer_range": 0.12,
        },
        "text_config": {"model_type": "llama", **_TEXT, "head_dim": 24},
        "audio_token_id": 150,
    },
    "qwen2_audio": {
        "audio_config": {
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "initializer_range": 0.12,
        },
        "text_config": {"model_type": "qwen2", **_TEXT},
        "audio_token_id": 150,
    },
    "qwen2_5_vl": _qwen({"window_size": 16, "fullatt_block_indexes": [1]}, {}),
    "qwen3_vl": _qwen(_DEEPSTACK, {**_TWO_LAYERS, "head_dim": 24}),
    "qwen3_vl_moe": _qwen(
        _DEEPSTACK,
        {
            **_TWO_LAYERS,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
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
    from transformers import AutoConfig, AutoModelForMultimodalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    leave_neutral_start(model, "mm_input_projection")
    model.save_pretrained(folder)
    return folder


def exported(source: Path, target: Path, **options: Any) -> ExportResult:
    defaults = {"task": IMAGE_TEXT_TO_TEXT, "require_tokenizer": False, "dtype": "f32"}
    chosen = ExportOptions.of(**(defaults | options))
    return export_llm(str(source), target, options=chosen)


HEARS = ("voxtral", "qwen2_audio")
# None: of any size. 24 pixels: windows of 2 x 2, the last ones narrower, and positions between those of the table.
ANY_SIZE = {"qwen2_5_vl": (None, 24), "qwen3_vl": (24,), "qwen3_vl_moe": (None,)}
SIZES = [(family, size) for family in CONFIGS for size in ANY_SIZE.get(family, (None,))]


@pytest.mark.parametrize(("family", "image_size"), SIZES)
def test_images_text_and_decoding_agree_with_transformers(
    family: str, image_size: int | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    task, noun = (AUDIO_TEXT_TO_TEXT, "segment") if family in HEARS else (IMAGE_TEXT_TO_TEXT, "image")
    result = exported(checkpoint(family), tmp_path / "out", image_size=image_size, task=task)
    assert result.validation is not None
    checks = {check.name: check for check in result.validation.checks}
    assert list(checks) == [f"one {noun}", f"two {noun}s, in chunks", "text alone"]
    for check in checks.values():
        assert check.passed
        assert len(check.steps) == check.same_top1_count == 9
        assert check.max_abs_error <= 1e-4
        assert min(step.scale for step in check.steps) > 1


# One image size in `image_sizes`, a mask of patches with recurrences, embeddings for each layer, tiles of an image, images read in
# both directions by the layers with windows (and wide logits), positions that follow from start tokens, a table that is written,
# patches that the processor joins, experts that are clamped.
_OTHERS = (
    ("mistral3", 1e-4),
    ("lfm2_vl", 1e-4),
    ("gemma4", 1e-4),
    ("llava_next", 1e-4),
    ("gemma4_unified", 1e-3),
    ("qwen2_5_omni_thinker", 1e-4),
    ("ernie4_5_vl_moe", 1e-4),
    ("inkling2", 1e-4),
    ("step3p7", 1e-4),
)


_SEEDS = {"gemma4_unified": 2}  # with others, PyTorch's own f32 is over 1e-4 from its float64


@pytest.mark.parametrize(("family", "atol"), _OTHERS)
def test_models_that_nothing_is_written_for(family: str, atol: float, tmp_path: Path) -> None:
    model = build_tiny_model(family, _SEEDS.get(family, 0), task=IMAGE_TEXT_TO_TEXT)
    save_tiny_model(model, tmp_path / "model", IMAGE_TEXT_TO_TEXT)
    size = tiny_image_size(model.config)
    result = exported(tmp_path / "model", tmp_path / "out", image_size=size)
    assert result.validation is not None
    assert len(result.validation.checks) == 3
    assert max(check.max_abs_error for check in result.validation.checks) <= atol


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["fast_vlm", "gemma3n", "perception_lm"])
def test_encoders_of_timm(family: str, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    test_models_that_nothing_is_written_for(family, 1e-4, tmp_path)


@pytest.mark.parametrize(("family", "task"), [("smolvlm", IMAGE_TEXT_TO_TEXT), ("voxtral", AUDIO_TEXT_TO_TEXT)])
def test_f16_archives(family: str, task: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = exported(checkpoint(family), tmp_path / "out", dtype="f16", task=task)
    assert result.validation is not None
    assert result.validation.passed
    assert all(check.max_abs_error > 0 for check in result.validation.checks)


@pytest.fixture(scope="module")
def gemma(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of Gemma 3, unchecked."""
    return exported(checkpoint("gemma3"), tmp_path_factory.mktemp("vlm-out") / "gemma", check=False).output_dir


def test_a_dry_run_measures_each_archive(gemma: Path, checkpoint: Callable[[str], Path], parent: Path) -> None:
    source = str(checkpoint("gemma3"))
    options = ExportOptions.of(task=IMAGE_TEXT_TO_TEXT, require_tokenizer=False, dtype="f32", check=False)
    with unchanged(parent):
        plan = plan_llm_export(source, parent / "x", options=options)
        checked = plan_llm_export(source, parent / "x", options=replace(options, check=True))
        words = ("export", source, "-o", parent / "x", "--task", IMAGE_TEXT_TO_TEXT, "--no-tokenizer", "--dtype", "f32")
        outcome = call(*words, "--no-check", "--dry-run")
        record = strict_json(call(*words, "--no-check", "--dry-run", "--json").out)
    parts = read_manifest(gemma)["archives"].values()
    written = {part["archive"]: (gemma / part["archive"]).stat().st_size for part in parts}
    assert {archive.name: archive.bytes for archive in plan.archives} == written and plan.exact
    assert plan.archive_bytes == sum(written.values()) and plan.archive == "decoder.nnef.tar"
    assert sorted(plan.files) == sorted(path.name for path in gemma.iterdir())
    assert len(written) == 3 and "tests/*.npz" not in checked.files
    assert checked.check_bytes > plan.archive_bytes and plan.check_bytes == 0  # both are in f32
    assert outcome.code == 0, outcome
    for name, size in written.items():
        assert f"archive   {size} bytes: {name}" in outcome.out
    assert f"together  {plan.archive_bytes} bytes" in outcome.out
    assert [archive["name"] for archive in record["archives"]] == list(written)
    assert sum(group["bytes"] for group in record["groups"]) < record["archive_bytes"] == plan.archive_bytes


def test_what_is_seen_and_in_which_order_matters(
    gemma: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config, manifest = AutoConfig.from_pretrained(checkpoint("gemma3")), read_manifest(gemma)
    family = family_of(config)
    _, both, _ = plan_prompts(family)
    files = {role: gemma / part["archive"] for role, part in manifest["archives"].items()}
    with open_pipeline(files, family, recorded_states(manifest)) as pipeline:
        (cut,) = answers_of(pipeline, both, ())
        (whole,) = answers_of(pipeline, replace(both, cut=0), ())
        (swapped,) = answers_of(pipeline, replace(both, images=both.images[::-1]), ())
    np.testing.assert_allclose(cut, whole, atol=1e-4)
    assert np.abs(cut - swapped).max() > 1e-2


def test_image_rows_enter_the_first_layers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = exported(checkpoint("qwen3_vl"), tmp_path / "out", image_size=24, check=False).output_dir
    manifest = read_manifest(folder)
    further = ["deepstack_embeds_0", "deepstack_embeds_1"]
    assert manifest["archives"]["vision"]["graph"]["outputs"] == ["image_embeds", *further]
    assert manifest["graph"]["inputs"][:4] == ["inputs_embeds", *further, "position_ids"]
    assert "zero elsewhere" in manifest["multimodal"]["deepstack"]
    pixels = np.random.default_rng(1).standard_normal((36, 96)).astype(np.float32)
    with (
        open_archive_session(folder / "vision.nnef.tar") as vision,
        open_archive_session(folder / "decoder.nnef.tar") as decoder,
    ):
        rows = [table[None] for table in vision.answer([pixels])]
        states = [state.at_start(1) for state in recorded_states(manifest)]
        positions = np.broadcast_to(np.arange(9), (3, 1, 9))
        everything = decoder.answer([*rows, positions, *states])[0]
        for left_out in (1, 2):
            given = [np.zeros_like(table) if index == left_out else table for index, table in enumerate(rows)]
            assert np.abs(decoder.answer([*given, positions, *states])[0] - everything).max() > 1e-2


def test_the_manifest_says_how_the_archives_connect(gemma: Path, checkpoint: Callable[[str], Path]) -> None:
    manifest = read_manifest(gemma)
    assert manifest["task"] == IMAGE_TEXT_TO_TEXT
    assert [part["archive"] for part in manifest["archives"].values()] == [
        "embed.nnef.tar",
        "vision.nnef.tar",
        "decoder.nnef.tar",
    ]
    assert manifest["archives"]["embed"]["graph"]["inputs"] == ["input_ids"]
    assert manifest["archives"]["vision"]["graph"]["inputs"] == ["pixel_values"]
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
    parts = read_manifest(gemma)["archives"]
    assert report.tensors == sum(len(part["tensors"]) for part in parts.values())
    assert verify_export(gemma / "vision.nnef.tar").tensors == len(parts["vision"]["tensors"])
    assert validate_folder(gemma, str(checkpoint("gemma3"))).passed


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
    assert "cannot build its processor" in call("generate", target, "Hello").line("error")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": "q4_0:gptq"}, "does not support calibration"),
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


def test_a_checkpoint_with_an_adapter_of_its_own_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "with an adapter"
    shutil.copytree(checkpoint("smolvlm"), folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(OptionError, match="has an adapter"):
        exported(folder, tmp_path / "out")


def test_what_is_heard_has_names_of_its_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    source = checkpoint("voxtral")
    command = ("export", source, "-o", target, "--dtype", "f32", "--no-tokenizer")
    assert "need --task audio-text-to-text" in call(*command, "--task", IMAGE_TEXT_TO_TEXT).line("error")
    assert "takes no images" in call(*command, "--task", AUDIO_TEXT_TO_TEXT, "--image-size", "24").line("error")
    done = call(*command, "--task", AUDIO_TEXT_TO_TEXT)
    assert done.code == 0, done.err
    assert "one segment" in done.out
    manifest = read_manifest(target)
    assert list(manifest["archives"]) == ["embed", "audio", "decoder"]
    assert manifest["archives"]["audio"]["graph"]["outputs"] == ["audio_embeds"]
    connection = manifest["multimodal"]
    assert (connection["audio_token_id"], connection["rows_per_segment"]) == (150, 6)
    assert connection["input_features"]["shape"] == ["N", 8, 24]
    assert call("validate", target, "--reference", source).code == 0
    assert call("verify", target).code == 0


def test_what_is_after_the_end_of_a_recording_is_not_heard(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = exported(checkpoint("qwen2_audio"), tmp_path / "out", task=AUDIO_TEXT_TO_TEXT, check=False).output_dir
    manifest = read_manifest(folder)
    assert manifest["archives"]["audio"]["graph"]["inputs"] == ["input_features", "feature_attention_mask"]
    assert "1 before the end" in manifest["multimodal"]["feature_attention_mask"]
    features = np.random.default_rng(2).standard_normal((1, 8, 24)).astype(np.float32)
    other = features.copy()
    other[..., 17:] = 9  # a position reaches two frames further than its own
    half, whole = (np.arange(24)[None] < end for end in (15, 24))
    with open_archive_session(folder / "audio.nnef.tar") as audio:

        def heard(sound: np.ndarray, mask: np.ndarray) -> np.ndarray:
            return audio.answer([sound, mask.astype(np.int64)])[0][0, :4]

        np.testing.assert_allclose(heard(features, half), heard(other, half), atol=1e-5)
        assert np.abs(heard(features, whole) - heard(other, whole)).max() > 1e-2
        assert np.abs(heard(features, half) - heard(features, whole)).max() > 1e-2


def test_a_model_without_images_is_explained(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="no vision-language or speech model for LlamaConfig"):
        exported(tiny_llama, tmp_path / "out")
    with pytest.raises(UnknownArchitectureError, match="models of type 'llama' do not hear"):
        exported(tiny_llama, tmp_path / "out", task=AUDIO_TEXT_TO_TEXT)
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_do_not_divide_into_patches_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--image-size 20: this model takes multiples of 8 pixels"):
        exported(checkpoint("qwen2_5_vl"), tmp_path / "out", image_size=20)


def test_an_encoder_that_needs_one_size_says_how_to_fix_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    place = modeling.get_vision_position_ids

    def place_by_values(grid_thw: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return place(grid_thw, *args, **options) * int((grid_thw * 0.5).mean() > 0)

    monkeypatch.setattr(modeling, "get_vision_position_ids", place_by_values)
    with pytest.raises(CaptureError) as refused:
        exported(checkpoint("qwen3_vl"), tmp_path / "out", check=False)
    assert str(refused.value.hint).endswith("Or fix the size of images, such as --image-size 448.")


@pytest.mark.parametrize("name", ANY_SIZE)
def test_positions_are_those_of_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint(name)).model
    family, shapes = family_of(model.config), [(2, 4), (3, 1)]
    image = family.image_token_id
    first, second = ([image] * (rows * columns) for rows, columns in shapes)
    ids = torch.tensor([[5, 6, *first, 7, *second, 8, 9, 10]])
    is_image = ids == image
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in shapes])
    expected, delta = model.get_rope_index(ids, is_image.int(), grids)
    places = family.positions(ids[0].numpy(), shapes)
    np.testing.assert_array_equal(places, expected.numpy())
    assert places.max() + 1 == ids.shape[1] + int(delta)


def test_positions_follow_from_the_tokens_around_crops() -> None:
    model = build_tiny_model("minicpmv4_7", task=IMAGE_TEXT_TO_TEXT)
    config, family = model.config, family_of(model.config, 64)
    rows = [family.image_token_id] * family.rows_per_image
    image = [config.image_start_id, *rows, config.image_end_id]
    crops = [config.slice_start_id, *rows, config.slice_end_id] * 2
    ids = torch.tensor([[5, 6, *image, *crops, 8, 9]])
    known = family.known([family.pixel_shape] * 3)
    types = (ids == rows[0]).int()
    expected, delta = model.base_model.get_rope_index(ids, mm_token_type_ids=types, **known)
    found = family.positions(ids[0].numpy(), [family.pixel_shape] * 3)
    np.testing.assert_array_equal(found, expected.numpy())
    assert found.max() + 1 == ids.shape[1] + int(delta)
    without = torch.where((ids == rows[0]) | (ids < 10), ids, 7)
    assert not np.array_equal(found, family.positions(without[0].numpy(), [family.pixel_shape] * 3))


def test_the_command_line_engine_agrees_too(
    gemma: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from generic_export.inference_target.tract.releases.install import find_tract_cli

    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    monkeypatch.setattr("t2n_llm.tasks.multimodal.check._STEPS", 1)  # it starts a process for each call of an archive
    assert validate_folder(gemma, str(checkpoint("gemma3")), options=ValidateOptions.of(engine="cli")).passed


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((family, recipe) for family in ("smolvlm", "gemma3") for recipe in ("q4_0", "q4_0+embeddings")),
        ("qwen3_vl_moe", "q4_0+embeddings"),
        ("voxtral", "q4_0"),
    ],
)
def test_all_archives_are_compressed_and_checked(
    family: str, recipe: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    task = AUDIO_TEXT_TO_TEXT if family in HEARS else IMAGE_TEXT_TO_TEXT
    (size, *_) = ANY_SIZE.get(family, (None,))
    result = exported(checkpoint(family), tmp_path / "out", task=task, image_size=size, compress=recipe)
    assert result.validation is not None and result.validation.passed
    tensors = result.manifest["compression"]["tensors"]
    blocks = [tensor["label"] for tensor in tensors if tensor["scheme"] == "q4_0"]
    assert any("layers" in label for label in blocks)
    assert any("embed_tokens" in label for label in blocks) == (recipe != "q4_0")
