"""QR and its parts, signs as LAPACK's."""

from __future__ import annotations

import torch

from tests.engine_check import check

torch.manual_seed(1)
TALL = torch.randn(3, 6, 4)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def test_qr_in_its_modes() -> None:
    def all_modes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            *torch.linalg.qr(x),
            *torch.linalg.qr(x, mode="complete"),
            torch.linalg.qr(x, mode="r")[1],
            *torch.linalg.qr(x.mT),
        )

    check(all_modes, (TALL,), (TALL[:1],), dynamic_axes={"input_0": {0: "N"}}, **CLOSE)


def test_columns_that_have_nothing_below_the_diagonal_stay() -> None:
    check(lambda x: (*torch.linalg.qr(x), *torch.geqrf(x)), (torch.triu(torch.randn(4, 4)),), **CLOSE)


def test_reflections() -> None:
    def parts(packed: torch.Tensor, tau: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.linalg.householder_product(packed, tau),
            torch.ormqr(packed, tau, other),
            torch.ormqr(packed, tau, other.mT, left=False, transpose=True),
        )

    check(parts, (*torch.geqrf(TALL), TALL), **CLOSE)
    check(lambda x: tuple(torch.geqrf(x)), (TALL,), **CLOSE)
    check(lambda x: tuple(torch.geqrf(x.mT)), (TALL,), **CLOSE)
