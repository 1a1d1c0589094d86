"""Single-pass tasks of images, sound, video, series, pairs and choices: tiny models, other sizes than the captured ones."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, ViTForImageClassification

from generic_export import TractNNEF
from generic_export.capture import capture
from generic_export.errors import OptionError, SourceError
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.export.pipeline import ExportResult, export_llm
from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks import names
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import reading_of
from t2n_llm.tasks.heads.model import build_head_graph, head_module
from t2n_llm.tasks.heads.pooling import Pooling, pooling_of
from t2n_llm.tasks.heads.shapes_alone import ConstantsInGraph
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import save_tiny_model
from tests.shallow_models import shallow_model


def exported(model: Any, task: str, folder: Path, **options: Any) -> ExportResult:
    save_tiny_model(model, folder / "model", task)
    return export_llm(
        str(folder / "model"), folder / "out", task=task, archive="dir", require_tokenizer=False, dtype="f32", **options
    )


_FORECASTS = {"past_values": ["B", 256]}, {"mean_predictions": ["B", 128], "full_predictions": ["B", 128, 10]}


@pytest.mark.parametrize(
    ("task", "architecture", "inputs", "outputs"),
    [
        (
            names.QUESTION_ANSWERING,
            "bert",
            {"input_ids": ["B", "S"], "attention_mask": ["B", "S"], "token_type_ids": ["B", "S"]},
            {"start_logits": ["B", "S"], "end_logits": ["B", "S"]},
        ),
        (
            names.MULTIPLE_CHOICE,
            "bert",
            {name: ["B", "N", "S"] for name in ("input_ids", "attention_mask", "token_type_ids")},
            {"logits": ["B", "N"]},
        ),
        (names.IMAGE_CLASSIFICATION, "vit", {"pixel_values": ["B", 3, 64, 64]}, {"logits": ["B", 2]}),
        (names.CTC, "wav2vec2", {"input_values": ["B", "T"]}, {"logits": ["B", None, 32]}),
        (
            names.ZERO_SHOT_IMAGE_CLASSIFICATION,
            "clip",
            {"input_ids": ["N", "S"], "attention_mask": ["N", "S"], "pixel_values": ["B", 3, 64, 64]},
            {"logits_per_image": ["B", "N"], "text_embeds": ["N", 64], "image_embeds": ["B", 64]},
        ),
        (names.TIME_SERIES, "patchtst", {"past_values": ["B", 32, 1]}, {"prediction_logits": ["B", 1]}),
        (names.TIME_SERIES, "timesfm", *_FORECASTS),
        pytest.param(names.TIME_SERIES, "timesfm2_5", *_FORECASTS, marks=pytest.mark.nightly),  # the same reading
    ],
)
def test_archives_agree_at_other_sizes(
    task: str, architecture: str, inputs: dict[str, Any], outputs: dict[str, Any], tmp_path: Path
) -> None:
    result = exported(shallow_model(architecture, task), task, tmp_path)
    assert result.validation is not None and result.validation.passed
    assert len(result.validation.checks) >= 2
    assert {check.steps[0].max_abs_error for check in result.validation.checks} != {0.0}
    graph = result.manifest["graph"]
    assert graph["inputs"] == list(inputs) and graph["outputs"] == list(outputs)
    shapes = {name: tensor["shape"] for name, tensor in graph["interface"].items()}
    assert shapes == inputs | outputs
    assert set(result.manifest["model"]["inputs"]) == set(inputs)


def test_sizes_differ_from_the_captured_ones_in_every_symbol() -> None:
    for task, architecture in ((names.CTC, "wav2vec2"), (names.MULTIPLE_CHOICE, "bert")):
        model = shallow_model(architecture, task)
        reading = reading_of(HEADS[task], model, (64, 64))
        symbols = {axis for each in reading.inputs for axis in each.axes if isinstance(axis, str)}
        assert len(symbols) >= 2 and len(reading.others) >= 2
        for symbol in symbols:
            sizes = [sizes[symbol] for sizes in reading.others]
            assert len(set(sizes)) == 2 and reading.traced[symbol] not in sizes, (task, symbol)


def test_sound_has_a_channel_where_the_model_s_extractor_adds_one() -> None:
    if "omniasr_ctc" not in CONFIG_MAPPING:
        pytest.skip("needs transformers with OmniASR")
    reading = reading_of(HEADS[names.CTC], shallow_model("omniasr_ctc", names.CTC), (64, 64))
    assert [(each.name, each.axes) for each in reading.inputs] == [("input_values", ("B", 1, "T"))]


def test_a_checkpoint_chooses_its_task(tmp_path: Path) -> None:
    model = shallow_model("vit", names.IMAGE_CLASSIFICATION)
    save_tiny_model(model, tmp_path / "model", names.IMAGE_CLASSIFICATION)
    result = export_llm(str(tmp_path / "model"), tmp_path / "out", dtype="f16", compress="q4_0")
    assert result.manifest["task"] == names.IMAGE_CLASSIFICATION == result.manifest["options"]["task"]
    assert result.manifest["model"]["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    assert result.validation is not None and result.validation.passed
    assert {each["scheme"] for each in result.manifest["compression"]["tensors"]} >= {"q4_0"}


# --- vectors of texts ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "mean_sqrt_len", "lasttoken"])
def test_rows_are_pooled_whichever_side_is_padded(mode: str) -> None:
    pooling = Pooling(mode, normalized=False)
    hidden = torch.arange(24.0).reshape(2, 4, 3)
    rows = {
        "mean": hidden[1, 1:3].mean(dim=0),
        "cls": hidden[1, 1],
        "max": hidden[1, 2],
        "mean_sqrt_len": hidden[1, 1:3].sum(dim=0) / 2**0.5,
        "lasttoken": hidden[1, 2],
    }
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    torch.testing.assert_close(pooling(hidden, mask)[1], rows[mode])
    length = Pooling(mode)(hidden, mask)[1].norm()
    torch.testing.assert_close(length, torch.ones(()))


def sentence_files(folder: Path, pooling: dict[str, Any], *kinds: str) -> None:
    folder.mkdir(exist_ok=True)
    modules = [{"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"a.b.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_the_files_of_sentence_transformers_decide(tmp_path: Path) -> None:
    assert pooling_of(None) == pooling_of(tmp_path) == Pooling("mean", normalized=True)
    sentence_files(tmp_path, {"pooling_mode_cls_token": True}, "Transformer", "Pooling")
    assert pooling_of(tmp_path) == Pooling("cls", normalized=False)
    sentence_files(tmp_path, {"pooling_mode": "lasttoken"}, "Transformer", "Pooling", "Normalize")
    assert pooling_of(tmp_path) == Pooling("lasttoken", normalized=True)


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense"), "a Dense module"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "weightedmean"),
        ({}, ("Transformer", "Pooling"), "by nothing"),
        ({}, ("Transformer",), "cannot be read"),
    ],
)
def test_what_nobody_knows_to_pool_is_refused(
    pooling: dict[str, Any], kinds: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    sentence_files(tmp_path, pooling, *kinds)
    with pytest.raises(SourceError, match=words):
        pooling_of(tmp_path)


def test_vectors_of_texts_have_length_one(tmp_path: Path) -> None:
    result = exported(shallow_model("bert", names.SENTENCE_SIMILARITY), names.SENTENCE_SIMILARITY, tmp_path)
    assert result.validation is not None and result.validation.passed
    assert result.manifest["model"]["pooling"] == {"mode": "mean", "normalized": True}
    with open_archive_session(result.archive) as answerer:
        (rows,) = answerer.answer([np.full((2, 5), 9), np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=-1), 1, atol=1e-5)


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": {"height": 30, "width": 40}}, (30, 40)),
        ({"size": 48}, (48, 48)),
        ({"size": {"shortest_edge": 50}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}, (32, 32)),
        ({"size": {"shortest_edge": 50}, "crop_size": {"height": 32, "width": 32}}, (50, 50)),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, (800, 800)),
        ([], (224, 224)),
        ({}, (224, 224)),
    ],
)
def test_the_processor_says_how_large_images_are(settings: Any, size: tuple[int, int], tmp_path: Path) -> None:
    from transformers import ResNetConfig, ViTConfig

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert image_size_of(ResNetConfig(), tmp_path) == size
    assert image_size_of(ResNetConfig(), tmp_path, 96) == (96, 96)
    assert image_size_of(ViTConfig(image_size=[16, 24]), tmp_path) == (16, 24)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert image_size_of(ResNetConfig(), tmp_path) == size


def test_an_image_read_at_several_scales_is_larger_than_a_patch() -> None:
    config = tiny_config("depth_pro", names.DEPTH_ESTIMATION)
    assert config.image_model_config.image_size == 64
    assert image_size_of(config, None) == (256, 256)


def test_text_has_no_image_size(tmp_path: Path) -> None:
    model = shallow_model("bert", names.FILL_MASK)
    with pytest.raises(OptionError, match="takes no images"):
        exported(model, names.FILL_MASK, tmp_path, image_size=64)


@pytest.mark.parametrize("numbers", [2.5, [1, 2], [(4, 3), (2, 1)]])
def test_numbers_that_a_model_writes_are_no_constants(numbers: Any) -> None:
    """They would have no values: the model is captured on shapes alone."""

    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ConstantsInGraph():
                return x + torch.as_tensor(numbers, dtype=torch.float32, device=x.device).sum()

    graph = capture(Written(), (torch.ones(2, 2, device="meta"),), TractNNEF())
    assert not graph.constants
    assert float(Written()(torch.zeros(()))) == torch.tensor(numbers).sum()


def test_a_model_that_counts_its_images_reads_them_one_at_a_time(tmp_path: Path) -> None:
    """Its code asks for the number of images as a number, which freezes the batch."""
    config = shallow_model("vit", names.IMAGE_CLASSIFICATION).config
    counted = mock.patch("transformers.ViTForImageClassification.forward", _counting(ViTForImageClassification.forward))
    with counted:
        graph = build_head_graph(
            config, HEADS[names.IMAGE_CLASSIFICATION], GraphOptions(), image_size=(64, 64), name="counting"
        )
    module = head_module(graph)
    assert not module.reading.reads_batches
    assert module.outputs == {"logits": (1, 2)}


def _counting(forward: Any) -> Any:
    @functools.wraps(forward)
    def counted(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        return forward(
            self, torch.stack([pixel_values[image] for image in range(int(pixel_values.shape[0]))]), **options
        )

    return counted


@pytest.mark.parametrize("family", ["mpt", "minimax", pytest.param("bigbird_pegasus", marks=pytest.mark.nightly)])
def test_what_spells_its_attention_out_sees_no_padding(family: str, tmp_path: Path) -> None:
    """The mask of padding must reach attention that is spelled in a way of its own."""
    save_tiny_model(shallow_model(family, "question-answering"), tmp_path / "model", "question-answering")
    made = export_llm(
        str(tmp_path / "model"), tmp_path / "out", task="question-answering", dtype="f32", require_tokenizer=False
    )
    assert made.validation is not None
    assert made.validation.passed
    assert any("padded" in check.name for check in made.validation.checks)
