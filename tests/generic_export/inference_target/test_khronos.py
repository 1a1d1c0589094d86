"""`KhronosNNEF`: archives that the Khronos parser reads, and refusals that name the operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import KhronosNNEF, export_model_to_nnef
from generic_export.errors import UnsupportedOperatorError

nnef = pytest.importorskip("nnef", reason="the Khronos parser (pip install nnef) is not installed")

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(8, 2, 2)), (2, 4, 6, 6)),
    "pools": (lambda: nn.Sequential(nn.MaxPool2d(3, 2, padding=1), nn.AvgPool2d(2)), (2, 3, 9, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (2, 5, 8)),
    "rms norm": (lambda: nn.RMSNorm(8, eps=1e-5), (2, 5, 8)),
    "activations": (lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Softmax(-1)), (2, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_khronos_parser_reads_it(name: str, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    folder = export_model_to_nnef(
        make().eval(), torch.randn(shape), tmp_path / "m", KhronosNNEF(), ["x"], compression_level=None
    )
    graph = nnef.load_graph(str(folder))
    assert not [operation.name for operation in graph.operations if operation.name.startswith("tract")]


def test_embedding_is_a_gather(tmp_path: Path) -> None:
    ids = torch.randint(0, 9, (2, 3))
    folder = export_model_to_nnef(nn.Embedding(9, 4), ids, tmp_path / "m", KhronosNNEF(), compression_level=None)
    assert [operation.name for operation in nnef.load_graph(str(folder)).operations][-1] == "gather"


def test_what_the_standard_has_no_words_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperatorError, match="tract_core_resize at"):
        export_model_to_nnef(
            nn.Upsample(scale_factor=2, mode="bilinear"), torch.randn(1, 2, 3, 4), tmp_path / "m", KhronosNNEF()
        )
