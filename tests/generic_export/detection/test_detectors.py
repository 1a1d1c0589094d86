"""Whole detectors in the engine: every detection that torchvision has, and nothing else, on several pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.detection import exportable_detector
from generic_export.errors import OptionError
from generic_export.inference_target.example import as_array
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.generic_export.detection.small_detectors import DETECTORS, small_detector

SIZE = (60, 88)
TOLERANCES = {"scores": 1e-4, "boxes": 1e-2, "masks": 1e-3, "keypoints": 1e-2, "keypoints_scores": 1e-3}


@pytest.fixture(scope="module")
def detection() -> Any:
    return pytest.importorskip("torchvision.models.detection", reason="torchvision is not installed (the extra zoo).")


def _picture(seed: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 9, 11, generator=generator)
    return nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1)


def _assert_same(answers: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label: str) -> None:
    count = int(answers["count"])
    assert count == len(expected["boxes"]), label
    assert set(answers) == {*expected, "count"}
    for name, wanted in expected.items():
        found, rest = answers[name][:count], answers[name][count:]
        atol, said = TOLERANCES.get(name, 0), partial("{} {}: {}".format, label, name)
        torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-4, msg=said)
        assert not rest.any(), f"{label}: {name} holds something behind the last detection"


def _in_the_engine(module: nn.Module, pictures: list[torch.Tensor], folder: Path) -> list[dict[str, torch.Tensor]]:
    archive = export_model_to_nnef(
        module, (pictures[0],), folder / "model.nnef", TractNNEF(check_io=False), compression_level=None
    )
    names = list(module.eval()(pictures[0]))
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        runs = [engine.run([as_array(picture)]) for picture in pictures]
    return [dict(zip(names, map(torch.from_numpy, run), strict=True)) for run in runs]


@pytest.mark.parametrize("name", DETECTORS)
def test_the_engine_detects_what_torchvision_does(detection: Any, name: str, tmp_path: Path) -> None:
    model = small_detector(detection, name)
    module = exportable_detector(model, SIZE)
    pictures = [_picture(seed) for seed in (0, 1)]
    with torch.no_grad():
        expected = [model([picture[0]])[0] for picture in pictures]
        for picture, wanted in zip(pictures, expected, strict=True):
            _assert_same(module(picture), wanted, "PyTorch")
    answers = _in_the_engine(module, pictures, tmp_path)
    for found, wanted in zip(answers, expected, strict=True):
        _assert_same(found, wanted, "tract")
    assert all(len(wanted["boxes"]) > 3 for wanted in expected)
    assert len(set(torch.cat([wanted["labels"] for wanted in expected]).tolist())) > 1
    assert not torch.equal(*(wanted["boxes"][:3] for wanted in expected))


@pytest.mark.parametrize("name", ["retinanet", "ssd", "mask_rcnn"])
def test_a_picture_of_nothing(detection: Any, name: str, tmp_path: Path) -> None:
    model = small_detector(detection, name)
    getattr(model, "roi_heads", model).score_thresh = 0.99999
    (answer,) = _in_the_engine(exportable_detector(model, SIZE), [_picture(0)], tmp_path)
    with torch.no_grad():
        _assert_same(answer, model([_picture(0)[0]])[0], "tract")
    assert answer["count"] == 0


@pytest.mark.parametrize("name", ["fcos", "faster_rcnn"])
def test_raw_heads_and_anchors(detection: Any, name: str, tmp_path: Path) -> None:
    model = small_detector(detection, name)
    module = exportable_detector(model, (64, 96), raw=True)  # neither resized nor padded
    (answer,) = _in_the_engine(module, [_picture(0, (64, 96))], tmp_path)
    with torch.no_grad():
        maps = list(model.backbone(torch.stack([model.transform.normalize(_picture(0, (64, 96))[0])])).values())
        if name == "fcos":
            expected = dict(model.head(maps))
        else:
            from torchvision.models.detection.rpn import concat_box_prediction_layers

            rows = concat_box_prediction_layers(*model.rpn.head(maps))
            expected = dict(zip(("objectness", "pred_bbox_deltas"), (each[None] for each in rows), strict=True))
    for part, wanted in expected.items():
        torch.testing.assert_close(answer[part], wanted, atol=1e-4, rtol=1e-4)
    sides = answer["anchors"][:, 2:] - answer["anchors"][:, :2]
    assert answer["anchors"].shape == (answer[next(iter(expected))].shape[1], 4) and (sides > 0).all()


def test_the_model_comes_back_as_it_was(detection: Any) -> None:
    model = small_detector(detection, "faster_rcnn").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exportable_detector(model, SIZE)
    assert model.training and model.roi_heads.box_roi_pool.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_detector_is_refused(detection: Any) -> None:
    with pytest.raises(OptionError, match="Linear is not a torchvision detector"):
        exportable_detector(nn.Linear(2, 2), SIZE)
    with pytest.raises(OptionError, match="is not a height and a width"):
        exportable_detector(small_detector(detection, "ssd"), (0, 5))
