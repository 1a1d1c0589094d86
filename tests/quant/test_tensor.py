"""`QTensor` behaves as a tensor, and is exported as its blocks."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import GraphError, WeightError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.dat import HEADER_BYTES, read_block_dat
from quant import QTensor
from quant.algorithms import BUILT_IN


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


def quantised(module: nn.Module) -> nn.Module:
    """The module with blocks for weights."""
    module.weight = nn.Parameter(QTensor.from_float(module.weight), requires_grad=False)  # type: ignore[arg-type]
    return module


def test_operations_see_the_dequantised_values(weight: torch.Tensor) -> None:
    stored = QTensor.from_float(weight)
    plain, x = stored.dequantize(), torch.randn(5, 96)
    assert not torch.equal(plain, weight)
    assert torch.equal(functional.linear(x, stored), functional.linear(x, plain))
    ids = torch.tensor([1, 3])
    assert torch.equal(functional.embedding(ids, stored), plain[ids])
    for operation in (lambda t: t + 1, lambda t: 2 * t.T, lambda t: t[3:5], lambda t: torch.cat([t, t]), torch.sum):
        assert torch.equal(operation(stored), operation(plain))


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_modules_change_the_dtype_of_the_values_and_not_the_blocks(weight: torch.Tensor, move) -> None:
    module = quantised(nn.Linear(96, 64))
    blob, moved = module.weight.blob.clone(), move(module)
    assert isinstance(moved.weight, QTensor)
    assert torch.equal(moved.weight.blob, blob)
    assert moved(torch.randn(2, 96, dtype=moved.weight.dtype)).dtype is moved.weight.dtype is not torch.float32


def test_copies_state_dicts_and_pickles_keep_the_blocks() -> None:
    module, x = quantised(nn.Linear(96, 64)), torch.randn(2, 96)
    expected = module(x)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = quantised(nn.Linear(96, 64))
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert isinstance(other.weight, QTensor)
    assert torch.equal(other(x), expected)


def test_gradients_flow_through_to_the_inputs() -> None:
    module, x = quantised(nn.Linear(96, 64)), torch.randn(2, 96, requires_grad=True)
    module(x).sum().backward()
    assert torch.allclose(x.grad, module.weight.dequantize().sum(dim=0).expand(2, -1), atol=1e-4)


def test_values_cannot_be_changed_in_place(weight: torch.Tensor) -> None:
    with pytest.raises(WeightError, match="in place"):
        QTensor.from_float(weight).add_(1)
    with pytest.raises(WeightError, match="only q4_0 blocks"):
        QTensor.from_float(weight).copy_(weight)


@pytest.mark.parametrize(("size", "scheme"), [(18, "q5_k"), (17, "q4_0"), (18, "q8_1")])
def test_bytes_that_do_not_fit_are_refused(size: int, scheme: str) -> None:
    with pytest.raises(WeightError):
        QTensor(torch.zeros(size, dtype=torch.uint8), (1, 32), scheme)


def test_a_weight_that_has_no_blocks_is_named() -> None:
    with pytest.raises(WeightError, match=r"tensor head: its last axis is 48"):
        QTensor.from_float(torch.randn(3, 48), name="head")
    with pytest.raises(WeightError, match="tensor head: it contains inf or NaN"):
        QTensor.from_float(torch.full((1, 32), torch.inf), name="head")


class Classifier(nn.Module):
    """An embedding, a convolution and two linears, one of them plain."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.conv = nn.Conv1d(64, 32, 3, padding=1)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Score a sequence."""
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        return self.down(functional.relu(self.up(x)))


@pytest.mark.parametrize("scheme", ["q4_0", "q8_1"])
def test_a_model_with_blocks_is_exported_as_its_blocks(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(0)
    model = Classifier().eval()
    model.table.weight = nn.Parameter(QTensor.from_float(model.table.weight, scheme), requires_grad=False)
    for module in (model.conv, model.up, model.down):
        quantised(module)
    target = TractNNEF(dynamic_axes={"ids": {0: "B", 1: "S"}})
    ids = torch.randint(50, (2, 7))
    archive = export_model_to_nnef(
        model, (ids,), tmp_path / "model", target, input_names=["ids"], compression_level=None
    )
    assert isinstance(model.up.weight, QTensor)
    stored = read_block_dat(archive / "up.weight.dat")
    assert stored.header.block_format.name == "q4_0"
    assert torch.equal(stored.data, model.up.weight.blob)
    assert (archive / "table.weight.dat").stat().st_size == HEADER_BYTES + model.table.weight.blob.numel()
    other = torch.randint(50, (3, 12))
    with TractWheel().load(archive) as loaded:
        for batch in (ids, other):
            (actual,) = loaded.run([batch.numpy()])
            assert torch.allclose(torch.from_numpy(actual), model(batch), atol=1e-4)


def test_a_weight_that_is_summed_over_its_first_axis_cannot_be_exported(tmp_path: Path) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(QTensor.from_float(torch.randn(64, 32)), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with pytest.raises(GraphError, match="do not lie along the axis"):
        export_model_to_nnef(Transposed(), (torch.randn(2, 64),), tmp_path / "model", TractNNEF())


def test_any_quantizer_can_make_one(weight: torch.Tensor) -> None:
    coarse = QTensor.from_float(weight, quantizer=BUILT_IN["min_max"])
    assert not torch.equal(coarse.blob, QTensor.from_float(weight).blob)
