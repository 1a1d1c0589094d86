"""The garbage collector is paused in a block alone, and stays off where the caller has turned it off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.garbage_collection import collection_paused


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_goes_on_after_the_outer_block() -> None:
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collection_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_what_the_caller_turned_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_a_capture_is_not_interrupted_and_the_caller_has_its_collector_back(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                seen.append(gc.isenabled())
            return x + 1

    export_model_to_nnef(Adding(), (torch.ones(2, 3),), tmp_path / "m.nnef.tar", TractNNEF(check_io=False))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
