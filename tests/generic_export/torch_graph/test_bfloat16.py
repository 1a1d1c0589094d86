"""Arithmetic in bf16 inside a model of another element type, in the engine, bit for bit."""

from __future__ import annotations

import pytest
import torch

from generic_export.errors import T2NError
from generic_export.inference_target import TractNNEF
from tests.engine_check import check


def _positions_biased(x: torch.Tensor) -> torch.Tensor:
    """Falcon's ALiBi: slopes and positions in bf16, then in the model's own element type."""
    slopes = torch.pow(torch.full((), 0.7, dtype=torch.float32), torch.arange(1, 7))
    positions = torch.ones_like(x[0], dtype=torch.int64).cumsum(-1) - 1
    biases = slopes[:, None].bfloat16() * positions[None, :]
    return biases.reshape(1, 6, -1).to(x.dtype) + x[:, None, :]


def _chain(x: torch.Tensor) -> torch.Tensor:
    narrow = x.bfloat16()
    return (-(narrow * narrow - narrow).transpose(0, 1) / (narrow + x.bfloat16()).t()).float()


def test_positions_beyond_what_bf16_counts_are_rounded_as_pytorch_does() -> None:
    """Of positions from 256 on bf16 has every second one, then every fourth: ties are the rule."""
    check(
        _positions_biased,
        (torch.zeros(1, 40),),
        (torch.zeros(1, 3000),),
        dynamic_axes={"input_0": {1: "N"}},
        rtol=0,
        atol=0,
    )


def test_arithmetic_rounds_at_every_step() -> None:
    near_the_next_power = torch.tensor([[1.9999999, 1.9960938], [-3.9999998, 255.99998]])
    values = [near_the_next_power, torch.randn(64, 2) * 100, torch.rand(64, 2) * 1e-6 + 1e-7]
    check(_chain, (values[0],), *((v,) for v in values[1:]), dynamic_axes={"input_0": {0: "N"}}, rtol=0, atol=0)


def test_a_graph_in_half_precision_gets_the_rounded_values() -> None:
    check(_positions_biased, (torch.zeros(1, 500, dtype=torch.float16),), rtol=0, atol=0)


@pytest.mark.parametrize("model", [lambda x: (x.bfloat16() @ x.bfloat16().t()).float(), lambda x: x.bfloat16() * 2])
def test_what_has_no_exact_form_is_refused_as_before(model: object) -> None:
    with pytest.raises(T2NError, match=r"tract has no dtype torch\.bfloat16"):
        check(model, (torch.randn(3, 3),), target=TractNNEF(check_io=False))  # type: ignore[arg-type]
