"""`torch.linalg.lstsq` in archives: the shortest solution, whatever the rank."""

from __future__ import annotations

import pytest
import torch

from generic_export.errors import CaptureError
from generic_export.torch_graph.decompose.patches import lstsq
from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "T"}}


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_shortest_solution(shape: tuple[int, int], rank: int) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    sizes = [(torch.randn(batch, rows, length, generator=generator),) for batch, length in ((2, 5), (1, 1), (3, 9))]
    check(
        lambda x: torch.linalg.lstsq(matrix[None].expand(1, -1, -1), x, driver="gelsd").solution,
        *sizes,
        dynamic_axes=AXES,
        rtol=1e-4,
        atol=1e-4,
    )


def test_what_has_no_shape_is_refused() -> None:
    found = lstsq(torch.eye(2), torch.ones(2, 1))
    assert torch.equal(found[0], found.solution)
    with pytest.raises(CaptureError, match="solution only"):
        _ = found.rank
    with pytest.raises(AttributeError):
        _ = found.unknown
