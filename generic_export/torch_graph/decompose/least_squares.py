"""`torch.linalg.lstsq` by the pseudo-inverse, while a module is captured: its own rank is a number of the data's."""

from __future__ import annotations

import torch

from generic_export.errors import CaptureError


class LeastSquares:
    """What `torch.linalg.lstsq` returns, of which the solution alone has a shape that is known.

    Attributes:
        solution: [..., N, K].
    """

    def __init__(self, solution: torch.Tensor) -> None:
        self.solution = solution

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            return self.solution
        raise CaptureError(
            "torch.linalg.lstsq: the number of residuals, the rank and the singular values depend on the data.",
            "Use the solution only: torch.linalg.lstsq(A, B).solution.",
        )

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in ("residuals", "rank", "singular_values"):
            return self[1]
        raise AttributeError(name)


def lstsq(
    input: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> LeastSquares:
    """Return the shortest X that makes A X nearest to B; where A is of full rank there is one only, whatever the driver.

    Args:
        input: A [..., M, N].
        b: B [..., M, K].
        rcond: singular values below this share of the largest count as 0; by default PyTorch's, epsilon times the longer side.
        driver: of LAPACK; all but `gels` give the shortest, and `gels` asks for full rank.
    """
    share = torch.finfo(input.dtype).eps * max(input.shape[-2:]) if rcond is None else rcond
    return LeastSquares(torch.linalg.pinv(input, rtol=share) @ b)


__all__ = ["LeastSquares", "lstsq"]
