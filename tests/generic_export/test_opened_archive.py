"""Archives called with the arguments of their modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef, open_archive
from generic_export.errors import OptionError


class Nested(nn.Module):
    """Takes a table of lists, returns another one."""

    def forward(self, batch: dict[str, Any], shift: torch.Tensor) -> dict[str, Any]:
        first, second = batch["parts"]
        return {"sum": first + second + shift, "parts": [first * 2, second * 3], "length": first.shape[0]}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch = {"parts": [torch.ones(4), torch.ones(4)]}
    axes = {name: {0: "N"} for name in ("batch.parts.0", "batch.parts.1")}
    target = TractNNEF(dynamic_axes=axes)
    return export_model_to_nnef(Nested(), (batch, torch.ones(1)), tmp_path_factory.mktemp("nested") / "m.nnef", target)


def test_nested_arguments_and_results(archive: Path) -> None:
    given, shift = {"parts": [torch.randn(6), torch.randn(6)]}, torch.randn(1)
    with open_archive(archive) as opened:
        assert opened.input_names == ("batch.parts.0", "batch.parts.1", "shift")
        found, wanted = opened(given, shift=shift), Nested()(given, shift)
    assert torch.allclose(found["sum"], wanted["sum"])
    assert all(map(torch.allclose, found["parts"], wanted["parts"]))
    assert int(found["length"]) == 6


def test_arguments_that_do_not_fit(archive: Path) -> None:
    with open_archive(archive) as opened:
        with pytest.raises(OptionError, match=r"needs batch\.parts\.1, shift"):
            opened({"parts": [torch.ones(4)]})
        with pytest.raises(OptionError, match="no input 'other'"):
            opened({"parts": [torch.ones(4), torch.ones(4)]}, torch.ones(1), other=torch.ones(1))


def test_a_module_of_one_output(tmp_path: Path) -> None:
    path = export_model_to_nnef(nn.Linear(3, 2), (torch.ones(1, 3),), tmp_path / "m.nnef", TractNNEF())
    with open_archive(path) as opened:
        assert opened(torch.ones(1, 3)).shape == (1, 2)
