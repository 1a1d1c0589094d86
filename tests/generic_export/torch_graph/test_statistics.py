"""cov and corrcoef in captures: equal to PyTorch's, whose questions about weights do not export."""

from __future__ import annotations

import pytest
import torch

from generic_export.torch_graph.decompose.patches import corrcoef, cov
from tests.engine_check import check

torch.manual_seed(4)
ROWS = torch.randn(3, 5)
FREQUENCIES, IMPORTANCE = torch.tensor([1, 2, 3, 1, 1]), torch.rand(5)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("frequencies", [None, FREQUENCIES])
@pytest.mark.parametrize("importance", [None, IMPORTANCE])
def test_as_pytorch_has_it(correction: int, frequencies: torch.Tensor | None, importance: torch.Tensor | None) -> None:
    options = {"correction": correction, "fweights": frequencies, "aweights": importance}
    for rows in (ROWS, ROWS[0], (ROWS * 5).to(torch.int64), ROWS.to(torch.complex64)):
        torch.testing.assert_close(cov(rows, **options), torch.cov(rows, **options))
        torch.testing.assert_close(corrcoef(rows), torch.corrcoef(rows))


def test_in_the_engine() -> None:
    def all_of_them(x: torch.Tensor, f: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cov(x, fweights=f, aweights=a), x[0].cov(), torch.corrcoef(x), x.corrcoef()

    check(all_of_them, (ROWS, FREQUENCIES, IMPORTANCE))
