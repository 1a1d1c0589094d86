"""What an archive holds, put back into a model: tensors that are the sum of two, in either order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export.nnef.dat import block_header_bytes
from quant.algorithms import BUILT_IN
from quant.packing import pack_q4_0
from t2n_llm.weights.archive_weights import ArchiveWeights, StoredParameter, whole_records


def store(folder: Path, label: str, values: torch.Tensor) -> torch.Tensor:
    """Write blocks, and return what they leave of the values."""
    blocks = BUILT_IN["search"].quantize(values)
    header = block_header_bytes(tuple(values.shape), "q4_0")
    (folder / f"{label}.dat").write_bytes(header + pack_q4_0(blocks).numpy().tobytes())
    return values - blocks.dequantize()


@pytest.mark.parametrize("rest", ["a_before_it", "z_behind_it"])
def test_a_remainder_is_added_wherever_it_lies(tmp_path: Path, rest: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False))
    model[1].weight = model[0].weight  # tied, and so under two names
    weight = model[0].weight.detach().clone()
    store(tmp_path, rest, store(tmp_path, "weight", weight))
    names = ("0.weight", "1.weight")
    tensors = (StoredParameter("weight", names), StoredParameter(rest, names, residual_of="weight"))
    ArchiveWeights(tmp_path, tensors).apply(model)
    for layer in model:
        error = (layer.weight.detach() - weight).square().sum() / weight.square().sum()
        assert 0 < float(error) < 5e-5


def test_the_records_of_a_sum_are_one() -> None:
    plain = {"label": "n", "scheme": "f32", "bytes": 8, "bits_per_weight": 32.0, "residual_of": ""}
    half = {"scheme": "q4_0", "bytes": 18, "bits_per_weight": 4.5}
    records = [plain, half | {"label": "w", "residual_of": ""}, half | {"label": "r", "residual_of": "w"}]
    whole = {"label": "w", "scheme": "q4_0x2", "bytes": 36, "bits_per_weight": 9.0, "residual_of": ""}
    assert whole_records(records) == [plain, whole]
    older = {key: value for key, value in plain.items() if key != "residual_of"}
    assert whole_records([older]) == [older]
