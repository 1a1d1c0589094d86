"""Shared weights are stored once and read twice; tensors above the format's limit are named before anything is written."""

import tarfile
from pathlib import Path

import pytest
import torch

from generic_export import export_model_to_nnef
from generic_export.errors import TensorFormatError
from generic_export.inference_target import TractNNEF
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.weights.source import FileTensor
from generic_export.write.document import write_document


class Tied(torch.nn.Module):
    """Embeds and projects with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_a_tied_weight_is_one_tensor(tmp_path: Path) -> None:
    archive = export_model_to_nnef(
        Tied(), torch.arange(3), tmp_path / "m.nnef", TractNNEF(), input_names=["ids"], output_names=["out"]
    )
    with tarfile.open(archive) as tar:
        tensors = [name for name in tar.getnames() if name.endswith(".dat")]
        text = tar.extractfile("graph.nnef").read().decode()  # type: ignore[union-attr]
    assert len(tensors) == 1
    assert text.count("variable<scalar>(") == 1
    assert text.count(tensors[0].removesuffix(".dat")) >= 1


def test_a_tensor_above_4_gib_is_named_before_anything_is_written(tmp_path: Path) -> None:
    shape = (70_000, 40_000)
    graph = NnefGraph(
        "net", inputs=(), outputs=(), operations=(), variables=(NnefVariable("big.weight", shape, "f16"),)
    )
    source = FileTensor("big.weight", tmp_path / "none", 0, shape, torch.float16)
    with pytest.raises(TensorFormatError, match=r"big.weight: shape \[70000, 40000\] .* holds at most") as caught:
        write_document(tmp_path / "m", graph, {"big.weight": source})
    assert "split it along its first axis" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []
