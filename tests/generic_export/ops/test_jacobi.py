"""Singular values and eigenvalues in the engine; vectors up to their signs, as no library says which."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.ops.jacobi import eigh, svd
from tests.engine_check import check

torch.manual_seed(2)
TALL = torch.randn(3, 6, 4)
SYMMETRIC = TALL.mT @ TALL - 2.0 * torch.eye(4)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def test_singular_values() -> None:
    def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, sizes, right = torch.linalg.svd(x, full_matrices=False)
        return (
            torch.linalg.svdvals(x[..., :3]),
            left.abs(),
            sizes,
            right.abs(),
            (left * sizes.unsqueeze(-2)) @ right,
            torch.linalg.matrix_rank(x),
            torch.linalg.cond(x),
            torch.linalg.matrix_norm(x, "nuc"),
        )

    check(values, (TALL,), (TALL[:2],), dynamic_axes={"input_0": {0: "N"}}, **CLOSE)


def test_spectral_norm() -> None:
    """PyTorch freezes the batch in it."""
    check(lambda x: torch.linalg.matrix_norm(x, 2), (TALL,), **CLOSE)


def test_eigenvalues() -> None:
    def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes, vectors = torch.linalg.eigh(x)
        upper = torch.linalg.eigvalsh(torch.triu(x), UPLO="U")
        return sizes, vectors.abs(), (vectors * sizes.unsqueeze(-2)) @ vectors.mT, upper

    check(values, (SYMMETRIC,), **CLOSE)


def test_pseudoinverses() -> None:
    def inverses(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low_rank = x[..., :2] @ x[..., :2].mT
        return (
            torch.linalg.pinv(x),
            torch.linalg.pinv(x.mT, atol=0.1, rtol=0.5),
            torch.linalg.pinv(y, hermitian=True),
            torch.linalg.pinv(low_rank, hermitian=True, rtol=1e-4),
            torch.pinverse(low_rank, rcond=1e-4),
        )

    check(inverses, (TALL, SYMMETRIC), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not hasattr(torch.linalg, "polar"), reason="torch.linalg.polar is in PyTorch 2.15 and later")
def test_polar_decompositions() -> None:
    def factors(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *torch.linalg.polar(x), *torch.linalg.polar(x[..., :4, :])

    check(factors, (TALL,), (TALL[:2],), dynamic_axes={"input_0": {0: "N"}}, **CLOSE)


def test_missing_directions_are_orthonormal_ones() -> None:
    matrix = torch.zeros(5, 3)
    matrix[:, 0] = 1.0
    left, sizes, right = svd(matrix, full_matrices=True)
    torch.testing.assert_close(left.mT @ left, torch.eye(5))
    torch.testing.assert_close(right @ right.mT, torch.eye(3))
    torch.testing.assert_close((left[:, :3] * sizes) @ right, matrix)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 2**31))
def test_of_any_shape_and_rank(rows: int, columns: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    matrix = (factors[0] @ factors[1]).double()
    left, sizes, right = svd(matrix)
    torch.testing.assert_close(sizes, torch.linalg.svdvals(matrix), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close((left * sizes) @ right, matrix)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.integers(0, 2**31))
def test_eigenvalues_of_both_signs(size: int, value: float, seed: int) -> None:
    """Eigenvalues that differ in their sign alone have one singular value."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    signs = torch.where(torch.arange(size) % 2 == 0, value, -value).double()
    matrix = (basis * signs) @ basis.mT
    sizes, vectors = eigh(matrix)
    torch.testing.assert_close(sizes, torch.sort(signs)[0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close((vectors * sizes) @ vectors.mT, matrix, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("size", [48])
def test_larger_ones_converge(size: int) -> None:
    matrix = torch.randn(size, size, dtype=torch.float64)
    torch.testing.assert_close(svd(matrix)[1], torch.linalg.svdvals(matrix))
