"""Warnings about untested releases, and that the tested releases match the constraints files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef, tested_versions
from generic_export.tested_versions import TORCH, TRANSFORMERS, VersionRange, doubts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = VersionRange("torch", "2.10", "2.15")


@pytest.mark.parametrize(
    "installed", ["2.10.0", "2.15.0", "2.15.1+cpu", "2.15.0.dev20261101", "2.9.1", "a-build-of-ours"]
)
def test_a_release_that_was_tried_needs_no_word(installed: str) -> None:
    assert EXAMPLE.doubt(installed) is None


@pytest.mark.parametrize("installed", ["2.16.0", "2.16.0.dev20261201", "3.0.0+cu130", "2.100.0"])
def test_a_newer_release_is_told(installed: str) -> None:
    assert EXAMPLE.doubt(installed) == f"torch {installed} was not tested with this release (tested: 2.10 to 2.15)."


def test_a_package_that_is_not_installed_is_passed_over() -> None:
    assert not list(doubts(VersionRange("no-such-package-as-this", "1.0", "1.0")))


def test_the_installed_release_is_looked_up() -> None:
    (doubt,) = doubts(VersionRange("torch", "1.0", "1.13"))
    assert doubt.startswith("torch 2.") and doubt.endswith("(tested: 1.0 to 1.13).")


def test_the_first_export_with_a_release_that_was_not_tried_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tested_versions, "version", lambda package: "99.1")
    with pytest.warns(UserWarning) as told:
        for name in ("first", "second"):
            export_model_to_nnef(nn.SiLU(), torch.zeros(2), tmp_path / f"{name}.nnef", TractNNEF(check_io=False))
    said = [str(each.message) for each in told if "not tested" in str(each.message)]
    assert [text.split(" was")[0] for text in said] == ["torch 99.1", "tract 99.1"]
    assert {each.filename for each in told if "not tested" in str(each.message)} == {__file__}


@pytest.mark.parametrize("tested", [TORCH, TRANSFORMERS])
def test_the_constraints_hold_the_lowest_and_the_newest(tested: VersionRange) -> None:
    for file, release in (("constraints-lowest.txt", tested.lowest), ("constraints.txt", tested.newest)):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        assert any(line.startswith(f"{tested.package}=={release}.") for line in lines), f"{file}: {tested}"
