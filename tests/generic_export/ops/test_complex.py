"""Complex numbers travel as pairs on a trailing axis of 2: views, arithmetic, rotary embeddings, products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export.errors import TranslationError
from tests.engine_check import check

Pair = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CASES: dict[str, Pair] = {
    "add": lambda x, y: x + y,
    "sub_real": lambda x, y: x - y.real,
    "real_minus": lambda x, y: x.real - y,
    "mul": lambda x, y: x * y,
    "mul_real": lambda x, y: x * y.imag,
    "mul_number": lambda x, y: x * (1 + 2j) + 1j,
    "div": lambda x, y: x / y,
    "div_real": lambda x, y: x / (y.abs() + 1),
    "reciprocal_of_number": lambda x, y: 1.0 / (x + 3) if False else (x + 3).conj() / 2,
    "conj": lambda x, y: x.conj() * y,
    "exp": lambda x, y: torch.exp(x),
    "square": lambda x, y: x**2,
    "polar": lambda x, y: torch.polar(x.abs(), y.angle()),
    "complex": lambda x, y: torch.complex(x.real, y.imag),
    "sgn": lambda x, y: torch.sgn(x),
    "where": lambda x, y: torch.where(x.real > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x.real > 0, 0.0),
    "shapes": lambda x, y: torch.cat([x, y], dim=0)[1:].unsqueeze(1).expand(-1, 2, -1).transpose(0, 2).flatten(1),
    "sum": lambda x, y: (x * y).sum(-1),
    "matmul": lambda x, y: x @ y.mT,
    "outer": lambda x, y: torch.einsum("ai,bi->ab", x, y),
}


@pytest.mark.parametrize("name", CASES)
def test_complex(name: str) -> None:
    torch.manual_seed(0)

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(CASES[name](torch.view_as_complex(x), torch.view_as_complex(y)).resolve_conj())

    args = (torch.randn(3, 4, 2), torch.randn(3, 4, 2))
    check(model, args, tuple(torch.randn(5, 4, 2) for _ in args), dynamic_axes={f"input_{i}": {0: "N"} for i in (0, 1)})


def test_parts_and_comparisons() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.view_as_complex(x)
        return z.real, z.imag, z.abs(), z.angle(), z == z.conj(), z != z

    check(model, (torch.randn(3, 4, 2),))


class Rotary(torch.nn.Module):
    """Rotary embedding as Llama's first code wrote it, with a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(32.0), 1.0 / 10 ** torch.arange(4.0))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.freqs_cis[positions][None, :, None]
        return torch.view_as_real(turned).flatten(3)


def test_rotary_embedding_with_a_complex_buffer() -> None:
    check(
        Rotary(),
        (torch.randn(2, 6, 3, 8), torch.arange(6)),
        (torch.randn(2, 9, 3, 8), torch.arange(9) + 4),
        dynamic_axes={"input_0": {1: "T"}, "input_1": {0: "T"}},
    )


def test_rotary_embedding_whose_angles_are_computed_in_the_graph() -> None:
    def model(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inverse = 1.0 / 100.0 ** (torch.arange(0, q.shape[-1], 2).float() / q.shape[-1])
        angles = torch.outer(torch.arange(q.shape[1]).float(), inverse)
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        pairs = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
        return tuple(torch.view_as_real(pair * turns).flatten(3) for pair in pairs)

    check(
        model,
        *((torch.randn(b, t, 3, 8), torch.randn(b, t, 2, 8)) for b, t in ((2, 6), (1, 1), (3, 17))),
        dynamic_axes={f"input_{i}": {0: "B", 1: "T"} for i in (0, 1)},
    )


@pytest.mark.parametrize("function", [torch.abs, torch.conj, lambda x: x * x[:1]])
def test_a_complex_input_is_pairs(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, other = (torch.randn(size, 2, dtype=torch.complex64) for size in (3, 5))
    text = check(function, (x,), (other,), dynamic_axes={"input_0": {0: "N"}})
    assert 'shape=[N, 2, 2], datum_type="f32"' in text


def test_an_operator_without_complex_form_is_refused() -> None:
    with pytest.raises(TranslationError, match="complex"):
        check(lambda x: torch.view_as_real(torch.tan(torch.view_as_complex(x))), (torch.randn(3, 2),))


def test_tensors_filled_with_a_complex_number() -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        ones = torch.full((2, 3), 1, dtype=torch.complex64) + torch.full((2, 3), 2 - 1j)
        return torch.view_as_real(ones * x + torch.zeros(2, 3, dtype=torch.complex64))

    check(filled, (torch.randn(2, 3),))
