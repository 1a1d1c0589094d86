"""Symmetric matrices by strips: the same sums as written plainly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import symmetric
from quant.symmetric import add_products, mirrored, quadratic_form


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 80),
    rows=st.integers(1, 20),
    narrowest=st.sampled_from([1, 7, 32, 256]),
    seed=st.integers(0, 99),
)
def test_the_sums_are_those_written_plainly(size: int, rows: int, narrowest: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(-4, 5, (rows, size), generator=generator).float() for _ in range(2)]
    weight = torch.randint(-4, 5, (3, size), generator=generator).float()
    total = torch.zeros(size, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "_NARROWEST", narrowest)
        for batch in batches:
            add_products(total, batch)
        hessian = mirrored(total.clone())
        power = quadratic_form(weight, hessian)
    plain = sum(batch.T @ batch for batch in batches)
    assert torch.equal(hessian, plain)  # small integers: exact in any order
    assert power == float((weight @ plain * weight).sum())
