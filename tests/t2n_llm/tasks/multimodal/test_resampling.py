"""Position embeddings for the grid of one image: as transformers resamples those of several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import vision_utils

from generic_export import DynamicSize
from generic_export.errors import CaptureError
from t2n_llm.tasks.multimodal.resampling import resampled_places
from tests.engine_check import check

SIDES = st.integers(1, 9)


@given(
    SIDES,
    SIDES,
    st.integers(1, 12),
    st.sampled_from(("bilinear", "bicubic")),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(("border", "zeros")),
)
def test_they_are_those_of_transformers(
    rows: int, columns: int, side: int, mode: str, align_corners: bool, merge: int, padding: str
) -> None:
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    found = resampled_places(grid, side, mode, align_corners, merge, padding)
    expected = vision_utils.get_vision_interpolation_indices_and_weights(
        grid, side, mode, align_corners, merge, padding
    )
    table = torch.randn(side * side)
    torch.testing.assert_close(_resampled(table, found), _resampled(table, expected), atol=1e-4, rtol=0.0)


def _resampled(table: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    places, weights = found
    return (table[places] * weights).sum(-1)


@pytest.mark.parametrize("align_corners", [True, False])
def test_one_graph_has_them_for_every_size(align_corners: bool) -> None:
    table = torch.randn(25, 6)

    def positions(x: torch.Tensor) -> torch.Tensor:
        grid = torch.tensor([[1, x.shape[0], x.shape[1]]])
        places, weights = resampled_places(grid, 5, "bilinear", align_corners, spatial_merge_size=2)
        return x.flatten(0, 1) + (table[places] * weights[:, :, None]).sum(1)

    sizes = [(torch.randn(height, width, 6),) for height, width in ((4, 6), (2, 2), (10, 4))]
    axes = {axis: DynamicSize(name, multiple_of=2) for axis, name in enumerate("HW")}
    check(positions, *sizes, dynamic_axes={"input_0": axes})


def test_another_mode_is_refused() -> None:
    with pytest.raises(CaptureError, match="with the mode 'nearest', not bilinear or bicubic"):
        resampled_places(torch.tensor([[1, 2, 2]]), 4, "nearest")
