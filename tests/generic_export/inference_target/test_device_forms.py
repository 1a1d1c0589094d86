"""The table of devices, what a target writes for them, and archives that are refused before a device is prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.devices import CPU, DEVICES
from generic_export.errors import DeviceMissingError, OptionError, WrongOnDeviceError
from generic_export.inference_target.tract.engines.device_forms import (
    DETECT_ALL,
    FORM_RULES,
    UNTESTED,
    DeviceForms,
    Effect,
    forms_for,
    refuse_wrong_forms,
)
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.version import SemanticVersion
from generic_export.nnef.attention_forms import AttentionForm

RELEASE = SemanticVersion.parse("0.23.9")


def test_rows_are_unique_and_well_formed() -> None:
    assert len({(row.form, row.device) for row in FORM_RULES}) == len(FORM_RULES)
    wrong = {(row.form, row.device) for row in FORM_RULES}
    for row in FORM_RULES:
        assert row.device in DEVICES and row.reason
        assert (row.device == CPU) == (row.effect is Effect.SLOW)
        assert row.instead and not any((form, row.device) in wrong for form in row.instead)
        first = SemanticVersion.parse(row.first)
        assert row.last is None or first <= SemanticVersion.parse(row.last)
    assert set(UNTESTED) | {row.device for row in FORM_RULES} == set(DEVICES)


def test_forms_for_devices() -> None:
    assert forms_for(["metal"], RELEASE) == DeviceForms()
    assert forms_for([CPU], RELEASE) == DeviceForms(fused_softmax=False, rounded_cache=True)
    cuda = DeviceForms(operator=False, padding=True, fused_softmax=False, fusible_softmax=False)
    assert forms_for(["cuda"], RELEASE) == cuda
    assert forms_for([CPU, "cuda"], RELEASE) == replace(cuda, rounded_cache=True)


def test_options_of_a_target() -> None:
    assert TractNNEF(device=["cuda", "cpu", "cuda"]).devices == ("cuda", "cpu")
    assert TractNNEF(device="cuda").properties["target_devices"] == "cuda"
    assert "target_devices" not in TractNNEF().properties
    with pytest.raises(OptionError, match="device 'gpu' is unknown"):
        TractNNEF(device="gpu")
    with pytest.raises(OptionError, match="computes wrongly on cuda"):
        TractNNEF(device="cuda", reify_sdpa_operator=True)


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Masked(nn.Module):
    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (scores * 0.5 + mask).softmax(-1)


def exported(model: nn.Module, folder: Path, device: str = CPU, count: int = 3) -> Path:
    inputs = tuple(torch.randn(1, 2, 4, 64) for _ in range(count))
    names = [f"input_{place}" for place in range(count)]
    target = TractNNEF(check_io=False, dynamic_axes={name: {2: "S"} for name in names}, device=device)
    return export_model_to_nnef(model, inputs, folder / f"{device}.nnef.tgz", target, input_names=names)


def test_an_archive_with_the_operator_is_refused_on_cuda_alone(tmp_path: Path) -> None:
    archive = exported(Attention(), tmp_path)
    for device in (CPU, "metal"):
        refuse_wrong_forms(archive, device, "0.23.9")
    with pytest.raises(
        WrongOnDeviceError, match=r"sdpa, which tract 0\.23\.10\.dev1 computes wrongly on cuda"
    ) as refused:
        refuse_wrong_forms(archive, "cuda", "0.23.10.dev1")
    assert "--device cuda" in str(refused.value.hint)
    with pytest.raises(WrongOnDeviceError):  # before anything looks for the device
        TractWheel(device="cuda").load(archive)


def test_an_archive_for_cuda_is_not_refused(tmp_path: Path) -> None:
    archive = exported(Attention(), tmp_path, "cuda")
    refuse_wrong_forms(archive, "cuda", "0.23.9", [DETECT_ALL])
    if not torch.cuda.is_available():
        with pytest.raises(DeviceMissingError):
            TractWheel(device="cuda").load(archive)


def test_a_softmax_that_a_transform_fuses_is_refused_with_that_transform(tmp_path: Path) -> None:
    archive = exported(Masked(), tmp_path, count=2)
    refuse_wrong_forms(archive, "cuda", "0.23.9")
    with pytest.raises(WrongOnDeviceError, match=AttentionForm.FUSIBLE_SOFTMAX.value):
        refuse_wrong_forms(archive, "cuda", "0.23.9", [DETECT_ALL])
    with TractWheel().load(archive, transforms=[DETECT_ALL]) as model:
        assert model.operators()["ScaledMaskedSoftmax"] == 1
    plain = exported(Masked(), tmp_path, "cuda", count=2)
    refuse_wrong_forms(plain, "cuda", "0.23.9", [DETECT_ALL])
    with TractWheel().load(plain, transforms=[DETECT_ALL]) as model:
        assert model.operators()["ScaledMaskedSoftmax"] == 0


def test_what_is_no_archive_is_left_to_the_engine(tmp_path: Path) -> None:
    refuse_wrong_forms(tmp_path, "cuda", "0.23.9")
